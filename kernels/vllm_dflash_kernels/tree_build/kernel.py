# SPDX-License-Identifier: Apache-2.0
"""Best-first tree in registers.

    score(node) = score(parent) + logprob[depth(node), rank(node)]

Grid (num_reqs,), one warp each. The frontier holds the best unpopped prefix of every
open branch: score as ordered int32, and the identity (depth, rank, parent index)
packed so that the smaller number wins a tie. Popping frees the entry for the node's
next sibling and opens one fresh entry for its first child, so pop ``i`` (from 1)
uses entry ``i`` and the frontier never exceeds N. A pop costs three warp reductions:
best score, best identity among equals, and the parent's score of the winner.

Ancestor bits follow the parent pointers, all nodes at once, after a barrier.

Reads the request's ``[depth, C]`` candidates (in L1 after the first touch), writes
its rows of the tree buffers and of ``draft_tokens``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..dispatch import next_power_of_2
from ..float_order import float_to_ordered, ordered_to_float

# Identity of a node: depth << 13 | rank << 8 | parent index.
_DEPTH_SHIFT = tl.constexpr(13)
_RANK_SHIFT = tl.constexpr(8)
_RANK_MASK = tl.constexpr(31)
_PARENT_MASK = tl.constexpr(255)
_NEXT_RANK = tl.constexpr(1 << 8)
_FIRST_DEPTH = tl.constexpr(1 << 13)
_INT_MIN = tl.constexpr(-(2**31))
_INT_MAX = tl.constexpr(2**31 - 1)


@triton.jit
def _order_score(score):
    """Ordered form of a score; -inf and NaN become the value of an empty entry."""
    return tl.where(score > float("-inf"), float_to_ordered(score), _INT_MIN)


@triton.jit
def _build_tree_kernel(
    cand_tokens_ptr,  # [num_reqs * K, C], int32
    cand_logprobs_ptr,  # [num_reqs * K, C], fp32
    slots_ptr,  # [>= num_reqs * K], int64
    chain_only_ptr,  # [max_num_reqs], uint8
    parents_ptr,  # [max_num_reqs, W], int32
    depths_ptr,  # [max_num_reqs, W], int32
    ancestors_ptr,  # [max_num_reqs, W, WORDS], int64
    num_nodes_ptr,  # [max_num_reqs], int32
    draft_tokens_ptr,  # [num_reqs, W - 1], int64
    draft_tokens_stride,
    K: tl.constexpr,
    C: tl.constexpr,
    W: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK_FRONTIER: tl.constexpr,
    BLOCK_NODES: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,
):
    req = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + req * K)
    node = tl.arange(0, BLOCK_NODES)
    draft_ptr = draft_tokens_ptr + req * draft_tokens_stride + node - 1
    is_draft = (node >= 1) & (node < W)
    if slot < 0:
        tl.store(draft_ptr, tl.zeros([BLOCK_NODES], tl.int64), mask=is_draft)
        return

    is_tree = tl.load(chain_only_ptr + slot) == 0
    logprobs_ptr = cand_logprobs_ptr + req * (K * C)
    entry = tl.arange(0, BLOCK_FRONTIER)
    first = _order_score(0.0 + tl.load(logprobs_ptr))
    key = tl.where(entry == 0, first, _INT_MIN)
    identity = tl.where(entry == 0, _FIRST_DEPTH, _INT_MAX)
    parent_score = tl.zeros([BLOCK_FRONTIER], tl.int32)  # fp32 bits
    nodes = tl.full([BLOCK_NODES], -1, tl.int32)  # identity, -1 = unused

    num_nodes = 1
    best_key = tl.max(key, 0)
    while (num_nodes < W) & (best_key > _INT_MIN):
        best = tl.min(tl.where(key == best_key, identity, _INT_MAX), 0)
        # Identities never repeat within a request, not even in emptied entries.
        is_best = identity == best
        base_bits = tl.sum(tl.where(is_best, parent_score, 0), 0)
        depth = best >> _DEPTH_SHIFT
        rank = (best >> _RANK_SHIFT) & _RANK_MASK
        # Row depth - 1 holds the candidates of this depth.
        sibling_ptr = logprobs_ptr + (depth - 1) * C + rank + 1
        sibling_logprob = tl.load(
            sibling_ptr, mask=is_tree & (rank + 1 < C), other=float("-inf")
        )
        child_logprob = tl.load(
            logprobs_ptr + depth * C, mask=depth < K, other=float("-inf")
        )
        score = ordered_to_float(best_key)
        sibling_score = base_bits.to(tl.float32, bitcast=True) + sibling_logprob
        child_score = score + child_logprob

        key = tl.where(is_best, _order_score(sibling_score), key)
        identity = tl.where(is_best, best + _NEXT_RANK, identity)
        is_fresh = entry == num_nodes
        key = tl.where(is_fresh, _order_score(child_score), key)
        child_identity = ((depth + 1) << _DEPTH_SHIFT) | num_nodes
        identity = tl.where(is_fresh, child_identity, identity)
        parent_score = tl.where(
            is_fresh, score.to(tl.int32, bitcast=True), parent_score
        )
        nodes = tl.where(node == num_nodes, best, nodes)
        num_nodes += 1
        best_key = tl.max(key, 0)

    is_used = nodes >= 0
    depth = tl.where(is_used, nodes >> _DEPTH_SHIFT, 0)
    parent = tl.where(is_used, nodes & _PARENT_MASK, -2)
    parent = tl.where(node == 0, -1, parent)
    rank = (nodes >> _RANK_SHIFT) & _RANK_MASK
    token = tl.load(
        cand_tokens_ptr + req * (K * C) + (depth - 1) * C + rank, mask=is_used, other=0
    )
    is_node = node < W
    parent_row_ptr = parents_ptr + slot * W
    tl.store(parent_row_ptr + node, parent, mask=is_node)
    tl.store(depths_ptr + slot * W + node, depth, mask=is_node)
    tl.store(draft_ptr, token.to(tl.int64), mask=is_draft)
    tl.store(num_nodes_ptr + slot, num_nodes)

    # The parents just stored are read by other lanes.
    tl.debug_barrier()
    word = tl.arange(0, BLOCK_WORDS)[None, :]
    bits = tl.zeros([BLOCK_NODES, BLOCK_WORDS], tl.int64)
    one = tl.full([BLOCK_NODES], 1, tl.int64)
    current = tl.where(is_node, node, -1)
    for _ in range(K + 1):
        # A negative node is in no word, so it adds nothing.
        bit = one << (current & 63).to(tl.int64)
        bits |= tl.where((current >> 6)[:, None] == word, bit[:, None], 0)
        current = tl.load(parent_row_ptr + current, mask=current >= 0, other=-1)
    tl.store(
        ancestors_ptr + (slot * W + node[:, None]) * WORDS + word,
        bits,
        mask=is_node[:, None] & (word < WORDS),
    )


def build_tree(
    cand_tokens: torch.Tensor,
    cand_logprobs: torch.Tensor,
    slots: torch.Tensor,
    num_reqs: int,
    depth: int,
    parents: torch.Tensor,
    depths: torch.Tensor,
    ancestors: torch.Tensor,
    num_nodes: torch.Tensor,
    chain_only: torch.Tensor,
    draft_tokens: torch.Tensor,
) -> None:
    width, words = ancestors.shape[1:]
    assert cand_tokens.is_contiguous() and cand_logprobs.is_contiguous()
    assert parents.is_contiguous() and depths.is_contiguous()
    assert ancestors.is_contiguous() and draft_tokens.stride(1) == 1
    _build_tree_kernel[(num_reqs,)](
        cand_tokens,
        cand_logprobs,
        slots,
        chain_only,
        parents,
        depths,
        ancestors,
        num_nodes,
        draft_tokens,
        draft_tokens.stride(0),
        K=depth,
        C=cand_tokens.shape[1],
        W=width,
        WORDS=words,
        BLOCK_FRONTIER=next_power_of_2(width - 1),
        BLOCK_NODES=next_power_of_2(width),
        BLOCK_WORDS=next_power_of_2(words),
        num_warps=1,
    )
