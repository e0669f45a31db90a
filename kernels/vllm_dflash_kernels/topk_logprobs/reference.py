# SPDX-License-Identifier: Apache-2.0
"""Top candidates with log-probabilities in torch: the meaning, and the CPU path."""

from __future__ import annotations

import torch

from .noise_reference import draw_noise_reference

LOWEST_LOGIT = -3.0e38
"""Logits at or below this, and NaN, have probability zero."""


def inverse_temperature(
    num_rows: int, temperature: torch.Tensor, row_to_slot: torch.Tensor
) -> torch.Tensor:
    """Return 1 / T per row, 1 for greedy requests and inert rows. [num_rows], fp32"""
    row_temperature = _temperature_of_rows(num_rows, temperature, row_to_slot)
    return 1.0 / torch.where(row_temperature > 0, row_temperature, 1.0)


def _temperature_of_rows(
    num_rows: int, temperature: torch.Tensor, row_to_slot: torch.Tensor
) -> torch.Tensor:
    """Return T of each row, 0 for greedy requests and inert rows. [num_rows], fp32"""
    slots = row_to_slot[:num_rows]
    return torch.where(slots >= 0, temperature[slots.clamp(min=0)].float(), 0.0)


def topk_logprobs_reference(
    logits: torch.Tensor,  # [num_rows, vocab_size]
    num_candidates: int,
    temperature: torch.Tensor | None,  # [max_num_reqs], fp32
    row_to_slot: torch.Tensor | None,  # [>= num_rows], int64
    is_scaled: bool = True,
    noise_temperature: torch.Tensor | None = None,  # [max_num_reqs], fp32
    seed: torch.Tensor | None = None,  # [max_num_reqs], int64
    position: torch.Tensor | None = None,  # [>= num_rows], int64
) -> tuple[torch.Tensor, torch.Tensor]:
    num_rows, vocab_size = logits.shape
    # Finite everywhere, so that no difference below is NaN.
    x = logits.float().nan_to_num(LOWEST_LOGIT, -LOWEST_LOGIT, LOWEST_LOGIT)
    x = x.clamp_(LOWEST_LOGIT, -LOWEST_LOGIT)
    if seed is not None:
        assert noise_temperature is not None and row_to_slot is not None
        assert position is not None
        x = _add_noise(x, noise_temperature, row_to_slot, seed, position)
    num_found = min(num_candidates, vocab_size)
    values, found = _topk_low_ties(x, num_found)

    logprobs = values
    row_max = values[:, :1].clone()
    if is_scaled and temperature is not None and row_to_slot is not None:
        scale = inverse_temperature(num_rows, temperature, row_to_slot)[:, None]
        normaliser = torch.logsumexp((x - row_max) * scale, -1, keepdim=True)
        logprobs = (values - row_max) * scale - normaliser
    else:
        normaliser = torch.logsumexp(x, -1, keepdim=True)
        logprobs = values - normaliser

    logprobs = logprobs.masked_fill(values <= LOWEST_LOGIT, -torch.inf)
    tokens = found.int()
    num_missing = num_candidates - num_found
    if num_missing:
        tokens = torch.nn.functional.pad(tokens, (0, num_missing), value=0)
        logprobs = torch.nn.functional.pad(logprobs, (0, num_missing), value=-torch.inf)
    return tokens, logprobs


def _add_noise(
    x: torch.Tensor,
    temperature: torch.Tensor,
    row_to_slot: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
) -> torch.Tensor:
    """Return logit + T * noise of the rows with T > 0."""
    row_temperature = _temperature_of_rows(len(x), temperature, row_to_slot)
    drawn = (row_temperature > 0).nonzero()[:, 0]
    if not len(drawn):
        return x
    seeds = seed[row_to_slot[drawn]]
    noise = draw_noise_reference(seeds, position[drawn], x.shape[1])
    noisy = x[drawn] + row_temperature[drawn, None] * noise
    noisy = noisy.clamp(LOWEST_LOGIT, -LOWEST_LOGIT)
    x[drawn] = torch.where(x[drawn] > LOWEST_LOGIT, noisy, x[drawn])
    return x


def _topk_low_ties(x: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """torch.topk along the rows, with ties resolved to the lower index."""
    values, found = torch.topk(x, k)
    # Among equal values torch.topk takes and orders any: redo the rows where it may
    # have had a choice, which real logits hardly ever give.
    is_choice = (x >= values[:, -1:]).sum(-1) > k
    is_choice |= (values[:, 1:] == values[:, :-1]).any(-1)
    for row in is_choice.nonzero().flatten().tolist():
        candidates = (x[row] >= values[row, -1]).nonzero().flatten()
        order = torch.sort(x[row, candidates], descending=True, stable=True)
        values[row] = order.values[:k]
        found[row] = candidates[order.indices[:k]]
    return values, found
