# SPDX-License-Identifier: Apache-2.0
"""The torch Gumbel sampler draws the interpreted kernel's tokens."""

import pytest
import torch
from vllm.v1.worker.gpu.sample import gumbel as vllm_gumbel

from vllm_dflash.cpu import gumbel, replacements

TARGET = "vllm.v1.worker.gpu.sample.gumbel:gumbel_sample"
NUM_ROWS = 9
SEEDS = torch.tensor([1, -5, 2**62, 123456789012, -(2**63)])
TEMPERATURES = torch.tensor([0.0, 1.0, 0.7, 1.3, 2.0])

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="compares with an interpreted kernel"
)


def interpreted(*args, **kwargs):
    function = replacements.originals.get(TARGET, vllm_gumbel.gumbel_sample)
    return function(*args, **kwargs)


def rows(vocab_size: int, dtype: torch.dtype = torch.float32):
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(NUM_ROWS, vocab_size, generator=generator) * 2
    slots = torch.arange(NUM_ROWS) % len(SEEDS)
    positions = torch.arange(NUM_ROWS) * 1000 + 7
    return logits.to(dtype), slots, positions


# Block edges of the kernel (1024), a prime, and one block.
@pytest.mark.parametrize("vocab_size", [1, 257, 1023, 1024, 1025, 2050])
@pytest.mark.parametrize("use_fp64", [False, True])
@pytest.mark.parametrize("is_drafting", [False, True])
def test_tokens_equal_the_kernel(vocab_size, use_fp64, is_drafting):
    logits, slots, positions = rows(vocab_size)
    args = (logits, slots, TEMPERATURES, SEEDS, positions, True, is_drafting)
    expected = interpreted(*args, use_fp64=use_fp64)
    actual = gumbel.gumbel_sample(*args, use_fp64=use_fp64)
    assert actual.dtype == torch.int64
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits(dtype):
    logits, slots, positions = rows(300, dtype)
    args = (logits, slots, TEMPERATURES, SEEDS, positions, False, False)
    assert torch.equal(gumbel.gumbel_sample(*args), interpreted(*args))


def test_strided_logits_and_inert_rows():
    logits, slots, positions = rows(300)
    wide = torch.full((NUM_ROWS, 400), 99.0)
    wide[:, :300] = logits
    slots[3] = -1
    args = (wide[:, :300], slots, TEMPERATURES, SEEDS, positions, False, False)
    assert torch.equal(gumbel.gumbel_sample(*args), interpreted(*args))


def test_masked_tokens_are_never_drawn():
    logits, slots, positions = rows(300)
    logits[:, 5:] = -torch.inf
    args = (logits, slots, TEMPERATURES, SEEDS, positions, False, False)
    actual = gumbel.gumbel_sample(*args)
    assert (actual < 5).all()
    assert torch.equal(actual, interpreted(*args))


def test_ties_go_to_the_first_token():
    logits = torch.zeros(1, 40)
    logits[0, [7, 21, 39]] = 1.0
    args = (
        logits,
        torch.tensor([0]),
        torch.tensor([0.0]),
        torch.tensor([3]),
        torch.tensor([5]),
    )
    assert gumbel.gumbel_sample(*args, False, False).tolist() == [7]


def test_same_seed_and_position_draw_the_same_wherever_the_row_is():
    logits = torch.randn(1, 500).repeat(2, 1)
    args = (
        logits,
        torch.tensor([0, 1]),
        torch.ones(2),
        torch.tensor([42, 42]),
        torch.tensor([9, 9]),
    )
    first, second = gumbel.gumbel_sample(*args, False, False).tolist()
    assert first == second


@pytest.mark.parametrize("per_token_column", [False, True])
def test_logits_cache_gets_the_logits_before_temperature(per_token_column):
    """By hand: the interpreter can't store under the kernel's scalar mask."""
    logits, slots, positions = rows(130)
    logits, slots, positions = logits[:5], slots[:5].clone(), positions[:5]
    slots[2] = -1
    columns = torch.tensor([0, 1, 2, 0, 1], dtype=torch.int32)
    column = columns if per_token_column else torch.tensor(1, dtype=torch.int32)
    cache = torch.zeros(len(SEEDS), 3, 140)
    gumbel.gumbel_sample(
        logits,
        slots,
        TEMPERATURES,
        SEEDS,
        positions,
        True,
        True,
        logits_cache=cache,
        logits_cache_col=column,
    )
    expected = torch.zeros_like(cache)
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            place = int(columns[row]) if per_token_column else 1
            expected[slot, place, :130] = logits[row]
    assert torch.equal(cache, expected)


def test_a_source_without_a_cache_is_refused():
    logits, slots, positions = rows(10)
    with pytest.raises(ValueError, match="logits_cache"):
        gumbel.gumbel_sample(
            logits,
            slots,
            TEMPERATURES,
            SEEDS,
            positions,
            False,
            False,
            logits_cache_source=logits,
        )


def test_noise_has_the_gumbel_distribution():
    noise = torch.cat([gumbel.gumbel_noise(seed, 3, 5000, False) for seed in range(8)])
    # Mean is Euler's constant, variance pi^2 / 6; bounds are five standard errors.
    assert abs(float(noise.mean()) - 0.5772) < 5 * 1.2825 / len(noise) ** 0.5
    assert abs(float(noise.var()) - 1.6449) < 0.15
