# SPDX-License-Identifier: Apache-2.0
"""Processes that do one thing together: when one fails or is ended, all end."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque

from vllm_dflash.errors import option_error

# Exit code of a run that was told to stop and can be gone on with.
INTERRUPTED = 75
# An engine needs some seconds to end its own processes.
_GRACE_S = 20.0
_NAME = r"(?:\w+\.)*\w*(?:Error|Exception|Exit)\b"
_ERROR_LINE = re.compile(rf"^(?:\[rank\d+\]: )?(?:error: |{_NAME})")
# What vLLM logs of a fault in a process of an engine, whose own error is "see above".
_CAUSE_LINE = re.compile(rf"^\((?:EngineCore|Worker)[^)]*\) ERROR [^\]]*\] ({_NAME}.*)")
_SEE_ABOVE = ("EngineDeadError", "See root cause above")


class _Child:
    """A process in a session of its own, whose output is passed on."""

    def __init__(self, command: list[str], env: dict[str, str], label: str):
        self.label = label
        # The terminal's Ctrl-C reaches this process only, which then ends the others
        # in order; and what a child leaves behind can be ended as its group.
        self.process = subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._lines: deque[str] = deque(maxlen=2000)
        self._reader = threading.Thread(target=self._pass_on, daemon=True)
        self._reader.start()

    def _pass_on(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.append(line.rstrip())
            sys.stderr.write(self.label + line)
            sys.stderr.flush()

    def error(self) -> str:
        """Return what it said that went wrong: a line, and the indented ones after."""
        self._reader.join(timeout=5)
        lines = [line for line in self._lines if line.strip()]
        found = [i for i, line in enumerate(lines) if _ERROR_LINE.match(line)]
        if not found:
            return (lines or ["it said nothing"])[-1]
        first, *rest = lines[found[-1] :]
        if any(word in first for word in _SEE_ABOVE):
            causes = filter(None, map(_CAUSE_LINE.match, lines))
            return next((cause[1] for cause in causes), first)
        more = itertools.takewhile(lambda line: line.startswith(" "), rest)
        return "\n".join([first, *more])

    def end_group(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def run_together(
    commands: list[list[str]], env: dict[str, str], way_out: str, name: str = "engine"
) -> None:
    """Run commands side by side until all have ended well.

    Their output is passed on to this process's stderr. Ctrl-C and SIGTERM end all.

    Args:
        commands: One a process.
        env: Of all of them.
        way_out: What to type when one ends without a message of its own.
        name: What a process is called in messages.

    Raises:
        ValueError: One failed. The others were ended; the message is its error.
        KeyboardInterrupt: This process or one of the others was told to stop.
    """
    children: list[_Child] = []
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        for index, command in enumerate(commands):
            label = f"[{name} {index}] " if len(commands) > 1 else ""
            children.append(_Child(command, env, label))
        while True:
            codes = [child.process.poll() for child in children]
            for index, code in enumerate(codes):
                if code == INTERRUPTED:
                    raise KeyboardInterrupt
                if code:
                    raise _failure(f"{name} {index}", code, children[index], way_out)
            if None not in codes:
                return
            time.sleep(0.1)
    finally:
        try:
            _end(children)
        finally:
            signal.signal(signal.SIGTERM, before)


def _failure(name: str, code: int, child: _Child, way_out: str) -> ValueError:
    text = child.error()
    if text.startswith("error: "):
        return ValueError(text.removeprefix("error: "))
    return option_error(
        f"{name} ended with exit code {code} ({text})",
        "Its whole output is above",
        way_out,
    )


def _end(children: list[_Child]) -> None:
    """End what still runs: politely, then surely."""
    running = [child for child in children if child.process.poll() is None]
    try:
        for child in running:
            child.process.send_signal(signal.SIGINT)
        end = time.monotonic() + _GRACE_S
        for child in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.process.wait(timeout=max(0.0, end - time.monotonic()))
    finally:
        for child in children:
            if child.process.poll() != 0:
                child.end_group()


def obey(parent: int) -> None:
    """Make this process one of `run_together`: it stops when told to, or left alone.

    Args:
        parent: Process id of the one that started this one.
    """
    # A shell's background job ignores SIGINT, and its children inherit that.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=watch, daemon=True).start()
