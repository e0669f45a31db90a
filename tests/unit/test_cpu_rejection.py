# SPDX-License-Identifier: Apache-2.0
"""Twins of the chain's rejection sampler accept what the interpreted kernels accept."""

import importlib

import pytest
import torch
import vllm.v1.worker.cpu.shm  # noqa: F401  (patches torch before the next imports)

from vllm_dflash.cpu import rejection as twins
from vllm_dflash.cpu import replacements

SAMPLER = "vllm.v1.worker.gpu.spec_decode.rejection_sampler"
STEPS = 4
SEEDS = torch.tensor([5, -9, 2**61, 77])

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="compares with interpreted kernels"
)


def interpreted(target: str):
    if target in replacements.originals:
        return replacements.originals[target]
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


def make_args(vocab_size: int, temperature: float, seed: int):
    """Four requests of 5, 1, 3 and 5 rows, in slots out of order."""
    generator = torch.Generator().manual_seed(seed)
    counts = [STEPS + 1, 1, 3, STEPS + 1]
    cu = torch.tensor([0, *counts]).cumsum(0).int()
    total = int(cu[-1])
    logits = torch.randn(total, vocab_size, generator=generator) * 8
    # Drafts follow the target half of the time, so that all lengths occur.
    drafts = torch.randint(0, vocab_size, (total,), generator=generator)
    follows = torch.rand(total, generator=generator) < 0.7
    best = logits.argmax(-1).roll(1)
    drafts = torch.where(follows, best, drafts).int()
    idx_mapping = torch.tensor([3, 1, 0, 2], dtype=torch.int32)
    expanded = idx_mapping.repeat_interleave(torch.tensor(counts))
    local = torch.cat([torch.arange(count) for count in counts]).int()
    return (
        logits,
        None,
        drafts,
        cu,
        torch.arange(total) * 3 + 11,
        idx_mapping,
        expanded,
        local,
        torch.full((4,), temperature),
        SEEDS,
        STEPS,
    )


def assert_equal_samples(args, **kwargs):
    expected, num_expected = interpreted(twins.TARGET)(*args, **kwargs)
    actual, num_actual = twins.rejection_sample(*args, **kwargs)
    assert num_actual.dtype == num_expected.dtype
    assert torch.equal(num_actual, num_expected)
    for row, count in enumerate(num_actual.tolist()):
        assert torch.equal(actual[row, :count], expected[row, :count])
    return num_actual


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("vocab_size", [11, 1030])
def test_samples_equal_the_kernels(vocab_size, temperature):
    lengths = set()
    for seed in range(6):
        args = make_args(vocab_size, temperature, seed)
        lengths |= set(assert_equal_samples(args).tolist())
    assert lengths >= {1, 2, 3}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_placeholder_drafts_are_rejected(temperature):
    args = list(make_args(50, temperature, 1))
    args[2][2:] = -1
    num_sampled = assert_equal_samples(tuple(args))
    assert num_sampled.max() <= 2


def test_fp64_noise():
    assert_equal_samples(make_args(50, 1.0, 2), use_fp64=True)


@pytest.mark.parametrize(
    "option",
    [
        {"synthetic_conditional_rates": torch.ones(STEPS)},
        {"use_block_verification": True},
    ],
)
def test_other_methods_are_left_to_the_kernels(monkeypatch, option):
    calls = []
    monkeypatch.setitem(
        replacements.originals, twins.TARGET, lambda *args: calls.append(args)
    )
    twins.rejection_sample(*make_args(11, 1.0, 0), **option)
    assert len(calls) == 1
    assert len(calls[0]) == 18


@pytest.mark.parametrize("seed", [0, 7, -1, 2**63 - 1, -(2**63)])
@pytest.mark.parametrize("offset", [0, 1, 2**31, 2**40 + 3])
def test_philox_uniform(seed, offset):
    import triton
    import triton.language as tl

    @triton.jit
    def draw(out_ptr, seed_ptr, offset_ptr):
        tl.store(out_ptr, tl.rand(tl.load(seed_ptr), tl.load(offset_ptr)))

    out = torch.zeros(1)
    draw[(1,)](out, torch.tensor([seed]), torch.tensor([offset]))
    assert float(out) == pytest.approx(twins.philox_uniform(seed, offset), rel=1e-6)


def test_gather_draft_sampled():
    logits_indices = torch.tensor([3, 4, 5, 9, 10])
    args = (
        torch.arange(20, dtype=torch.int32) + 100,
        torch.arange(20) + 7,
        logits_indices,
        torch.tensor([1, 1, 1, 0, 0], dtype=torch.int32),
        torch.tensor([0, 1, 2, 0, 1], dtype=torch.int32),
        torch.tensor([99, 10], dtype=torch.int32),
    )
    expected = interpreted(f"{SAMPLER}:gather_draft_sampled")(*args)
    actual = twins.gather_draft_sampled(*args)
    for left, right in zip(actual, expected, strict=True):
        assert left.dtype == right.dtype
        assert torch.equal(left, right)
    assert actual[0].tolist() == [103, 104, 105, 109, -1]


def test_flatten_sampled_kernel():
    kernel = interpreted(f"{SAMPLER}:_flatten_sampled_kernel")
    sampled = torch.arange(15).view(3, 5)
    num_sampled = torch.tensor([5, 0, 2], dtype=torch.int32)
    cu_num_logits = torch.tensor([0, 5, 6, 9], dtype=torch.int32)
    results = []
    for each in (kernel, replacements.TwinKernel(twins.flatten_sampled_kernel)):
        flat = torch.full((9,), -4)
        each[(3,)](flat, sampled, sampled.stride(0), num_sampled, cu_num_logits)
        results.append(flat)
    assert torch.equal(results[0], results[1])
    assert results[1].tolist() == [0, 1, 2, 3, 4, -4, 10, 11, -4]
