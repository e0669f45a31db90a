# SPDX-License-Identifier: Apache-2.0
"""Preparation of a verify step.

    tree_len[r] = n  if n > 1 and the slot holds a tree, else 0   (n logits rows)
    prefix_len[r] = positions[query_start[r]]
    positions[base + i] = positions[base] + depth[i],  base = query_end[r] - n

Grid (num_reqs_padded,), one warp each: a program per batch row, padded rows included.
Reads and writes at most W positions and W rows of ancestor words.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..dispatch import next_power_of_2
from ..relaunch import KeptKernel


# Neither a batch size nor a slice's address is a new compilation while serving.
@triton.jit(
    do_not_specialize=["num_reqs"],
    do_not_specialize_on_alignment=[
        "slots_ptr",
        "query_start_loc_ptr",
        "cu_num_logits_ptr",
        "positions_ptr",
        "tree_len_ptr",
        "prefix_len_ptr",
    ],
)
def _prepare_tree_step_kernel(
    slots_ptr,  # [num_reqs], int64
    query_start_loc_ptr,  # [num_reqs + 1], int32
    cu_num_logits_ptr,  # [num_reqs + 1], int32
    num_reqs,
    depths_ptr,  # [max_num_reqs, W], int32
    ancestors_ptr,  # [max_num_reqs, W, WORDS], int64
    num_nodes_ptr,  # [max_num_reqs], int32
    positions_ptr,  # [num_tokens], int64
    batch_ancestors_ptr,  # [num_reqs_padded, W, WORDS], int64
    tree_len_ptr,  # [num_reqs_padded], int32
    prefix_len_ptr,  # [num_reqs_padded], int32
    W: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK_NODES: tl.constexpr,
    BLOCK_ROW: tl.constexpr,
):
    req = tl.program_id(0).to(tl.int64)
    is_req = req < num_reqs
    slot = tl.load(slots_ptr + req, mask=is_req, other=-1)
    logits_start = tl.load(cu_num_logits_ptr + req, mask=is_req, other=0)
    logits_end = tl.load(cu_num_logits_ptr + req + 1, mask=is_req, other=0)
    num_nodes = tl.load(num_nodes_ptr + slot, mask=slot >= 0, other=0)
    num_logits = logits_end - logits_start
    length = tl.where((num_logits > 1) & (num_nodes > 0), num_logits, 0)
    tl.store(tree_len_ptr + req, length)
    # Neither this row nor the root's is written below: its depth would be 0.
    first_row = tl.load(query_start_loc_ptr + req, mask=is_req, other=0)
    prefix = tl.load(positions_ptr + first_row, mask=is_req, other=0)
    tl.store(prefix_len_ptr + req, prefix.to(tl.int32))
    if length == 0:
        return

    base = tl.load(query_start_loc_ptr + req + 1).to(tl.int64) - length
    node = tl.arange(0, BLOCK_NODES)
    root_position = tl.load(positions_ptr + base)
    # The root's depth is 0: row base keeps its position and is not written, so its
    # read above races with nothing.
    is_row = (node >= 1) & (node < length) & (node < W)
    depth = tl.load(depths_ptr + slot * W + node, mask=is_row, other=0)
    tl.store(positions_ptr + base + node, root_position + depth, mask=is_row)

    word = tl.arange(0, BLOCK_ROW)
    is_word = word < W * WORDS
    bits = tl.load(ancestors_ptr + slot * (W * WORDS) + word, mask=is_word, other=0)
    tl.store(batch_ancestors_ptr + req * (W * WORDS) + word, bits, mask=is_word)


_KEPT = KeptKernel(_prepare_tree_step_kernel, num_warps=1)


def prepare_tree_step(
    slots: torch.Tensor,
    query_start_loc: torch.Tensor,
    cu_num_logits: torch.Tensor,
    num_reqs: int,
    num_reqs_padded: int,
    depths: torch.Tensor,
    ancestors: torch.Tensor,
    num_nodes: torch.Tensor,
    positions: torch.Tensor,
    batch_ancestors: torch.Tensor,
    tree_len: torch.Tensor,
    prefix_len: torch.Tensor,
) -> None:
    width, words = ancestors.shape[1:]
    assert depths.is_contiguous() and ancestors.is_contiguous()
    assert batch_ancestors.is_contiguous()
    args = (
        slots,
        query_start_loc,
        cu_num_logits,
        num_reqs,
        depths,
        ancestors,
        num_nodes,
        positions,
        batch_ancestors,
        tree_len,
        prefix_len,
    )
    _KEPT.launch(
        (num_reqs_padded, 1, 1),
        args,
        W=width,
        WORDS=words,
        BLOCK_NODES=next_power_of_2(width),
        BLOCK_ROW=next_power_of_2(width * words),
    )
