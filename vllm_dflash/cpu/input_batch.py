# SPDX-License-Identifier: Apache-2.0
"""Twins of `vllm/v1/worker/gpu/input_batch.py`.

An interpreted launch costs 1.5 to 4 ms whatever it computes; these loop over the few
requests of a CPU batch on NumPy views of the same memory. Names, arguments and what is
written in place are those of the launchers.
"""

from __future__ import annotations

import numpy as np
import torch


def prepare_prefill_inputs(
    input_ids: torch.Tensor,
    next_prefill_tokens: torch.Tensor,
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    all_token_ids: torch.Tensor,
    prefill_len: torch.Tensor,
    num_computed_tokens: torch.Tensor,
) -> None:
    """Copy the prompt tokens of the step, and those that follow it."""
    ids, lookahead = input_ids.numpy(), next_prefill_tokens.numpy()
    tokens, starts = all_token_ids.numpy(), query_start_loc.numpy()
    for row, slot in enumerate(idx_mapping.tolist()):
        computed, prompt = int(num_computed_tokens[slot]), int(prefill_len[slot])
        if computed >= prompt:
            continue
        end = computed + int(starts[row + 1] - starts[row])
        ids[starts[row] : starts[row + 1]] = tokens[slot, computed:end]
        ahead = tokens[slot, end : min(end + len(lookahead), prompt)]
        lookahead[:, slot] = 0
        lookahead[: len(ahead), slot] = ahead


def prepare_pos_seq_lens(
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    pos: torch.Tensor,
    seq_lens: torch.Tensor,
) -> None:
    """Write positions and sequence lengths; lengths of unused rows become 0."""
    num_reqs = idx_mapping.shape[0]
    starts = query_start_loc.numpy()[: num_reqs + 1]
    computed = num_computed_tokens.numpy()[idx_mapping.numpy()]
    positions, lens = pos.numpy(), seq_lens.numpy()
    lens[:num_reqs] = computed + np.diff(starts)
    lens[num_reqs:] = 0
    for row in range(num_reqs):
        positions[starts[row] : starts[row + 1]] = np.arange(computed[row], lens[row])


def combine_sampled_and_draft_tokens(
    input_ids: torch.Tensor,
    idx_mapping: torch.Tensor,
    last_sampled_tokens: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    prefill_len: torch.Tensor,
    draft_tokens: torch.Tensor,
    cu_num_logits: torch.Tensor,
    num_logits: int,
    num_new_sampled_tokens: int = 1,
) -> torch.Tensor:
    """Write the last token and the drafts of each request into `input_ids`.

    Returns:
        Rows of the logits [num_logits], int64.
    """
    assert num_new_sampled_tokens in (0, 1)
    ids, drafts = input_ids.numpy(), draft_tokens.numpy()
    ends, cu = query_start_loc.numpy()[1:], cu_num_logits.numpy()
    logits_indices = np.empty(num_logits, dtype=np.int64)
    for row, slot in enumerate(idx_mapping.tolist()):
        count = int(cu[row + 1] - cu[row])
        first = int(ends[row]) - count
        logits_indices[cu[row] : cu[row + 1]] = np.arange(first, first + count)
        length, prompt = int(seq_lens[row]), int(prefill_len[slot])
        if length <= prompt:
            continue
        if num_new_sampled_tokens > 0 and length - count >= prompt:
            ids[first] = int(last_sampled_tokens[slot])
        num_drafts = count - num_new_sampled_tokens
        if num_drafts > 0:
            ids[ends[row] - num_drafts : ends[row]] = drafts[slot, :num_drafts]
    return torch.from_numpy(logits_indices)


def get_num_sampled_and_rejected(
    num_sampled: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_num_logits: torch.Tensor,
    idx_mapping: torch.Tensor,
    prefill_len: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Zero `num_sampled` of unfinished prefills in place; return it and the rest."""
    num_reqs = idx_mapping.shape[0]
    rejected = torch.empty_like(num_sampled)
    sampled_np, rejected_np = num_sampled.numpy(), rejected.numpy()
    unfinished = seq_lens.numpy()[:num_reqs] < prefill_len.numpy()[idx_mapping.numpy()]
    sampled_np[:num_reqs][unfinished] = 0
    count = np.diff(cu_num_logits.numpy()[: num_reqs + 1])
    rejected_np[:num_reqs] = np.where(unfinished, 0, count - sampled_np[:num_reqs])
    return num_sampled, rejected


def post_update(
    idx_mapping: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    last_sampled_tokens: torch.Tensor,
    output_bin_counts: torch.Tensor | None,
    sampled_tokens: torch.Tensor,
    num_sampled: torch.Tensor,
    num_rejected: torch.Tensor,
    query_start_loc: torch.Tensor | None,
    all_token_ids: torch.Tensor,
    total_len: torch.Tensor,
) -> None:
    """Append the sampled tokens to the state of each request."""
    sampled, tokens = sampled_tokens.numpy(), all_token_ids.numpy()
    totals, computed = total_len.numpy(), num_computed_tokens.numpy()
    for row, slot in enumerate(idx_mapping.tolist()):
        if slot < 0:
            continue
        count = int(num_sampled[row])
        new = sampled[row, :count]
        if count > 0:
            start = int(totals[slot])
            last_sampled_tokens[slot] = int(new[-1])
            tokens[slot, start : start + count] = new
            totals[slot] = start + count
            if output_bin_counts is not None:
                np.add.at(output_bin_counts[slot].numpy(), new, 1)
        query_len = (
            0
            if query_start_loc is None
            else int(query_start_loc[row + 1] - query_start_loc[row])
        )
        computed[slot] += query_len - int(num_rejected[row])


def post_update_num_computed_tokens(
    idx_mapping: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    query_start_loc: torch.Tensor,
) -> None:
    """Advance the requests by their query lengths."""
    num_reqs = idx_mapping.shape[0]
    steps = np.diff(query_start_loc.numpy()[: num_reqs + 1])
    num_computed_tokens.numpy()[idx_mapping.numpy()] += steps


def expand_idx_mapping(
    idx_mapping: torch.Tensor,
    total_num_logits: int,
    cu_num_logits: torch.Tensor,
    max_expand_len: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the request slot and the place in its request of each logits row."""
    del max_expand_len
    counts = np.diff(cu_num_logits.numpy()[: idx_mapping.shape[0] + 1])
    expanded = idx_mapping.new_empty(total_num_logits)
    local_pos = torch.empty(total_num_logits, dtype=torch.int32)
    slots = np.repeat(idx_mapping.numpy(), counts)
    starts = np.repeat(np.cumsum(counts) - counts, counts)
    expanded.numpy()[: len(slots)] = slots
    local_pos.numpy()[: len(slots)] = np.arange(len(slots)) - starts
    return expanded, local_pos
