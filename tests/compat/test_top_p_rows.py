# SPDX-License-Identifier: Apache-2.0
"""Top-p of many rows is that of few: vLLM has other kernels for more than 64."""

import math

import pytest
import torch

from vllm_dflash.patches.topk_topp_triton import MAX_ROWS, wrap_apply_top_k_top_p

pytestmark = pytest.mark.compat

VOCAB_SIZE = 512
# Log-probabilities of two tokens, all that min-p has left, and a top-p that keeps both.
LEFT = {447: 0.976, 314: 0.312}
TOP_P = 0.774


@pytest.fixture
def module(monkeypatch):
    """vLLM's module, whose limit and scratch are what they were afterwards."""
    from vllm.v1.sample.ops import topk_topp_triton

    for name in ("_SPLIT_MAX_BATCH", "_TRITON_SPLIT_CACHE"):
        monkeypatch.setattr(topk_topp_triton, name, getattr(topk_topp_triton, name))
    monkeypatch.setattr(topk_topp_triton, "_TRITON_SPLIT_CACHE", {})
    return topk_topp_triton


def few_left(num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    logits = torch.full((num_rows, VOCAB_SIZE), -math.inf)
    for token, value in LEFT.items():
        logits[:, token] = value
    return logits, torch.full((num_rows,), TOP_P)


@pytest.mark.parametrize("num_rows", [1, MAX_ROWS, MAX_ROWS + 1, 3 * MAX_ROWS - 5])
@pytest.mark.parametrize("has_k", [False, True])
def test_rows_go_through_in_parts(module, num_rows, has_k):
    calls = []

    def original(logits, k, p, mask_value):
        calls.append(len(logits))
        assert len(p) == len(logits)
        assert (k is None) != has_k
        logits[:, 0] = p
        if has_k:
            logits[:, 1] = k
        return logits

    apply = wrap_apply_top_k_top_p(original)
    p = torch.rand(num_rows)
    k = torch.arange(num_rows, dtype=torch.int32) if has_k else None
    # A view that is not contiguous along the vocabulary.
    logits = torch.zeros(4, num_rows).t()
    out = apply(logits, k, p)
    assert module._SPLIT_MAX_BATCH == MAX_ROWS
    assert torch.equal(out[:, 0], p)
    if has_k:
        assert torch.equal(out[:, 1], k.float())
    assert sum(calls) == num_rows
    assert max(calls) <= MAX_ROWS


def test_top_k_alone_stays_one_call(module):
    calls = []
    apply = wrap_apply_top_k_top_p(lambda *args: calls.append(args))
    logits = torch.zeros(2 * MAX_ROWS, 4)
    k = torch.ones(len(logits), dtype=torch.int32)
    apply(logits, k, None)
    assert [args[0] is logits for args in calls] == [True]


def test_scratch_of_the_former_size_is_forgotten(module):
    module._SPLIT_MAX_BATCH = 64
    module._TRITON_SPLIT_CACHE["device"] = {"stats": torch.empty(64)}
    apply = wrap_apply_top_k_top_p(lambda *args: args[0])
    assert module._SPLIT_MAX_BATCH == 64
    apply(torch.zeros(2, 4), None, torch.ones(2))
    assert module._TRITON_SPLIT_CACHE == {}
    module._TRITON_SPLIT_CACHE["device"] = {"stats": torch.empty(MAX_ROWS)}
    apply(torch.zeros(2, 4), None, torch.ones(2))
    assert list(module._TRITON_SPLIT_CACHE) == ["device"]


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 64, 65, 300, MAX_ROWS + 70])
def test_every_row_keeps_its_nucleus(module, num_rows):
    apply = wrap_apply_top_k_top_p(module.apply_top_k_top_p_triton)
    logits, p = (x.cuda() for x in few_left(num_rows))
    # Rows of the usual kind between them.
    generator = torch.Generator().manual_seed(num_rows)
    logits[::3] = torch.randn(VOCAB_SIZE, generator=generator).cuda()
    expected = nucleus(logits.clone(), p)
    kept = apply(logits, None, p).isfinite()
    assert torch.equal(kept, expected)


@pytest.mark.gpu
def test_upstream_still_loses_the_last_token(module):
    """If this fails, vLLM has mended it and the patch can go."""
    upstream = getattr(
        module.apply_top_k_top_p_triton, "__wrapped__", module.apply_top_k_top_p_triton
    )
    kept = []
    for num_rows in (64, 65):
        module._SPLIT_MAX_BATCH = 64
        logits, p = (x.cuda() for x in few_left(num_rows))
        kept.append(upstream(logits, None, p).isfinite().sum(1))
    assert kept[0].tolist() == [2] * 64
    assert kept[1].tolist() == [1] * 65


def nucleus(logits: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """What PyTorch's sort and cumulative sum keep."""
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch

    return apply_top_k_top_p_pytorch(logits, None, p).isfinite()
