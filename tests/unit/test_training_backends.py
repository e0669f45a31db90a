# SPDX-License-Identifier: Apache-2.0
"""What happens before vLLM makes its engine, whose process it forks.

A process that has asked torch's CUDA library for devices leaves its children none: they
end with "Cannot re-initialize CUDA in forked subprocess".
"""

import json
import subprocess
import sys
from functools import partial
from types import ModuleType, SimpleNamespace

import pytest
import torch
from tiny_models import BLOCK_SIZE, write_target
from tiny_tokenizer import write_tokenizer
from training_runs import ROOT

from vllm_dflash_training.backends import (
    Job,
    Sampling,
    VllmBackend,
    engine_arguments,
)
from vllm_dflash_training.cli import main
from vllm_dflash_training.config import GenerationOptions


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
    platforms.current_platform = SimpleNamespace(
        is_cpu=lambda: is_cpu, get_device_total_memory=lambda: 80 << 30
    )
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)
    for name in ("VLLM_PLUGINS", "VLLM_CPU_KVCACHE_SPACE"):
        # Undone afterwards, whatever the run sets.
        monkeypatch.setenv(name, "")
    for name in ("is_available", "device_count", "_lazy_init", "set_device"):
        monkeypatch.setattr(torch.cuda, name, refuse)
    stages = ["--stages", "prompts,generate", "--engine=0"]
    with pytest.raises(EngineMade):
        main(["--config", config, *stages, "--set", f"target_dtype={target_dtype}"])
    auto = "float32" if is_cpu else "bfloat16"
    assert made["dtype"] == (auto if target_dtype == "auto" else target_dtype)
    assert made["enforce_eager"] == is_cpu
    assert made["seed"] == 3


@pytest.mark.parametrize("is_cpu", [False, True])
def test_engines_share_the_memory_each_with_its_cache_named(is_cpu):
    def arguments(**options):
        options = GenerationOptions(gpu_memory_utilization=0.6, **options)
        return engine_arguments(torch.float32, 64, options, is_cpu, lambda: 1000)

    alone = arguments()
    assert alone["gpu_memory_utilization"] == 0.6
    # It measures what is left.
    assert "kv_cache_memory_bytes" not in alone
    each = arguments(engines=4)
    assert each["gpu_memory_utilization"] == pytest.approx(0.15)
    assert each.get("kv_cache_memory_bytes") == (None if is_cpu else 75)
    named = arguments(engines=4, engine_args=dict(kv_cache_memory_bytes=9))
    assert named["kv_cache_memory_bytes"] == 9
    share = arguments(engines=4, engine_args=dict(gpu_memory_utilization=0.2))
    assert share["gpu_memory_utilization"] == 0.2
    assert share.get("kv_cache_memory_bytes") == (None if is_cpu else 100)
    # vLLM's own runner on the CPU can't take back what a seed gave to half a prompt.
    assert share.get("enable_chunked_prefill") == (False if is_cpu else None)


class OneByOne:
    """An engine that answers one of its requests in a step, the last one first.

    A request's answer is its prompt and its seed.
    """

    def __init__(self):
        self.requests, self.most = {}, 0

    def add_request(self, name, prompt, params):
        self.requests[name] = [*prompt["prompt_token_ids"], params.seed or 0]
        self.most = max(self.most, len(self.requests))

    def step(self):
        assert self.requests, "a step without requests would wait for ever"
        name, answer = self.requests.popitem()
        output = SimpleNamespace(token_ids=answer)
        return [SimpleNamespace(finished=True, request_id=name, outputs=[output])]


def test_an_engine_is_given_the_next_jobs_before_it_is_empty():
    engine, log = OneByOne(), []
    backend = object.__new__(VllmBackend)
    backend.llm, backend.stop_ids = SimpleNamespace(llm_engine=engine), []
    backend.low_water, backend._num_requests = 4, 0
    sizes = [3, 3, 0, 6, 1]

    def jobs():
        for number, size in enumerate(sizes):
            log.append(("begun", number, len(engine.requests)))
            prompts = [[number, i] for i in range(size)]
            yield Job(prompts, Sampling(1.0, 8, 0.0, 100), partial(finish, number))

    def finish(number, responses):
        log.append(("finished", number))
        assert responses == [[number, i, 100 + i] for i in range(sizes[number])]

    backend.run(jobs())
    finished = [entry[1] for entry in log if entry[0] == "finished"]
    assert sorted(finished) == list(range(5))
    begun = {entry[1]: entry[2] for entry in log if entry[0] == "begun"}
    # The first ones at once; the next as soon as less than `low_water` is there, which
    # is before the engine has nothing to do and before the one before is finished.
    assert begun == {0: 0, 1: 3, 2: 3, 3: 3, 4: 3}
    assert log.index(("begun", 4, 3)) < log.index(("finished", 0))
    assert engine.most < 4 + max(sizes)


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
