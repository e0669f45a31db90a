# SPDX-License-Identifier: Apache-2.0
"""Best-first draft tree of every request from per-depth candidates."""

from __future__ import annotations

import torch

from ..dispatch import Impl, use_triton
from .reference import build_tree_reference

__all__ = ["build_tree"]


def build_tree(
    # [num_reqs * depth, C], int32
    cand_tokens: torch.Tensor,
    # [num_reqs * depth, C], fp32, natural log, each row descending
    cand_logprobs: torch.Tensor,
    # [>= num_reqs * depth], int64; request r is slots[r * depth], -1 = inert row
    slots: torch.Tensor,
    *,
    num_reqs: int,
    depth: int,
    # [max_num_reqs, W], int32
    parents: torch.Tensor,
    # [max_num_reqs, W], int32
    depths: torch.Tensor,
    # [max_num_reqs, W, ceil(W / 64)], int64
    ancestors: torch.Tensor,
    # [max_num_reqs], int32
    num_nodes: torch.Tensor,
    # [max_num_reqs], uint8, nonzero = degenerate chain
    chain_only: torch.Tensor,
    # [>= num_reqs, W - 1], int64, columns contiguous
    draft_tokens: torch.Tensor,
    impl: Impl = "auto",
) -> None:
    """Write the tree of the ``N = W - 1`` best prefixes of each request.

    The score of a node is its parent's score plus its candidate's log-probability,
    added in fp32 in this order from 0. Nodes are numbered from 1 in this order, which
    is total and puts parents first, so a prefix of the nodes is the smaller tree:

    1. larger score, 2. smaller depth, 3. lower rank among the candidates of that
    depth, 4. lower parent index.

    A node of score -inf (or NaN) is never emitted, so a tree can have fewer than N
    nodes. With ``chain_only`` only rank 0 is a candidate: node i + 1 has parent i.

    All outputs are written in place. ``draft_tokens`` row r belongs to request r of
    the batch, everything else to its slot. Unused nodes: token 0, parent -2, depth 0
    and only their own ancestor bit. A row of slot -1 gets zero tokens and leaves the
    tree buffers alone. Buffers are contiguous; ``W <= 256``, ``C <= 32``,
    ``depth <= 255``. The host never waits.
    """
    if num_reqs == 0:
        return
    width = parents.shape[1]
    if width > 256 or cand_tokens.shape[1] > 32 or depth > 255:
        raise ValueError(
            f"A draft tree has at most 255 nodes, 32 candidates and depth 255 (got "
            f"{width - 1} nodes, {cand_tokens.shape[1]} candidates, depth {depth})."
        )
    if use_triton(impl, cand_logprobs):
        from .kernel import build_tree as launch
    else:
        launch = build_tree_reference
    launch(
        cand_tokens,
        cand_logprobs,
        slots,
        num_reqs,
        depth,
        parents,
        depths,
        ancestors,
        num_nodes,
        chain_only,
        draft_tokens,
    )
