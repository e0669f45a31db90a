# SPDX-License-Identifier: Apache-2.0
"""Processes that run together end together."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from training_runs import ROOT

from vllm_dflash_training.processes import run_together

WAY_OUT = "--stages generate"
# Starts a process of its own, as an engine does, says who both are, and stays.
STAY = """
import os, subprocess, sys, time
sys.path[:0] = [{training!r}, {root!r}]
from vllm_dflash_training.processes import obey
obey({parent})
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
with open(sys.argv[1] + ".part", "w") as file:
    file.write(f"{{os.getpid()}} {{child.pid}}")
os.replace(sys.argv[1] + ".part", sys.argv[1])
try:
    time.sleep(60)
finally:
    print("ended in order", flush=True)
"""
PARENT = """
import os, signal, sys
# A shell's background jobs ignore it, and so would this one.
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.path[:0] = [{training!r}, {root!r}]
from vllm_dflash_training.processes import run_together
stay = {stay!r}.replace("PARENT", str(os.getpid()))
try:
    run_together(
        [[sys.executable, "-c", stay, path] for path in sys.argv[1:]],
        dict(os.environ),
        "x",
    )
except KeyboardInterrupt:
    sys.exit(75)
"""
PATHS = dict(training=str(ROOT / "training"), root=str(ROOT))


def python(code: str, *words: str) -> list[str]:
    return [sys.executable, "-c", code, *words]


def stay(parent: int | str) -> str:
    return STAY.format(parent=parent, **PATHS)


def wait_until(condition, seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    try:
        # A zombie that nobody waits for has ended too.
        return Path(f"/proc/{pid}/stat").read_text().split(") ")[1][0] != "Z"
    except FileNotFoundError:
        return False


def pids(files: list[Path]) -> list[int]:
    return [int(pid) for file in files for pid in file.read_text().split()]


def test_all_are_run_and_their_output_is_passed_on(capfd, tmp_path):
    code = "import os, sys; print(sys.argv[1], os.environ['WORD'])"
    env = {**os.environ, "WORD": "both"}
    run_together([python(code, "a"), python(code, "b")], env, WAY_OUT)
    lines = sorted(capfd.readouterr().err.splitlines())
    assert lines == ["[engine 0] a both", "[engine 1] b both"]
    run_together([python(code, "a")], env, WAY_OUT)
    assert capfd.readouterr().err == "a both\n"


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("raise MemoryError('no room')", r"engine 1 .*MemoryError: no room.*Type --st"),
        (
            "print('error: steps is wrong.\\n  got 0.\\nbye'); exit(2)",
            r"^steps is wrong\.\n  got 0\.$",
        ),
        (
            "print('(Worker pid=7) ERROR 11-30 [x.py:3] Traceback:')\n"
            "print('(Worker pid=7) ERROR 11-30 [x.py:3] RuntimeError: no offset')\n"
            "print('(EngineCore pid=7) ERROR 11-30 [x.py:3] RuntimeError: a worker')\n"
            "print('vllm.exceptions.EngineDeadError: see above')\nexit(1)",
            r"engine 1 .*\(RuntimeError: no offset\)",
        ),
        ("import os; os.kill(os.getpid(), 9)", r"engine 1 ended with exit code -9"),
    ],
)
def test_a_failed_one_ends_the_others_and_says_why(tmp_path, capfd, fault, message):
    file = tmp_path / "pids"
    code = (
        f"import pathlib, time\nwhile not pathlib.Path({str(file)!r}).exists():\n"
        f"    time.sleep(0.05)\n{fault}"
    )
    others = [python(stay(os.getpid()), str(file)), python(code)]
    with pytest.raises(ValueError, match=message):
        run_together(others, dict(os.environ), WAY_OUT)
    assert "[engine 0] ended in order" in capfd.readouterr().err
    wait_until(lambda: not any(map(is_running, pids([file]))), seconds=2)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_who_ends_the_first_process_ends_all(tmp_path, number):
    files = [tmp_path / "a", tmp_path / "b"]
    code = PARENT.format(stay=stay("PARENT"), **PATHS)
    parent = subprocess.Popen(python(code, *map(str, files)))
    try:
        wait_until(lambda: all(file.exists() for file in files))
        parent.send_signal(number)
        code = parent.wait(timeout=30)
        assert code == (-9 if number == signal.SIGKILL else 75)
        engines = pids(files)[::2]
        wait_until(lambda: not any(map(is_running, engines)))
        if number != signal.SIGKILL:
            # Also what the engines started.
            wait_until(lambda: not any(map(is_running, pids(files))), seconds=2)
    finally:
        parent.kill()
        for pid in pids([file for file in files if file.exists()]):
            if is_running(pid):
                os.kill(pid, signal.SIGKILL)
