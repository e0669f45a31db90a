# SPDX-License-Identifier: Apache-2.0
"""Twins of the kernels that forbid or favour a few tokens of a row."""

from __future__ import annotations

import torch


def apply_logit_bias(
    logits: torch.Tensor,  # [num_tokens, vocab_size], in place
    expanded_idx_mapping: torch.Tensor,  # [num_tokens]
    pos: torch.Tensor,  # [num_tokens]
    num_allowed_token_ids: torch.Tensor,  # [max_num_reqs]
    allowed_token_ids: torch.Tensor,  # [max_num_reqs, width]
    num_logit_bias: torch.Tensor,  # [max_num_reqs]
    logit_bias_token_ids: torch.Tensor,  # [max_num_reqs, width]
    logit_bias: torch.Tensor,  # [max_num_reqs, width]
    min_lens: torch.Tensor,  # [max_num_reqs]
    num_stop_token_ids: torch.Tensor,  # [max_num_reqs]
    restore_when_all_masked: torch.Tensor,  # [max_num_reqs]
    stop_token_ids: torch.Tensor,  # [max_num_reqs, width]
    check_all_masked_rows: bool = False,
) -> None:
    """Keep allowed tokens, add biases, forbid stop tokens below the minimum length."""
    places = pos.tolist()
    for row, slot in enumerate(expanded_idx_mapping.tolist()):
        values = logits[row]
        count = int(num_allowed_token_ids[slot])
        if count > 0:
            allowed = allowed_token_ids[slot, :count].long()
            kept = values[allowed]
            values.fill_(-torch.inf)
            values[allowed] = kept
        count = int(num_logit_bias[slot])
        if count > 0:
            tokens = logit_bias_token_ids[slot, :count].long()
            values[tokens] += logit_bias[slot, :count]
        count = int(num_stop_token_ids[slot])
        if count > 0 and places[row] + 1 < int(min_lens[slot]):
            stops = stop_token_ids[slot, :count].long()
            kept = values[stops]
            values[stops] = -torch.inf
            # A grammar may leave nothing but a stop token.
            if (
                check_all_masked_rows
                and bool(restore_when_all_masked[slot])
                and bool((values == -torch.inf).all())
            ):
                finite = torch.isfinite(kept)
                values[stops[finite]] = kept[finite]


def apply_bad_words(
    logits: torch.Tensor,  # [num_tokens, vocab_size], in place
    expanded_idx_mapping: torch.Tensor,  # [num_tokens]
    bad_word_token_ids: torch.Tensor,  # [max_num_reqs, width]
    bad_word_offsets: torch.Tensor,  # [max_num_reqs, width]
    num_bad_words: torch.Tensor,  # [max_num_reqs]
    all_token_ids: torch.Tensor,  # [max_num_reqs, max_model_len]
    prompt_len: torch.Tensor,  # [max_num_reqs]
    total_len: torch.Tensor,  # [max_num_reqs]
    input_ids: torch.Tensor,  # [num_tokens], input id of each row
    expanded_local_pos: torch.Tensor,  # [num_tokens]
    max_num_bad_words: int,
) -> None:
    """Forbid the last token of each bad word whose beginning the output ends with.

    The output of a row is the request's, then the drafts before the row.
    """
    del max_num_bad_words
    ids = input_ids.tolist()
    for row, slot in enumerate(expanded_idx_mapping.tolist()):
        count = int(num_bad_words[slot])
        if count == 0:
            continue
        local = int(expanded_local_pos[row])
        begin, end = int(prompt_len[slot]), int(total_len[slot])
        output = all_token_ids[slot, begin:end].tolist()
        output += ids[row - local + 1 : row + 1]
        offsets = bad_word_offsets[slot, : count + 1].tolist()
        words = bad_word_token_ids[slot, : offsets[-1]].tolist()
        for start, stop in zip(offsets, offsets[1:], strict=False):
            *beginning, last = words[start:stop]
            if output[len(output) - len(beginning) :] == beginning:
                logits[row, last] = -torch.inf
