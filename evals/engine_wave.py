# SPDX-License-Identifier: Apache-2.0
"""Several engines in processes of their own: started together, measured in turn.

Starting an engine is CPU work, so the engines of a comparison start at the same time;
each then waits for its turn and measures while the others are idle. An engine may hand
its turn on and get another one, so that a drift of the machine meets all of them.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

_READY, _PAUSE, _DONE, _RESULT = "@READY", "@PAUSE", "@DONE", "@RESULT "


def announce_ready() -> None:
    """Child: the engine is up; returns when its turn has come."""
    print(_READY, flush=True)
    sys.stdin.readline()


def hand_on() -> None:
    """Child: let the other engines measure; returns at the next turn."""
    print(_PAUSE, flush=True)
    sys.stdin.readline()


def report(row: dict[str, Any]) -> None:
    """Child: one row of the comparison."""
    print(_RESULT + json.dumps(row), flush=True)


def announce_done() -> None:
    """Child: measured everything; the parent ends the process."""
    print(_DONE, flush=True)
    sys.stdin.readline()


class Child:
    """One engine process and the lines it prints."""

    def __init__(self, engine: str, command: list[str], log: Path):
        self.engine = engine
        self.rows: list[dict[str, Any]] = []
        self.ready, self.turn_over = threading.Event(), threading.Event()
        self.done = False
        self.log = log
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log.open("w"),
            text=True,
            start_new_session=True,
        )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(_READY):
                self.ready.set()
            elif line.startswith((_PAUSE, _DONE)):
                self.done = line.startswith(_DONE)
                self.turn_over.set()
            elif line.startswith(_RESULT):
                self.rows.append(json.loads(line.removeprefix(_RESULT)))
                print(line[:200].rstrip(), flush=True)
        if not self.done:
            print(f"engine {self.engine} died:", self.log.read_text()[-3000:])
        self.done = True
        self.ready.set()
        self.turn_over.set()

    def go(self) -> None:
        """Give the engine a turn and wait for its end."""
        self.turn_over.clear()
        if self.done:
            return
        assert self.process.stdin is not None
        try:
            self.process.stdin.write("GO\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            return
        self.turn_over.wait()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)


def run_wave(commands: dict[str, list[str]], log_dir: Path) -> list[dict[str, Any]]:
    """Run one process for each named command; return the rows of all."""
    children: list[Child] = []
    try:
        for name, command in commands.items():
            children.append(Child(name, command, log_dir / f"{name}.log"))
        for child in children:
            child.ready.wait()
        waiting = children
        while waiting:
            for child in waiting:
                child.go()
                if child.done:
                    child.kill()
            waiting = [child for child in waiting if not child.done]
    finally:
        for child in children:
            child.kill()
    return [row for child in children for row in child.rows]
