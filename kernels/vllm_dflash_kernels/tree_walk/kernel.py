# SPDX-License-Identifier: Apache-2.0
"""The walk over matching edges.

    matches[j] = token[j] == target_token[parent[j]]  and  node j is valid

Grid (num_reqs,), one warp each. All edges are tested at once; the walk then costs one
warp reduction a step: the lowest matching node whose parent is the current one.

Reads at most W rows of tokens, parents and flags; writes one row of each output.
Counting ranks costs one more reduction and one atomic a step.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..dispatch import next_power_of_2
from ..relaunch import KeptKernel

_NO_NODE = tl.constexpr(2**31 - 1)


# A slice's address is not a new compilation while serving.
@triton.jit(
    do_not_specialize_on_alignment=[
        "target_tokens_ptr",
        "node_tokens_ptr",
        "cu_num_logits_ptr",
        "slots_ptr",
        "tree_len_ptr",
        "invalid_ptr",
        "sampled_ptr",
        "num_sampled_ptr",
        "path_ptr",
        "rank_counts_ptr",
    ],
)
def _walk_tree_kernel(
    target_tokens_ptr,  # [num_logits], int64
    node_tokens_ptr,  # [num_logits], int32
    cu_num_logits_ptr,  # [num_reqs + 1], int32
    slots_ptr,  # [num_reqs], int64
    parents_ptr,  # [max_num_reqs, W], int32
    tree_len_ptr,  # [num_reqs], int32
    invalid_ptr,  # [num_logits], uint8
    sampled_ptr,  # [num_reqs, W], int64
    sampled_stride,
    num_sampled_ptr,  # [num_reqs], int32
    path_ptr,  # [num_reqs, MAX_ROWS], int32
    path_stride,
    rank_counts_ptr,  # [NUM_RANKS], int64
    W: tl.constexpr,
    SAMPLED_WIDTH: tl.constexpr,
    MAX_ROWS: tl.constexpr,
    HAS_INVALID: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    BLOCK_NODES: tl.constexpr,
    BLOCK_PATH: tl.constexpr,
    BLOCK_SAMPLED: tl.constexpr,
):
    req = tl.program_id(0).to(tl.int64)
    start = tl.load(cu_num_logits_ptr + req).to(tl.int64)
    end = tl.load(cu_num_logits_ptr + req + 1).to(tl.int64)
    slot = tl.load(slots_ptr + req)
    length = tl.where(slot >= 0, tl.load(tree_len_ptr + req), 0)

    node = tl.arange(0, BLOCK_NODES)
    is_draft = (node >= 1) & (node < length) & (node < W)
    parent = tl.load(parents_ptr + slot * W + node, mask=is_draft, other=-2)
    # Unused nodes have parent -2.
    is_draft = is_draft & (parent >= 0) & (parent < node)
    token = tl.load(node_tokens_ptr + start + node, mask=is_draft, other=-1)
    wanted = tl.load(target_tokens_ptr + start + parent, mask=is_draft, other=-2)
    is_match = is_draft & (token == wanted)
    if HAS_INVALID:
        invalid = tl.load(invalid_ptr + start + node, mask=is_draft, other=1)
        is_match = is_match & (invalid == 0)
    sibling_of = tl.where(is_draft, parent, -2)
    parent = tl.where(is_match, parent, -2)

    step = tl.arange(0, BLOCK_PATH)
    path = tl.zeros([BLOCK_PATH], tl.int32)
    num_rows = 1
    current = 0
    child = tl.min(tl.where(parent == 0, node, _NO_NODE), 0)
    while (num_rows < MAX_ROWS) & (child != _NO_NODE):
        path = tl.where(step == num_rows, child, path)
        num_rows += 1
        if NUM_RANKS > 0:
            is_lower = (sibling_of == current) & (node < child)
            rank = tl.sum(is_lower.to(tl.int32), 0)
            is_counted = (rank < NUM_RANKS) & (end > start)
            tl.atomic_add(rank_counts_ptr + rank, 1, mask=is_counted, sem="relaxed")
        current = child
        child = tl.min(tl.where(parent == child, node, _NO_NODE), 0)

    num_rows = tl.where(end > start, num_rows, 0)
    tl.store(num_sampled_ptr + req, num_rows)
    path = tl.where(step < num_rows, path, 0)
    tl.store(path_ptr + req * path_stride + step, path, mask=step < MAX_ROWS)
    out_ptr = sampled_ptr + req * sampled_stride
    drawn = tl.load(target_tokens_ptr + start + path, mask=step < num_rows, other=-1)
    tl.store(out_ptr + step, drawn, mask=step < SAMPLED_WIDTH)
    rest = tl.arange(0, BLOCK_SAMPLED)
    padding = tl.full([BLOCK_SAMPLED], -1, tl.int64)
    is_rest = (rest >= BLOCK_PATH) & (rest < SAMPLED_WIDTH)
    tl.store(out_ptr + rest, padding, mask=is_rest)


_KEPT = KeptKernel(_walk_tree_kernel, num_warps=1)


def walk_tree(
    target_tokens: torch.Tensor,
    node_tokens: torch.Tensor,
    cu_num_logits: torch.Tensor,
    slots: torch.Tensor,
    parents: torch.Tensor,
    tree_len: torch.Tensor,
    num_reqs: int,
    invalid_drafts: torch.Tensor | None,
    sampled: torch.Tensor,
    num_sampled: torch.Tensor,
    path: torch.Tensor,
    rank_counts: torch.Tensor | None,
) -> None:
    width, sampled_width, max_rows = parents.shape[1], sampled.shape[1], path.shape[1]
    assert parents.is_contiguous() and target_tokens.is_contiguous()
    assert sampled.stride(1) == 1 and path.stride(1) == 1
    if invalid_drafts is None:
        invalid = node_tokens  # not read
    else:
        invalid = invalid_drafts.view(torch.uint8)
    args = (
        target_tokens,
        node_tokens,
        cu_num_logits,
        slots,
        parents,
        tree_len,
        invalid,
        sampled,
        sampled.stride(0),
        num_sampled,
        path,
        path.stride(0),
        num_sampled if rank_counts is None else rank_counts,
    )
    _KEPT.launch(
        (num_reqs, 1, 1),
        args,
        W=width,
        SAMPLED_WIDTH=sampled_width,
        MAX_ROWS=max_rows,
        HAS_INVALID=invalid_drafts is not None,
        NUM_RANKS=0 if rank_counts is None else rank_counts.shape[0],
        BLOCK_NODES=next_power_of_2(width),
        BLOCK_PATH=next_power_of_2(max_rows),
        BLOCK_SAMPLED=next_power_of_2(sampled_width),
    )
