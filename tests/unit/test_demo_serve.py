# SPDX-License-Identifier: Apache-2.0
"""The demo's servers: what they are started with, and that none is left behind."""

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

import pytest

from vllm_dflash.demo import compare, serve
from vllm_dflash.demo.client import RequestError
from vllm_dflash.demo.pair import ModelPair

FAKE_SERVER = Path(__file__).resolve().parents[1] / "helpers" / "fake_vllm_server.py"
PAIR = ModelPair("/models/target", "/models/draft", "target", is_embedded=True)
TREE = {"method": "dflash", "model": PAIR.draft, "ddtree": {"budget": 16}}


def _ignore(text: str) -> None:
    del text


def _spec(**changes) -> serve.ServerSpec:
    values = {"label": "tree", "pair": PAIR, "is_cpu": True, "port": 8000, **changes}
    return serve.ServerSpec(**values)


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Return a function that makes a server out of the stand-in."""

    def start(mode: str = "ok") -> serve.VLLMServer:
        port = serve.free_port()
        command = [sys.executable, str(FAKE_SERVER), str(port), mode]
        command += [str(tmp_path / "child_pid")]
        monkeypatch.setattr(serve.ServerSpec, "command", lambda self: command)
        return serve.VLLMServer(_spec(port=port), tmp_path / "log", _ignore)

    return start


def _is_running(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    # A zombie has ended; its parent just has not looked yet.
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


def _wait_until_gone(pid: int) -> bool:
    deadline = time.monotonic() + 5
    while _is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not _is_running(pid)


def test_cpu_server_gets_the_runner_and_an_exact_dtype(monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", "something_else")
    spec = _spec(speculative_config=TREE)
    env = spec.environment()
    assert serve.CPU_RUNNER_ENV.items() <= env.items()
    assert "VLLM_PLUGINS" not in env
    assert env["HF_HUB_OFFLINE"] == "1"
    args = spec.serve_args()
    assert args[args.index("--dtype") + 1] == "float32"
    assert args[args.index("--host") + 1] == "127.0.0.1"
    assert "--enforce-eager" in args
    assert json.loads(args[args.index("--speculative-config") + 1]) == TREE


def test_gpu_server_gets_no_cpu_variable(monkeypatch):
    for name in serve.CPU_RUNNER_ENV:
        monkeypatch.setenv(name, "1")
    # Where `vllm-dflash calibrate` has kept its schedules.
    monkeypatch.setenv("VLLM_DFLASH_CACHE", "/somewhere")
    spec = _spec(is_cpu=False)
    assert spec.environment()["VLLM_DFLASH_CACHE"] == "/somewhere"
    assert not serve.CPU_RUNNER_ENV.keys() & spec.environment().keys()
    args = spec.serve_args()
    assert args[args.index("--dtype") + 1] == "bfloat16"
    assert "--enforce-eager" not in args
    assert "--speculative-config" not in args


def test_default_server_has_no_plugin(monkeypatch):
    monkeypatch.setenv("VLLM_DFLASH_CPU", "1")
    env = _spec(with_plugin=False).environment()
    assert env["VLLM_PLUGINS"] == ""
    assert not serve.CPU_RUNNER_ENV.keys() & env.keys()


def test_own_pair_may_be_looked_up_on_a_hub(monkeypatch):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    pair = ModelPair("org/target", "org/draft", "org/target", is_embedded=False)
    assert "HF_HUB_OFFLINE" not in _spec(pair=pair).environment()


def test_answers_are_streamed_and_measured(start):
    with start() as server:
        question = compare.user_turn("How?")
        pieces = list(server.client.stream(question, 8))
        row = compare.measure("tree", server.client, 8, _ignore)
    assert pieces == ["Throw", " and", " catch.\n"]
    assert row.outputs == [[11, 12, 13]] * len(compare.QUESTIONS)
    # The stand-in counts 2 verifies and 5 accepted tokens an answer.
    assert row.acceptance_length == pytest.approx(1 + 5 / 2)


def test_refused_request_carries_the_servers_words(start):
    with start() as server:
        payload = {"temperature": 1}
        with (
            pytest.raises(RequestError, match=r"400.*not greedy"),
            server.client._open("/v1/chat/completions", payload),
        ):
            pass


def test_leaving_ends_the_servers_children_too(start, tmp_path):
    with start() as server:
        leader = server._process.pid
        child = int((tmp_path / "child_pid").read_text())
        assert _is_running(child)
    assert _wait_until_gone(leader)
    assert _wait_until_gone(child)


def test_error_inside_ends_the_server(start, tmp_path):
    with pytest.raises(RuntimeError, match="inside"), start() as server:
        leader = server._process.pid
        raise RuntimeError("inside")
    assert _wait_until_gone(leader)


def test_server_that_ignores_the_polite_signal_is_ended(start, monkeypatch):
    monkeypatch.setattr(serve, "STOP_TIMEOUT_S", 0.5)
    with start("stubborn") as server:
        leader = server._process.pid
    assert _wait_until_gone(leader)


def test_children_of_a_server_that_died_are_ended(start, tmp_path):
    with start() as server:
        child = int((tmp_path / "child_pid").read_text())
        os.kill(server._process.pid, signal.SIGKILL)
        server.wait()
        assert _is_running(child)
    assert _wait_until_gone(child)


def test_server_that_does_not_come_up_names_the_cause(start):
    with pytest.raises(serve.ServerError) as caught, start("crash"):
        pass
    message = str(caught.value)
    assert "exit code 3" in message
    cause = message.split("The cause:\n")[1].splitlines()[0]
    assert cause.endswith("ValueError: no such budget")


def test_used_port_is_refused_before_anything_starts(tmp_path):
    with socket.socket() as other:
        other.bind((serve.HOST, 0))
        other.listen()
        port = other.getsockname()[1]
        server = serve.VLLMServer(_spec(port=port), tmp_path / "log", _ignore)
        with pytest.raises(serve.ServerError, match=f"--port {port + 1}"), server:
            pass
    assert not (tmp_path / "log").exists()
