# SPDX-License-Identifier: Apache-2.0
"""`scripts/test.sh` sets up what the tests need that it is asked for."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = "--dist loadfile --no-loadscope-reorder"
DEFAULT = f"-n 2 {FILES} -m not gpu and not slow"


@pytest.fixture
def checkout(tmp_path) -> Path:
    """A checkout whose set-up and tools only say how they were called."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts/test.sh", tmp_path / "scripts")
    (tmp_path / "scripts/setup.sh").write_text('echo "setup $*"\n')
    for tool in ("ruff", "pytest", "python"):
        path = tmp_path / ".venv/bin" / tool
        path.parent.mkdir(parents=True, exist_ok=True)
        text = 'exit "$HAS_NO_TEST_EXTRA"' if tool == "python" else f'echo "{tool} $*"'
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
    return tmp_path


def run(
    checkout: Path,
    *words: str,
    has_test_extra: bool = False,
    cores: int = 2,
    gpus: str = "",
) -> list[str]:
    machine = checkout / "bin"
    machine.mkdir(exist_ok=True)
    for tool, says in (("nproc", str(cores)), ("nvidia-smi", gpus)):
        (machine / tool).write_text(f"#!/bin/sh\necho '{says}'\n")
        (machine / tool).chmod(0o755)
    result = subprocess.run(
        ["bash", str(checkout / "scripts/test.sh"), *words],
        env={
            **os.environ,
            "HAS_NO_TEST_EXTRA": str(int(not has_test_extra)),
            "PATH": f"{machine}{os.pathsep}{os.environ['PATH']}",
        },
        capture_output=True,
        text=True,
        check=True,
    )
    lines = result.stdout.splitlines()
    assert lines[1:3] == ["ruff check .", "ruff format --check ."]
    return [lines[0], lines[-1]]


@pytest.mark.parametrize("words", [(), ("-k", "tree"), ("-m", "unit and not slow")])
def test_quick_tests_need_no_more_than_two_extras(checkout, words):
    setup, tests = run(checkout, *words)
    assert setup == "setup eval bench"
    assert tests == " ".join(("pytest", DEFAULT, *words))


def test_slow_tests_get_their_extra(checkout):
    setup, tests = run(checkout, "-m", "slow")
    assert setup == "setup eval bench test"
    # pytest takes the last.
    assert tests == f"pytest {DEFAULT} -m slow"


def test_an_extra_that_is_there_is_kept(checkout):
    """Else each of the two ways to call it would make set-up start anew."""
    setup, _ = run(checkout, has_test_extra=True)
    assert setup == "setup eval bench test"


@pytest.mark.parametrize(
    ("cores", "gpus", "workers"),
    [(1, "", 0), (64, "", 4), (64, "GPU 0: NVIDIA H200 (UUID: GPU-0)", 0)],
)
def test_files_are_shared_by_a_few_processes_but_not_a_gpu(
    checkout, cores, gpus, workers
):
    _, tests = run(checkout, cores=cores, gpus=gpus)
    assert tests == f"pytest -n {workers} {FILES} -m not gpu and not slow"
