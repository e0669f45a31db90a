# SPDX-License-Identifier: Apache-2.0
"""What happens before vLLM makes its engine, whose process it forks.

A process that has asked torch's CUDA library for devices leaves its children none: they
end with "Cannot re-initialize CUDA in forked subprocess".
"""

import json
import subprocess
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from tiny_models import BLOCK_SIZE, write_target
from tiny_tokenizer import write_tokenizer
from training_runs import ROOT

from vllm_dflash_training.cli import main


@pytest.fixture
def config(tmp_path) -> str:
    """A run whose generation is vLLM's."""
    target = write_target(tmp_path / "target")
    write_tokenizer(target)
    path = tmp_path / "run.yaml"
    path.write_text(
        json.dumps(
            dict(
                work_dir=str(tmp_path / "run"),
                target=target,
                draft=dict(num_layers=1, block_size=BLOCK_SIZE, mask_token_id=5),
                prompts=dict(synthetic=4, self_generated=dict(count=0)),
                generation=dict(backend="vllm", engine_args=dict(seed=3)),
            )
        )
    )
    return str(path)


class EngineMade(Exception):
    """Ends the run where vLLM would fork."""


@pytest.mark.parametrize("is_cpu", [False, True], ids=["gpu", "cpu"])
@pytest.mark.parametrize("target_dtype", ["auto", "float32"])
def test_nothing_asks_for_cuda_before_the_engine(
    config, monkeypatch, is_cpu, target_dtype
):
    def refuse(*args, **kwargs):
        pytest.fail("torch's CUDA library was asked before the fork")

    made = {}

    def make_engine(**kwargs):
        made.update(kwargs)
        raise EngineMade

    vllm, platforms = ModuleType("vllm"), ModuleType("vllm.platforms")
    vllm.LLM = make_engine
    platforms.current_platform = SimpleNamespace(is_cpu=lambda: is_cpu)
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)
    for name in ("VLLM_PLUGINS", "VLLM_CPU_KVCACHE_SPACE"):
        # Undone afterwards, whatever the run sets.
        monkeypatch.setenv(name, "")
    for name in ("is_available", "device_count", "_lazy_init", "set_device"):
        monkeypatch.setattr(torch.cuda, name, refuse)
    stages = ["--stages", "prompts,generate", "--in-process"]
    with pytest.raises(EngineMade):
        main(["--config", config, *stages, "--set", f"target_dtype={target_dtype}"])
    auto = "float32" if is_cpu else "bfloat16"
    assert made["dtype"] == (auto if target_dtype == "auto" else target_dtype)
    assert made["enforce_eager"] == is_cpu
    assert made["seed"] == 3


FORK = """
import multiprocessing
import os
import sys

import torch

sys.path[:0] = {paths!r}
asked = []
is_available = torch.cuda.is_available


def watched():
    # vLLM lets torch ask the driver, which a fork survives.
    if os.environ.get("PYTORCH_NVML_BASED_CUDA_CHECK") != "1":
        asked.append(1)
    return is_available()


torch.cuda.is_available = watched
from vllm_dflash_training.backends import vllm_device

device = vllm_device()
assert not asked, "asked before the fork"
torch.cuda.is_available()
assert not asked, "torch still asks its CUDA library"
child = multiprocessing.get_context("fork").Process(
    target=torch.zeros, args=(1,), kwargs=dict(device=device)
)
child.start()
child.join()
assert child.exitcode == 0
print("DEVICE", device.type)
"""


def test_a_fork_can_use_the_device_that_was_found():
    paths = [str(ROOT / "training"), str(ROOT)]
    done = subprocess.run(
        [sys.executable, "-c", FORK.format(paths=paths)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    assert f"DEVICE {kind}" in done.stdout
