# SPDX-License-Identifier: Apache-2.0
"""Which adapter vLLM gives to a row, and what the patches make of it.

The tests of vLLM itself fail on the day that it mends them: then the patches go.
"""

import importlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from vllm_dflash import patches
from vllm_dflash.patches import lora_model_runner_mixin, punica_cpu
from vllm_dflash.runner.runtime import TreeRuntime

pytestmark = pytest.mark.compat

HIDDEN, RANK, SLOTS = 6, 2, 2


def test_lora_is_told_of_one_row_of_logits_a_request():
    """Of a verify it would have to know every row."""
    from vllm.v1.worker.gpu.lora_utils import LoraState

    state = LoraState(4)
    num_tokens = np.array([17, 17], dtype=np.int32)
    of_logits, of_tokens, _ = state.make_lora_inputs(
        ["a", "b"], np.array([0, 1]), num_tokens
    )
    assert len(of_tokens) == 34
    assert len(of_logits) == 2


def runtime_of(num_logits):
    runtime = object.__new__(TreeRuntime)
    runtime.num_logits_np = num_logits
    return runtime


def test_every_row_of_logits_has_the_adapter_of_its_request(monkeypatch):
    runtime = runtime_of(np.array([3, 1, 2]))
    monkeypatch.setattr(
        "vllm_dflash.runner.runtime.find_runtime", lambda config: runtime
    )
    calls = []
    wrap = lora_model_runner_mixin.wrap_set_active_loras
    set_active = wrap(lambda self, *args, **kwargs: calls.append((args, kwargs)))
    runner = SimpleNamespace(vllm_config=None)
    set_active(runner, (7, 0, 9), (7, 7, 7, 0, 9, 9), {"requests"})
    # A dummy batch that follows was not prepared.
    set_active(runner, (1, 2), (1, 2), set(), mapping_type="tower")
    assert calls == [
        (((7, 7, 7, 0, 9, 9), (7, 7, 7, 0, 9, 9), {"requests"}), {}),
        (((1, 2), (1, 2), set()), {"mapping_type": "tower"}),
    ]


def test_engines_without_trees_are_told_as_before(monkeypatch):
    monkeypatch.setattr("vllm_dflash.runner.runtime.find_runtime", lambda config: None)
    calls = []
    wrap = lora_model_runner_mixin.wrap_set_active_loras
    wrap(lambda self, *args: calls.append(args))(
        SimpleNamespace(vllm_config=None), (7, 0), (7, 7, 0), set()
    )
    assert calls == [((7, 0), (7, 7, 0), set())]


def cpu_wrapper(cls, slots):
    """A wrapper whose rows, of tokens and of logits, have these slots."""
    from vllm.lora.layers import LoRAMapping

    wrapper = cls(max_num_batched_tokens=16, max_batches=4, device=torch.device("cpu"))
    # Adapters are numbered from 1; 0 is none.
    numbers = tuple(slot + 1 for slot in slots)
    wrapper.update_metadata(
        LoRAMapping(numbers, numbers, is_prefill=True),
        lora_index_to_id=[1, 2],
        max_loras=SLOTS,
        vocab_size=HIDDEN,
    )
    return wrapper


def stacked(*shape):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(SLOTS, 1, *shape, generator=generator)


def added(cls, method, slots):
    """What a wrapper adds to rows of zeros."""
    wrapper = cpu_wrapper(cls, slots)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(len(slots), HIDDEN, generator=generator)
    y = torch.zeros(len(slots), HIDDEN)
    a, b = stacked(RANK, HIDDEN), stacked(HIDDEN, RANK)
    if method == "add_shrink and add_expand":
        # Fully sharded layers gather the buffer in between.
        buffer = torch.zeros(1, len(slots), RANK)
        wrapper.add_shrink(buffer, x, (a,), 1.0)
        wrapper.add_expand(y, buffer, (b,), (HIDDEN,))
    elif method == "add_lora_linear":
        wrapper.add_lora_linear(y, x, (a,), (b,), 1.0, (HIDDEN,))
    elif method == "add_lora_logits":
        wrapper.add_lora_logits(y, x, a, b, 1.0)
    else:
        wrapper.add_lora_embedding(y, x[:, :RANK].contiguous(), b)
    return y


@pytest.fixture
def upstream():
    """vLLM's wrapper, whatever has been applied in this process."""
    if not torch.cuda.is_available():
        # vLLM patches torch before it imports the rest.
        importlib.import_module("vllm.v1.worker.cpu.shm")
    if patches.is_applied("punica_wrapper"):
        return patches.original("punica_wrapper")
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    return PunicaWrapperCPU


METHODS = (
    "add_lora_linear",
    "add_shrink and add_expand",
    "add_lora_logits",
    "add_lora_embedding",
)


@pytest.mark.parametrize("method", METHODS)
def test_vllm_still_adapts_rows_without_an_adapter(upstream, method):
    beside = added(upstream, method, [0, -1, 1])
    as_last = added(upstream, method, [0, SLOTS - 1, 1])
    assert torch.equal(beside, as_last)
    assert beside[1].abs().max() > 0.1


@pytest.mark.parametrize("method", METHODS)
def test_rows_without_an_adapter_stay(upstream, method):
    ours = punica_cpu.make_punica_wrapper(upstream)
    beside = added(ours, method, [0, -1, 1])
    full = added(upstream, method, [0, 0, 1])
    assert torch.equal(beside[1], torch.zeros(HIDDEN))
    assert torch.equal(beside[0], full[0])
    assert torch.equal(beside[2], full[2])
    assert added(ours, method, [-1, -1]).abs().max() == 0
