# SPDX-License-Identifier: Apache-2.0
"""Twins of the chain's rejection sampler in `vllm/v1/worker/gpu/spec_decode`.

A tree does not use them; vLLM's own chain on the CPU does, and without them it would
spend 200 ms a step here.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from vllm_dflash.cpu import replacements
from vllm_dflash.cpu.gumbel import gumbel_noise

TARGET = "vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils:rejection_sample"
_MASK32 = 0xFFFFFFFF
_RAND_MIN = 4.6566127342e-10


def gather_draft_sampled(
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    logits_indices: torch.Tensor,
    expanded_idx_mapping: torch.Tensor,
    expanded_local_pos: torch.Tensor,
    prefill_len: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token (placeholder drafts: -1) and position of each logits row."""
    pos = positions[logits_indices]
    tokens = input_ids[logits_indices]
    prompts = prefill_len[expanded_idx_mapping.long()]
    placeholder = (expanded_local_pos > 0) & (pos - expanded_local_pos < prompts)
    return tokens.masked_fill(placeholder, -1), pos


def rejection_sample(
    target_logits: torch.Tensor,  # [num_logits, V]
    draft_logits: torch.Tensor | None,
    draft_sampled: torch.Tensor,  # [num_logits]
    cu_num_logits: torch.Tensor,  # [num_reqs + 1]
    pos: torch.Tensor,  # [num_logits]
    idx_mapping: torch.Tensor,  # [num_reqs]
    expanded_idx_mapping: torch.Tensor,  # [num_logits]
    expanded_local_pos: torch.Tensor,  # [num_logits]
    temperature: torch.Tensor,  # [max_num_reqs]
    seed: torch.Tensor,  # [max_num_reqs]
    num_speculative_steps: int,
    synthetic_conditional_rates: torch.Tensor | None = None,
    use_fp64: bool = False,
    use_block_verification: bool = False,
    contexts: torch.Tensor | None = None,
    watermarking: torch.Tensor | None = None,
    watermarking_skip_mask: torch.Tensor | None = None,
    watermark_key: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Verify chains of greedy drafts; the other methods stay interpreted.

    Returns:
        Tokens [num_reqs, num_speculative_steps + 1], int64, garbage past the sampled
        ones, and their numbers [num_reqs], int32.
    """
    if (
        draft_logits is not None
        or synthetic_conditional_rates is not None
        or use_block_verification
        or contexts is not None
    ):
        return replacements.original(TARGET)(
            target_logits,
            draft_logits,
            draft_sampled,
            cu_num_logits,
            pos,
            idx_mapping,
            expanded_idx_mapping,
            expanded_local_pos,
            temperature,
            seed,
            num_speculative_steps,
            synthetic_conditional_rates,
            use_fp64,
            use_block_verification,
            contexts,
            watermarking,
            watermarking_skip_mask,
            watermark_key,
        )

    num_reqs = cu_num_logits.shape[0] - 1
    sampled = torch.zeros(num_reqs, num_speculative_steps + 1, dtype=torch.int64)
    num_sampled = torch.zeros(num_reqs, dtype=torch.int32)
    cu, drafts, places = cu_num_logits.tolist(), draft_sampled.tolist(), pos.tolist()
    for row, slot in enumerate(idx_mapping.tolist()):
        begin, end = cu[row], cu[row + 1]
        verify = _verify_greedy if float(temperature[slot]) == 0 else _verify_random
        tokens = verify(
            target_logits[begin:end],
            drafts[begin + 1 : end],
            places[begin:end],
            int(seed[slot]),
            use_fp64,
        )
        sampled[row, : len(tokens)] = torch.tensor(tokens)
        num_sampled[row] = len(tokens)
    return sampled, num_sampled


def _verify_greedy(
    logits: torch.Tensor, drafts: list[int], places: list[int], seed: int, fp64: bool
) -> list[int]:
    del places, seed, fp64
    best = logits.argmax(-1).tolist()
    accepted = 0
    while accepted < len(drafts) and drafts[accepted] == best[accepted]:
        accepted += 1
    return best[: accepted + 1]


def _verify_random(
    logits: torch.Tensor, drafts: list[int], places: list[int], seed: int, fp64: bool
) -> list[int]:
    accepted = 0
    for draft in drafts:
        if draft < 0:
            break
        row = logits[accepted].float()
        logprob = float(row[draft] - row.logsumexp(0))
        threshold = max(philox_uniform(seed, places[accepted]), _RAND_MIN)
        if not logprob > math.log(threshold):
            break
        accepted += 1
    residual = logits[accepted].float()
    if accepted < len(drafts) and drafts[accepted] >= 0:
        residual = residual.clone()
        residual[drafts[accepted]] = -torch.inf
    noise = gumbel_noise(seed, places[accepted], len(residual), fp64)
    return [*drafts[:accepted], int((residual + noise).argmax())]


def philox_uniform(seed: int, offset: int) -> float:
    """Return `tl.rand(seed, offset)` of an int64 offset, before rounding to fp32."""
    c0, c1, c2, c3 = offset & _MASK32, (offset >> 32) & _MASK32, 0, 0
    k0, k1 = seed & _MASK32, (seed >> 32) & _MASK32
    for _ in range(10):
        b, a = 0xCD9E8D57 * c2, 0xD2511F53 * c0
        c0, c2 = (b >> 32) ^ c1 ^ k0, (a >> 32) ^ c3 ^ k1
        c1, c3 = b & _MASK32, a & _MASK32
        k0, k1 = (k0 + 0x9E3779B9) & _MASK32, (k1 + 0xBB67AE85) & _MASK32
    return (c0 if c0 < 1 << 31 else c0 ^ _MASK32) * _RAND_MIN


def flatten_sampled_kernel(grid: tuple[int, ...], *args: Any, **kwargs: Any) -> None:
    """Twin of `_flatten_sampled_kernel`: sampled tokens to the rows that drew them."""
    flat_sampled, sampled, _, num_sampled, cu_num_logits = args
    for row in range(grid[0]):
        count, start = int(num_sampled[row]), int(cu_num_logits[row])
        flat_sampled[start : start + count] = sampled[row, :count]
