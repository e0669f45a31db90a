# SPDX-License-Identifier: Apache-2.0
"""Results say which commit they are of, from a clone and from an archive of one."""

import shutil
import subprocess
import sys

import pytest
from evals_modules import EVALS

PRINT = "import provenance; print(provenance.git_state())"


def state(folder) -> str:
    command = [sys.executable, "-c", PRINT]
    run = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=True
    )
    return run.stdout.strip()


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_clone_and_archive_name_the_same_commit(tmp_path):
    clone, archive = tmp_path / "clone", tmp_path / "archive"
    (clone / "evals").mkdir(parents=True)
    archive.mkdir()
    shutil.copy(EVALS / "provenance.py", clone / "evals")
    shutil.copy(EVALS.parent / ".gitattributes", clone)

    def git(*words: str) -> bytes:
        options = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        command = ["git", "-C", str(clone), *options, *words]
        return subprocess.run(command, capture_output=True, check=True).stdout

    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "one")
    commit = git("rev-parse", "HEAD").decode().strip()
    assert state(clone / "evals") == commit
    subprocess.run(
        ["tar", "-x", "-C", archive], input=git("archive", "HEAD"), check=True
    )
    assert state(archive / "evals") == commit
    # A change is seen in a clone; an archive is what it was made from.
    with (clone / "evals/provenance.py").open("a") as file:
        file.write("# changed\n")
    assert state(clone / "evals") == f"{commit}-dirty"


def test_neither_is_unknown(tmp_path):
    shutil.copy(EVALS / "provenance.py", tmp_path)
    assert state(tmp_path) == "unknown"
