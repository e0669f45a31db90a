# SPDX-License-Identifier: Apache-2.0
"""Runs code that a model wrote against unit tests, in a process of its own.

The process gets an empty folder, no environment, limits on time, memory, file size and
open files, can start no process, and is ended after a time. Where the caller is root it
becomes `nobody` first, and it loses the network where the kernel allows that. This
keeps accidents in; it is no wall against an attacker, so the task is marked
``unsafe_code`` and lm-eval refuses it unless told otherwise. Run it in a container.
"""

import contextlib
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile

TIMEOUT_S = 5.0
MEMORY_BYTES = 1 << 30
_FENCE = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)

# Runs in the child: limits first, then the program, then the token that only a program
# which came to its end can have printed.
_CHILD = """
import ctypes, os, resource, sys
# The standard library may be out of reach for `nobody`.
import bisect, collections, copy, datetime, functools, heapq, itertools, json, math
import operator, random, re, statistics, string, typing
token, cpu_s, memory = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
CLONE_NEWNET, CLONE_NEWUSER = 0x40000000, 0x10000000
libc = ctypes.CDLL(None)
if os.geteuid() == 0:
    libc.unshare(CLONE_NEWNET)
    os.setgroups([]), os.setgid(65534), os.setuid(65534)
else:
    libc.unshare(CLONE_NEWNET | CLONE_NEWUSER)
source = sys.stdin.read()
for limit, value in (
    (resource.RLIMIT_CPU, cpu_s),
    (resource.RLIMIT_AS, memory),
    (resource.RLIMIT_FSIZE, 1 << 20),
    (resource.RLIMIT_NOFILE, 32),
    (resource.RLIMIT_CORE, 0),
    (resource.RLIMIT_NPROC, 0),
):
    resource.setrlimit(limit, (value, value))
out = os.dup(1)
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
exec(compile(source, "program", "exec"), {"__name__": "__main__"})
os.write(out, token.encode())
"""


def extract_code(response: str) -> str:
    """Return the first fenced block of a response, or all of it."""
    match = _FENCE.search(response)
    return match[1] if match else response


def passes(program: str, timeout_s: float = TIMEOUT_S) -> bool:
    """Return whether ``program`` runs to its end without an exception in time."""
    token = secrets.token_hex(16)
    limits = [str(int(timeout_s) + 1), str(MEMORY_BYTES)]
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _CHILD, token, *limits],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={},
            start_new_session=True,
        )
        try:
            data = program.encode(errors="replace")
            output, _ = process.communicate(data, timeout=timeout_s)
        except subprocess.TimeoutExpired:
            return False
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return output == token.encode()


def score_code(doc: dict[str, str], results: list[str]) -> dict[str, float]:
    """Whether the first code block passes the item's unit tests."""
    program = f"{extract_code(results[0])}\n\n{doc['tests']}\n"
    return {"accuracy": float(passes(program))}
