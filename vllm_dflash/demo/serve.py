# SPDX-License-Identifier: Apache-2.0
"""Run ``vllm serve`` as a subprocess that always ends with its parent's wish."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import psutil

from vllm_dflash.demo.client import Client, RequestError
from vllm_dflash.demo.fetch import Log
from vllm_dflash.demo.pair import ModelPair

HOST = "127.0.0.1"
START_TIMEOUT_S = 900
STOP_TIMEOUT_S = 20
# What makes vLLM's CPU build run Model Runner V2, Triton kernels in the interpreter.
CPU_RUNNER_ENV = {
    "VLLM_DFLASH_CPU": "1",
    "VLLM_USE_V2_MODEL_RUNNER": "1",
    "TRITON_INTERPRET": "1",
}
_CPU_ARGS = ["--dtype", "float32", "--enforce-eager", "--max-num-seqs", "8"]
_GPU_ARGS = ["--dtype", "bfloat16"]
# The line that names what went wrong; vLLM reports it again from each process above.
_CAUSE = re.compile(r"(?:^|\] )(?:[\w.]+\.)?[A-Z]\w*(?:Error|Exception): ")


class ServerError(RuntimeError):
    """``vllm serve`` did not come up or went away; the message has its last lines."""


@dataclass(frozen=True)
class ServerSpec:
    """One server run: everything that makes it differ from another."""

    label: str
    pair: ModelPair
    is_cpu: bool
    port: int
    speculative_config: dict[str, Any] | None = None
    with_plugin: bool = True
    max_model_len: int = 2048
    extra_args: list[str] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)

    def command(self) -> list[str]:
        """Return the command line, ``vllm serve`` run by this Python."""
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve"]
        command += self.serve_args()
        return command

    def serve_args(self) -> list[str]:
        """Return what follows ``vllm serve``."""
        args = [self.pair.target, "--served-model-name", self.pair.served_name]
        args += ["--host", HOST, "--port", str(self.port)]
        args += ["--max-model-len", str(self.max_model_len)]
        args += _CPU_ARGS if self.is_cpu else _GPU_ARGS
        if self.speculative_config is not None:
            args += ["--speculative-config", json.dumps(self.speculative_config)]
        return args + self.extra_args

    def environment(self) -> dict[str, str]:
        """Return the environment of the server process."""
        env = dict(os.environ)
        for name in (*CPU_RUNNER_ENV, "VLLM_PLUGINS"):
            env.pop(name, None)
        if not self.with_plugin:
            env["VLLM_PLUGINS"] = ""
        elif self.is_cpu:
            env.update(CPU_RUNNER_ENV)
            # vLLM keeps a core for its front end; with few cores the model needs all,
            # and a verify of many rows uses them better than decoding one row does.
            env.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
            env.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))
        if self.is_cpu:
            env.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        if self.pair.is_embedded:
            # Both models are local directories: no look-up on a model hub.
            env["HF_HUB_OFFLINE"] = "1"
        env.setdefault("VLLM_NO_USAGE_STATS", "1")
        return env | self.variables


class VLLMServer:
    """A running ``vllm serve``; a context manager that ends its process group."""

    # What its messages call it.
    program = "vllm serve"

    def __init__(self, spec: ServerSpec, log_path: Path, log: Log) -> None:
        self.spec = spec
        self.log_path = log_path
        self.client = Client(f"http://{HOST}:{spec.port}", spec.pair.served_name)
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        self._log_file: IO[bytes] | None = None

    def __enter__(self) -> Self:
        require_free_port(self.spec.port)
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        # It may hold what was asked; an earlier run's file keeps its mode otherwise.
        self.log_path.touch(mode=0o600)
        self.log_path.chmod(0o600)
        self._log_file = self.log_path.open("wb")
        try:
            # A session of its own: Ctrl-C reaches this process only, which then ends
            # the whole group, engine and workers included.
            self._process = subprocess.Popen(
                self.spec.command(),
                env=self.spec.environment(),
                stdin=subprocess.DEVNULL,
                stdout=self._log_file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            self._wait_until_healthy()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """End the server: politely first, then the whole process group."""
        if self._process is not None:
            _end_process_group(self._process)
            self._process = None
        if self._log_file is not None:
            self._log_file.close()
            self._log_file = None

    def wait(self) -> int:
        """Block until the server ends by itself and return its exit code."""
        assert self._process is not None
        return self._process.wait()

    def processes(self) -> list[psutil.Process]:
        """Return the server and all that it has started."""
        assert self._process is not None
        first = psutil.Process(self._process.pid)
        return [first, *first.children(recursive=True)]

    def describe_log(self) -> str:
        """Return the cause of the server's end, its last lines and where the log is."""
        return describe_log(self.log_path)

    def _wait_until_healthy(self) -> None:
        assert self._process is not None
        started = time.monotonic()
        next_report_s = 5.0
        while True:
            elapsed_s = time.monotonic() - started
            if self._process.poll() is not None:
                raise ServerError(
                    f"{self.program} ({self.spec.label}) stopped with exit code "
                    f"{self._process.returncode} before it was ready. "
                    f"{self.describe_log()}"
                )
            if elapsed_s > START_TIMEOUT_S:
                raise ServerError(
                    f"{self.program} ({self.spec.label}) was not ready after "
                    f"{START_TIMEOUT_S} s. The log: {self.log_path}"
                )
            try:
                self.client.check_health()
            except RequestError:
                pass
            else:
                self._log(f"ready after {elapsed_s:.0f} s")
                return
            if elapsed_s >= next_report_s:
                self._log(f"starting, {elapsed_s:.0f} s ({self._stage()})")
                next_report_s += 5.0
            time.sleep(0.25)

    def _stage(self) -> str:
        with self.log_path.open(encoding="utf-8", errors="replace") as file:
            lines = deque((line for line in file if line.strip()), 1)
        message = (lines or ["no output yet"])[-1].rpartition("] ")[2].strip()
        return message if len(message) <= 60 else message[:57] + "..."


def require_free_port(port: int) -> None:
    """Refuse a port that something listens on already.

    Raises:
        ServerError: the port is in use.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise ServerError(
                f"port {port} of {HOST} can't be used ({error.strerror}). Any free "
                f"port is allowed. Type: --port {port + 1}"
            ) from error


def describe_log(path: Path) -> str:
    """Return what ended an engine, by its log; the last lines, and where the log is."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    causes = [line for line in lines if _CAUSE.search(line)]
    cause = f"The cause:\n{causes[0]}\n" if causes else ""
    tail = "\n".join(lines[-15:])
    return f"{cause}Its last lines:\n{tail}\nThe whole log: {path}"


def free_port() -> int:
    """Return a port that nothing listens on at this moment."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]


def _end_process_group(process: subprocess.Popen[bytes]) -> None:
    # The group outlives its leader while an engine process is still alive, so the
    # group is signalled even when the leader has gone.
    try:
        if _signal_group(process.pid, signal.SIGTERM):
            deadline = time.monotonic() + STOP_TIMEOUT_S
            while time.monotonic() < deadline and _signal_group(process.pid, 0):
                process.poll()
                time.sleep(0.1)
    finally:
        # Also when a second Ctrl-C cuts the wait short.
        _signal_group(process.pid, signal.SIGKILL)
        process.wait()


def _signal_group(group: int, signal_number: int) -> bool:
    try:
        os.killpg(group, signal_number)
    except ProcessLookupError:
        return False
    return True
