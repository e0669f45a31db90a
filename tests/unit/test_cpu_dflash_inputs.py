# SPDX-License-Identifier: Apache-2.0
"""The twin of `prepare_dflash_inputs` lays a draft pass out as the kernel does."""

import importlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import vllm.v1.worker.cpu.shm  # noqa: F401  (patches torch before the next imports)

from vllm_dflash.cpu import replacements
from vllm_dflash.cpu.dflash_inputs import TARGET, prepare_dflash_inputs

MAX_REQS, MAX_TOKENS, MAX_BLOCKS, BLOCK = 5, 64, 8, 4
MASK_TOKEN = 77

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="compares with an interpreted kernel"
)


def interpreted(*args):
    if TARGET in replacements.originals:
        return replacements.originals[TARGET](*args)
    module, _, name = TARGET.partition(":")
    return getattr(importlib.import_module(module), name)(*args)


def make_args(steps: int, anchor: bool, query_lens, rejected, max_model_len: int):
    """Arguments with markers in every output, and the outputs by name."""
    num_reqs = len(query_lens)
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    positions = torch.cat(
        [torch.arange(n) + 3 + 5 * row for row, n in enumerate(query_lens)]
    )
    table = torch.arange(MAX_REQS * MAX_BLOCKS, dtype=torch.int32) + 1
    table = table.view(MAX_REQS, MAX_BLOCKS)
    # An evicted block of a sliding window.
    table[0, 0] = 0
    width = steps if anchor else steps + 1

    def filled(*size, dtype=torch.int64):
        return torch.full(size, -55, dtype=dtype)

    outputs = {
        "input_ids": filled(MAX_TOKENS, dtype=torch.int32),
        "positions": filled(MAX_TOKENS),
        "query_start_loc": filled(MAX_REQS + 1, dtype=torch.int32),
        "seq_lens": filled(MAX_REQS, dtype=torch.int32),
        "query_slot_mapping": filled(MAX_TOKENS),
        "context_positions": filled(MAX_TOKENS),
        "context_slot_mapping": filled(MAX_TOKENS),
        "sample_indices": filled(MAX_REQS * steps),
        "sample_pos": filled(MAX_REQS * steps),
        "sample_idx_mapping": filled(MAX_REQS * steps),
        "temperature": filled(MAX_REQS, dtype=torch.float32),
        "seeds": filled(MAX_REQS),
    }
    buffers = SimpleNamespace(
        **{
            name: outputs[name]
            for name in ("input_ids", "positions", "query_start_loc", "seq_lens")
        }
    )
    batch = SimpleNamespace(
        num_reqs=num_reqs,
        num_scheduled_tokens=np.array(query_lens),
        positions=positions,
        query_start_loc=starts,
        idx_mapping=torch.tensor([4, 0, 3][:num_reqs], dtype=torch.int32),
    )
    args = (
        buffers,
        *list(outputs.values())[4:],
        batch,
        torch.tensor([2, 0, 1][:num_reqs], dtype=torch.int32),
        torch.tensor(rejected, dtype=torch.int32),
        torch.arange(MAX_REQS) + 300,
        torch.arange(MAX_REQS, dtype=torch.int32) + 400,
        torch.rand(MAX_REQS, generator=torch.Generator().manual_seed(0)),
        torch.arange(MAX_REQS) - 2,
        table,
        BLOCK,
        0,
        1,
        1,
        MASK_TOKEN,
        width,
        steps,
        MAX_REQS,
        MAX_TOKENS,
        max_model_len,
        anchor,
    )
    return args, outputs


@pytest.mark.parametrize("steps", [1, 7])
@pytest.mark.parametrize("anchor", [False, True])
@pytest.mark.parametrize(
    ("query_lens", "rejected"),
    [([8, 11, 1], [5, 0, 0]), ([1], [0]), ([8, 8, 8], [7, 0, 3])],
)
@pytest.mark.parametrize("max_model_len", [24, 100])
def test_layout_equals_the_kernel(steps, anchor, query_lens, rejected, max_model_len):
    settings = (steps, anchor, query_lens, rejected, max_model_len)
    expected_args, expected = make_args(*settings)
    actual_args, actual = make_args(*settings)
    interpreted(*expected_args)
    prepare_dflash_inputs(*actual_args)
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), name


def test_block_of_one_request():
    args, out = make_args(2, False, [3], [1], 100)
    prepare_dflash_inputs(*args)
    # Positions 3, 4 are context, the block starts at 5 with the sampled token.
    assert out["input_ids"][:3].tolist() == [304, MASK_TOKEN, MASK_TOKEN]
    assert out["positions"][:3].tolist() == [5, 6, 7]
    assert out["context_positions"][:3].tolist() == [3, 4, 0]
    assert out["context_slot_mapping"][:3].tolist() == [-1, 2 * BLOCK, -1]
    assert out["query_slot_mapping"][:4].tolist() == [9, 10, 11, -1]
    assert out["sample_idx_mapping"].tolist() == [4, 4, *[-1] * 8]


def test_context_parallelism_is_left_to_the_kernel(monkeypatch):
    calls = []
    monkeypatch.setitem(
        replacements.originals, TARGET, lambda *args: calls.append(args)
    )
    args, out = make_args(2, False, [3], [1], 100)
    args = (*args[:19], 2, *args[20:])
    prepare_dflash_inputs(*args)
    assert len(calls) == 1
    assert len(calls[0]) == len(args)
    assert (out["input_ids"] == -55).all()
