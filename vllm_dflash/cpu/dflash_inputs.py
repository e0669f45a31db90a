# SPDX-License-Identifier: Apache-2.0
"""Twin of `prepare_dflash_inputs` of `vllm/v1/worker/gpu/spec_decode/dflash`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from vllm_dflash.cpu import replacements

TARGET = "vllm.v1.worker.gpu.spec_decode.dflash.speculator:prepare_dflash_inputs"
_PAD_SLOT_ID = -1


def prepare_dflash_inputs(
    input_buffers: Any,
    query_slot_mapping: torch.Tensor,
    context_positions: torch.Tensor,
    context_slot_mapping: torch.Tensor,
    sample_indices: torch.Tensor,
    sample_pos: torch.Tensor,
    sample_idx_mapping: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    input_batch: Any,
    num_sampled: torch.Tensor,  # [num_reqs]
    num_rejected: torch.Tensor,  # [num_reqs]
    last_sampled: torch.Tensor,  # [max_num_reqs]
    next_prefill_tokens: torch.Tensor,  # [max_num_reqs]
    input_temperature: torch.Tensor,  # [max_num_reqs]
    input_seeds: torch.Tensor,  # [max_num_reqs]
    block_table: torch.Tensor,  # [max_num_reqs, max_num_blocks]
    block_size: int,
    cp_rank: int,
    cp_size: int,
    cp_interleave: int,
    parallel_drafting_token_id: int,
    num_query_per_req: int,
    num_speculative_steps: int,
    max_num_reqs: int,
    max_num_tokens: int,
    max_model_len: int,
    sample_from_anchor: bool = False,
) -> None:
    """Lay out context rows, query rows and sample rows of one draft pass.

    The first `query_len - num_rejected` rows of a request are its context; its block of
    a bonus token and mask tokens follows them. Rejected rows get position 0 and slot
    -1, and everything past the batch gets padding.
    """
    if cp_size != 1:
        replacements.original(TARGET)(
            input_buffers,
            query_slot_mapping,
            context_positions,
            context_slot_mapping,
            sample_indices,
            sample_pos,
            sample_idx_mapping,
            temperature,
            seeds,
            input_batch,
            num_sampled,
            num_rejected,
            last_sampled,
            next_prefill_tokens,
            input_temperature,
            input_seeds,
            block_table,
            block_size,
            cp_rank,
            cp_size,
            cp_interleave,
            parallel_drafting_token_id,
            num_query_per_req,
            num_speculative_steps,
            max_num_reqs,
            max_num_tokens,
            max_model_len,
            sample_from_anchor,
        )
        return

    num_reqs = input_batch.num_reqs
    width, steps = num_query_per_req, num_speculative_steps
    sample_off = 0 if sample_from_anchor else 1
    positions = input_batch.positions.numpy()
    starts = input_batch.query_start_loc.numpy()
    table = block_table.numpy()
    slots = input_batch.idx_mapping.tolist()
    out_ids = input_buffers.input_ids.numpy()
    out_positions = input_buffers.positions.numpy()
    out_starts = input_buffers.query_start_loc.numpy()
    out_lens = input_buffers.seq_lens.numpy()
    out_slots = query_slot_mapping.numpy()
    out_ctx_positions = context_positions.numpy()
    out_ctx_slots = context_slot_mapping.numpy()
    out_rows = sample_indices.numpy()
    out_sample_pos = sample_pos.numpy()
    out_sample_slots = sample_idx_mapping.numpy()

    for row, slot in enumerate(slots):
        begin, end = int(starts[row]), int(starts[row + 1])
        valid_end = end - int(num_rejected[row])
        context = positions[begin:valid_end]
        out_ctx_positions[begin:valid_end] = context
        out_ctx_positions[valid_end:end] = 0
        out_ctx_slots[begin:valid_end] = _slots(table[row], context, block_size)
        out_ctx_slots[valid_end:end] = _PAD_SLOT_ID

        query = int(positions[valid_end - 1]) + 1 + np.arange(width)
        base = row * width
        sampled = int(num_sampled[row]) > 0
        # The first row of [num_prefill_lookahead, max_num_reqs].
        source = last_sampled if sampled else next_prefill_tokens.reshape(-1)
        out_ids[base] = int(source[slot])
        out_ids[base + 1 : base + width] = parallel_drafting_token_id
        out_positions[base : base + width] = np.minimum(query, max_model_len - 1)
        out_slots[base : base + width] = _slots(table[row], query, block_size)

        samples = slice(row * steps, row * steps + width - sample_off)
        out_rows[samples] = base + np.arange(sample_off, width)
        out_sample_pos[samples] = query[sample_off:] + (1 - sample_off)
        out_sample_slots[samples] = slot

        out_starts[row] = base
        out_lens[row] = min(int(query[-1]) + 1, max_model_len)
        temperature[slot] = input_temperature[slot]
        seeds[slot] = input_seeds[slot]

    out_starts[num_reqs : max_num_reqs + 1] = num_reqs * width
    out_lens[num_reqs:max_num_reqs] = 0
    padding = slice(num_reqs * steps, max_num_reqs * steps)
    out_rows[padding] = 0
    out_sample_pos[padding] = 0
    out_sample_slots[padding] = -1
    out_slots[num_reqs * width : max_num_tokens] = _PAD_SLOT_ID


def _slots(table: np.ndarray, positions: np.ndarray, block_size: int) -> np.ndarray:
    """Return cache slots; -1 in block 0, which is never written."""
    blocks = table[np.minimum(positions // block_size, len(table) - 1)].astype(np.int64)
    return np.where(
        blocks != 0, blocks * block_size + positions % block_size, _PAD_SLOT_ID
    )
