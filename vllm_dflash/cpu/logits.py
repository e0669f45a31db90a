# SPDX-License-Identifier: Apache-2.0
"""Twins of the kernels that walk the vocabulary: one torch call a row."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def apply_temperature(
    logits: torch.Tensor,  # [num_tokens, vocab_size], in place
    expanded_idx_mapping: torch.Tensor,  # [num_tokens]
    temperature: torch.Tensor,  # [max_num_reqs]
) -> None:
    """Divide each row by its temperature; 0 counts as 1."""
    temps = temperature[expanded_idx_mapping.long()].float()
    logits.div_(torch.where(temps == 0, 1.0, temps).unsqueeze(1))


def apply_min_p(
    logits: torch.Tensor,  # [num_tokens, vocab_size], in place
    expanded_idx_mapping: torch.Tensor,  # [num_tokens]
    min_p: torch.Tensor,  # [max_num_reqs]
) -> None:
    """Mask the tokens below `min_p` times the likeliest."""
    # log(0) = -inf keeps every token of a row without min_p.
    floor = min_p[expanded_idx_mapping.long()].float().log()
    threshold = logits.amax(-1).float() + floor
    logits.masked_fill_(logits < threshold.unsqueeze(1), -torch.inf)


def apply_top_k_top_p(
    logits: torch.Tensor,  # [num_tokens, vocab_size], in place
    k: torch.Tensor | None,  # [num_tokens]
    p: torch.Tensor | None,  # [num_tokens]
) -> torch.Tensor:
    """Mask the tokens outside of top-k and top-p.

    vLLM's Triton kernel does not run interpreted, and its torch path sorts token ids
    along with the logits, 60 times slower than NumPy sorts values. Tokens that tie with
    the last one kept are kept.

    Returns:
        `logits`.
    """
    if k is None and p is None:
        return logits
    ascending = torch.from_numpy(np.sort(logits.float().numpy(), axis=-1))
    threshold = ascending[:, :1]
    if k is not None:
        place = logits.shape[1] - k.long().unsqueeze(1)
        threshold = ascending.gather(1, place)
        ascending.masked_fill_(ascending < threshold, -torch.inf)
    if p is not None:
        cumulative = ascending.softmax(-1).cumsum_(-1)
        # The likeliest token stays, whatever p is.
        outside = (cumulative[:, :-1] <= 1 - p.unsqueeze(1)).sum(-1, keepdim=True)
        threshold = torch.maximum(threshold, ascending.gather(1, outside))
    return logits.masked_fill_(logits < threshold, -torch.inf)


def compute_token_logprobs(
    logits: torch.Tensor,  # [num_tokens, vocab_size]
    token_ids: torch.Tensor,  # [num_tokens, num_logprobs]
) -> torch.Tensor:
    """Return natural log-probabilities [num_tokens, num_logprobs], fp32."""
    rows = logits.float()
    highest = rows.amax(-1, keepdim=True)
    log_sum = (rows - highest).exp().sum(-1, keepdim=True).log()
    return rows.gather(-1, token_ids.long()) - highest - log_sum


def ranks_kernel(grid: tuple[int, ...], *args: Any, **kwargs: Any) -> None:
    """Twin of `_ranks_kernel`: how many logits are at least the token's own."""
    del grid, kwargs
    output, logits, _, token_ids, _ = args
    own = logits.gather(-1, token_ids.long().unsqueeze(1))
    output.copy_((logits >= own).sum(-1))


def apply_penalties(
    logits: torch.Tensor,  # [num_tokens, vocab_size], in place
    expanded_idx_mapping: torch.Tensor,  # [num_tokens]
    token_ids: torch.Tensor,  # [num_tokens], input id of each row
    expanded_local_pos: torch.Tensor,  # [num_tokens]
    repetition_penalty: torch.Tensor,  # [max_num_reqs]
    frequency_penalty: torch.Tensor,  # [max_num_reqs]
    presence_penalty: torch.Tensor,  # [max_num_reqs]
    prompt_bin_mask: torch.Tensor,  # [max_num_reqs, ceil(vocab_size / 32)], bits
    output_bin_counts: torch.Tensor,  # [max_num_reqs, vocab_size]
) -> None:
    """Penalise what the prompt, the output and the drafts before a row contain."""
    vocab_size = logits.shape[1]
    for row, slot in enumerate(expanded_idx_mapping.tolist()):
        repetition = float(repetition_penalty[slot])
        frequency = float(frequency_penalty[slot])
        presence = float(presence_penalty[slot])
        if repetition == 1 and frequency == 0 and presence == 0:
            continue
        counts = output_bin_counts[slot, :vocab_size].clone()
        local = int(expanded_local_pos[row])
        drafts = token_ids[row - local + 1 : row + 1].long()
        counts.index_add_(0, drafts, counts.new_ones(local))
        seen = counts > 0
        values = logits[row].float()
        if repetition != 1:
            packed = prompt_bin_mask[slot].numpy().view(np.uint8)
            bits = np.unpackbits(packed, bitorder="little")[:vocab_size]
            scale = torch.where(seen | torch.from_numpy(bits).bool(), repetition, 1.0)
            values *= torch.where(values > 0, 1.0 / scale, scale)
        values -= frequency * counts
        values -= presence * seen
        logits[row] = values


def apply_grammar_bitmask_kernel(
    grid: tuple[int, ...], *args: Any, **kwargs: Any
) -> None:
    """Twin of `_apply_grammar_bitmask_kernel`: forbid the tokens of zero bits."""
    logits, _, logits_indices, cu_num_logits, bitmask, _, vocab_size = args
    stride = kwargs["MASK_STRIDE"]
    for index in range(grid[0]):
        request, place = divmod(int(logits_indices[index]), stride)
        row = int(cu_num_logits[request]) + place
        if row >= int(cu_num_logits[request + 1]):
            continue
        packed = bitmask[index].numpy().view(np.uint8)
        allowed = np.unpackbits(packed, bitorder="little")[:vocab_size]
        logits[row, : len(allowed)].masked_fill_(
            torch.from_numpy(allowed == 0), -torch.inf
        )
