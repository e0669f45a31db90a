# SPDX-License-Identifier: Apache-2.0
"""Top candidates with log-probabilities, split over the vocabulary.

    logprob[r, i] = (x_i - m) / T - log(sum_v exp((x_v - m) / T)),   m = max_v x_v

Pass 1, grid (splits, rows), one warp each: scan ``STEPS`` blocks of ``BLOCK`` columns.
Column ``j`` of all blocks of a split forms one *group*; a lane keeps its groups'
maximum, the place of it, and the running sum of exponentials. No reduction happens
inside the scan. Afterwards the ``C`` groups with the largest maxima are written out.

Pass 2, grid (rows,): the ``C`` best groups over all splits contain the ``C`` best
columns (were a better column outside, its group's maximum would beat ``C`` others).
Their ``C * STEPS`` logits are read again and the ``C`` best are selected.

"Largest" is by (logit, lower column), a total order, so ties resolve exactly. With the
noise of a draw x is logit + T * noise, in both passes, wherever T > 0, but for a
constant of the row (noise.py).

Reads every logit once, plus ``C * STEPS`` a row. The workspace of a row is
``[2 * C2 + 2, splits]`` int32 planes (C2: C rounded up to a power of two): maxima as
ordered int32, their columns, then m and the sum of each split as fp32 bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..dispatch import next_power_of_2
from ..float_order import float_to_ordered, ordered_to_float
from .noise import log2_exponential, noise_state, noise_weight
from .reference import LOWEST_LOGIT
from .workspace import BLOCK, split_vocab, topk_workspace

_LOWEST = tl.constexpr(LOWEST_LOGIT)
_INT_MIN = tl.constexpr(-(2**31))
_INT_MAX = tl.constexpr(2**31 - 1)
_LOG2E = tl.constexpr(1.4426950408889634)

# Of the scan with noise, whose code an SM would not keep if all of it were unrolled:
# steps in the loop of drawn and of greedy rows. Registers: with those that ptxas takes
# by itself it loads the logits just before it needs them, which costs an H200 1 to 5 %
# for drawn rows and 8 % for greedy ones.
NOISY_UNROLL = 2
GREEDY_UNROLL = 8
NOISY_REGISTERS = 96


@triton.jit
def _inverse_temperature(temperature_ptr, row_to_slot_ptr, row, SCALED: tl.constexpr):
    scale = 1.0
    if SCALED:
        slot = tl.load(row_to_slot_ptr + row)
        temperature = tl.load(temperature_ptr + slot, mask=slot >= 0, other=1.0)
        scale = 1.0 / tl.where(temperature > 0.0, temperature, 1.0)
    return scale


@triton.jit
def _finite(x):
    # No difference is NaN then: maximum() turns NaN into its bound, too.
    return tl.minimum(tl.maximum(x, _LOWEST), -_LOWEST)


@triton.jit
def _order(x):
    # + 0.0 makes -0.0 equal to +0.0.
    return float_to_ordered(x + 0.0)


@triton.jit
def _noise_of_row(
    noise_temperature_ptr,
    row_to_slot_ptr,
    seed_ptr,
    position_ptr,
    row,
    NOISY: tl.constexpr,
):
    """(temperature, 0 for none; state of the row's noise)"""
    temperature = (row - row).to(tl.float32)
    state = row.to(tl.uint32)
    if NOISY:
        slot = tl.load(row_to_slot_ptr + row)
        temperature = tl.load(noise_temperature_ptr + slot, mask=slot >= 0, other=0.0)
        seed = tl.load(seed_ptr + slot, mask=slot >= 0, other=0)
        state = noise_state(seed, tl.load(position_ptr + row).to(tl.int64))
    return temperature, state


@triton.jit
def _value(logits, column, weight, state, NOISY: tl.constexpr):
    """What candidates are ranked by, finite. fp32"""
    x = logits.to(tl.float32)
    if NOISY:
        x = tl.fma(log2_exponential(state, column), weight, x)
    return _finite(x)


@triton.jit
def _scan_split(
    row_ptr,
    first_column,
    vocab_size,
    exponent_scale,
    weight,  # of the noise
    state,
    NOISY: tl.constexpr,
    STEPS: tl.constexpr,
    UNROLL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """(maximum, step of it, sum of exponentials) of each group. [BLOCK] each"""
    tl.static_assert(UNROLL % 2 == 0 and STEPS % UNROLL == 0)
    lane = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], _LOWEST, tl.float32)
    best_step = tl.zeros([BLOCK], tl.int32)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, STEPS, UNROLL):
        # Two at a time: a sum is rescaled once for both.
        for step in tl.static_range(0, UNROLL, 2):
            column = first_column + (start + step) * BLOCK + lane
            other = column + BLOCK
            x = tl.load(row_ptr + column, column < vocab_size, float("-inf"))
            y = tl.load(row_ptr + other, other < vocab_size, float("-inf"))
            x = _value(x, column, weight, state, NOISY)
            y = _value(y, other, weight, state, NOISY)
            old = best
            best_step = tl.where(x > best, start + step, best_step)
            best = tl.maximum(x, best)
            best_step = tl.where(y > best, start + step + 1, best_step)
            best = tl.maximum(y, best)
            decay = tl.exp2((old - best) * exponent_scale)
            first = tl.exp2((x - best) * exponent_scale)
            second = tl.exp2((y - best) * exponent_scale)
            total = tl.fma(total, decay, first) + second
    return best, best_step, total


@triton.jit
def _topk_scan_kernel(
    logits_ptr,  # [num_rows, vocab_size]
    logits_stride,
    temperature_ptr,
    row_to_slot_ptr,
    noise_temperature_ptr,
    seed_ptr,
    position_ptr,
    workspace_ptr,  # [num_rows, 2 * C2 + 2, num_splits], int32
    vocab_size,
    num_splits,
    C: tl.constexpr,
    C2: tl.constexpr,
    SCALED: tl.constexpr,
    NOISY: tl.constexpr,
    STEPS: tl.constexpr,
    UNROLL: tl.constexpr,
    NOISY_UNROLL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    split = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    temperature, noise = _noise_of_row(
        noise_temperature_ptr, row_to_slot_ptr, seed_ptr, position_ptr, row, NOISY
    )
    exponent_scale = (
        _inverse_temperature(temperature_ptr, row_to_slot_ptr, row, SCALED) * _LOG2E
    )
    first_column = split * (STEPS * BLOCK)
    row_ptr = logits_ptr + row * logits_stride

    # Greedy rows don't pay for the noise of others. One branch around the whole scan:
    # one in every step would keep the steps from being interleaved.
    if NOISY and temperature > 0.0:
        best, best_step, total = _scan_split(
            row_ptr,
            first_column,
            vocab_size,
            exponent_scale,
            noise_weight(temperature),
            noise,
            True,
            STEPS,
            NOISY_UNROLL,
            BLOCK,
        )
    else:
        best, best_step, total = _scan_split(
            row_ptr,
            first_column,
            vocab_size,
            exponent_scale,
            0.0,
            noise,
            False,
            STEPS,
            UNROLL,
            BLOCK,
        )

    split_max = tl.max(best, 0)
    split_total = tl.sum(total * tl.exp2((best - split_max) * exponent_scale), 0)
    key = _order(best)
    column = first_column + best_step * BLOCK + tl.arange(0, BLOCK)
    candidate = tl.arange(0, C2)
    found_key = tl.full([C2], _INT_MIN, tl.int32)
    found_column = tl.full([C2], _INT_MAX, tl.int32)
    for i in range(C):
        top = tl.max(key, 0)
        top_column = tl.min(tl.where(key == top, column, _INT_MAX), 0)
        key = tl.where(column == top_column, _INT_MIN, key)
        found_key = tl.where(candidate == i, top, found_key)
        found_column = tl.where(candidate == i, top_column, found_column)

    out_ptr = workspace_ptr + row * ((2 * C2 + 2) * num_splits) + split
    tl.store(out_ptr + candidate * num_splits, found_key)
    tl.store(out_ptr + (C2 + candidate) * num_splits, found_column)
    stats_ptr = out_ptr + 2 * C2 * num_splits
    tl.store(stats_ptr, split_max.to(tl.int32, bitcast=True))
    tl.store(stats_ptr + num_splits, split_total.to(tl.int32, bitcast=True))


@triton.jit
def _topk_merge_kernel(
    logits_ptr,  # [num_rows, vocab_size]
    logits_stride,
    temperature_ptr,
    row_to_slot_ptr,
    noise_temperature_ptr,
    seed_ptr,
    position_ptr,
    workspace_ptr,  # [num_rows, 2 * C2 + 2, num_splits], int32
    out_tokens_ptr,  # [num_rows, C], int32
    out_logprobs_ptr,  # [num_rows, C], fp32
    vocab_size,
    num_splits,
    C: tl.constexpr,
    C2: tl.constexpr,
    SPLITS2: tl.constexpr,
    SCALED: tl.constexpr,
    NOISY: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    temperature, noise = _noise_of_row(
        noise_temperature_ptr, row_to_slot_ptr, seed_ptr, position_ptr, row, NOISY
    )
    scale = _inverse_temperature(temperature_ptr, row_to_slot_ptr, row, SCALED)
    exponent_scale = scale * _LOG2E
    in_ptr = workspace_ptr + row * ((2 * C2 + 2) * num_splits)

    split = tl.arange(0, SPLITS2)
    stats_ptr = in_ptr + 2 * C2 * num_splits + split
    is_split = split < num_splits
    bits = tl.load(stats_ptr, mask=is_split, other=0)
    split_max = tl.where(is_split, bits.to(tl.float32, bitcast=True), _LOWEST)
    bits = tl.load(stats_ptr + num_splits, mask=is_split, other=0)
    split_total = bits.to(tl.float32, bitcast=True)
    row_max = tl.max(split_max, 0)
    decay = tl.exp2((split_max - row_max) * exponent_scale)
    log_total = tl.log(tl.sum(split_total * decay, 0))

    # The C best groups of the row.
    entry = tl.arange(0, C2 * SPLITS2)
    is_entry = entry % SPLITS2 < num_splits
    entry_ptr = in_ptr + (entry // SPLITS2) * num_splits + entry % SPLITS2
    key = tl.load(entry_ptr, mask=is_entry, other=_INT_MIN)
    column = tl.load(entry_ptr + C2 * num_splits, mask=is_entry, other=_INT_MAX)
    candidate = tl.arange(0, C2)
    group_column = tl.full([C2], _INT_MAX, tl.int32)
    for i in range(C):
        top = tl.max(key, 0)
        top_column = tl.min(tl.where(key == top, column, _INT_MAX), 0)
        key = tl.where(column == top_column, _INT_MIN, key)
        group_column = tl.where(candidate == i, top_column, group_column)

    # Their columns: a group is one column of each block of its split.
    first = group_column // (STEPS * BLOCK) * (STEPS * BLOCK) + group_column % BLOCK
    member = first[:, None] + tl.arange(0, STEPS)[None, :] * BLOCK
    is_member = (candidate < C)[:, None] & (member >= 0) & (member < vocab_size)
    x = tl.load(logits_ptr + row * logits_stride + member, is_member, float("-inf"))
    x = x.to(tl.float32)
    if NOISY:  # noqa: SIM102, the compiler decides this one
        if temperature > 0.0:
            x = tl.fma(log2_exponential(noise, member), noise_weight(temperature), x)
    x = _finite(x)
    key = tl.reshape(tl.where(is_member, _order(x), _INT_MIN), [C2 * STEPS])
    column = tl.reshape(tl.where(is_member, member, _INT_MAX), [C2 * STEPS])
    found_key = tl.full([C2], _INT_MIN, tl.int32)
    found_column = tl.full([C2], _INT_MAX, tl.int32)
    for i in range(C):
        top = tl.max(key, 0)
        top_column = tl.min(tl.where(key == top, column, _INT_MAX), 0)
        key = tl.where(column == top_column, _INT_MIN, key)
        found_key = tl.where(candidate == i, top, found_key)
        found_column = tl.where(candidate == i, top_column, found_column)

    # A vocabulary smaller than C runs out of members.
    is_token = found_key > _INT_MIN
    value = ordered_to_float(tl.where(is_token, found_key, 0))
    logprob = (value - row_max) * scale - log_total
    is_possible = is_token & (value > _LOWEST)
    out = row * C + candidate
    tl.store(
        out_tokens_ptr + out, tl.where(is_token, found_column, 0), mask=candidate < C
    )
    tl.store(
        out_logprobs_ptr + out,
        tl.where(is_possible, logprob, float("-inf")),
        mask=candidate < C,
    )


def topk_logprobs(
    logits: torch.Tensor,
    num_candidates: int,
    temperature: torch.Tensor | None,
    row_to_slot: torch.Tensor | None,
    is_scaled: bool,
    noise_temperature: torch.Tensor | None,
    seed: torch.Tensor | None,
    position: torch.Tensor | None,
    out_tokens: torch.Tensor,
    out_logprobs: torch.Tensor,
    workspace: torch.Tensor | None,
) -> None:
    num_rows, vocab_size = logits.shape
    if num_rows == 0:
        return
    assert logits.stride(1) == 1
    assert out_tokens.is_contiguous() and out_logprobs.is_contiguous()
    steps, num_splits = split_vocab(num_rows, vocab_size)
    steps = max(steps, 2)  # the scan goes in pairs
    c2 = next_power_of_2(num_candidates)
    if workspace is None:
        workspace = topk_workspace(num_rows, vocab_size, num_candidates, logits.device)
    assert workspace.numel() >= num_rows * num_splits * (2 * c2 + 2)
    is_noisy = seed is not None
    if temperature is None:
        temperature = workspace  # not read
    if not is_noisy:
        noise_temperature = seed = position = workspace
    if row_to_slot is None:
        row_to_slot = workspace
    _topk_scan_kernel[(num_splits, num_rows)](
        logits,
        logits.stride(0),
        temperature,
        row_to_slot,
        noise_temperature,
        seed,
        position,
        workspace,
        vocab_size,
        num_splits,
        C=num_candidates,
        C2=c2,
        SCALED=is_scaled,
        NOISY=is_noisy,
        STEPS=steps,
        UNROLL=min(GREEDY_UNROLL, steps) if is_noisy else steps,
        NOISY_UNROLL=min(NOISY_UNROLL, steps),
        BLOCK=BLOCK,
        num_warps=1,
        **({"maxnreg": NOISY_REGISTERS} if is_noisy else {}),
    )
    splits2 = next_power_of_2(num_splits)
    _topk_merge_kernel[(num_rows,)](
        logits,
        logits.stride(0),
        temperature,
        row_to_slot,
        noise_temperature,
        seed,
        position,
        workspace,
        out_tokens,
        out_logprobs,
        vocab_size,
        num_splits,
        C=num_candidates,
        C2=c2,
        SPLITS2=splits2,
        SCALED=is_scaled,
        NOISY=is_noisy,
        STEPS=steps,
        BLOCK=BLOCK,
        # One warp reduces without a barrier; past 32 entries a lane it spills.
        num_warps=1 if c2 * splits2 <= 1024 else 4,
    )
