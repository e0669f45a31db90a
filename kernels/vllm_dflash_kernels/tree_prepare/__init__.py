# SPDX-License-Identifier: Apache-2.0
"""What a verify step needs to know of its trees: lengths, positions, ancestors."""

from __future__ import annotations

import torch

from ..dispatch import Impl, use_triton
from .reference import prepare_tree_step_reference

__all__ = ["prepare_tree_step"]


def prepare_tree_step(
    # [>= num_reqs], int64, -1 = inert row
    slots: torch.Tensor,
    # [>= num_reqs + 1], int32
    query_start_loc: torch.Tensor,
    # [>= num_reqs + 1], int32
    cu_num_logits: torch.Tensor,
    *,
    num_reqs: int,
    num_reqs_padded: int,
    # [max_num_reqs, W], int32
    depths: torch.Tensor,
    # [max_num_reqs, W, words], int64
    ancestors: torch.Tensor,
    # [max_num_reqs], int32, 0 = no tree
    num_nodes: torch.Tensor,
    # [>= num_tokens], int64, changed in place
    positions: torch.Tensor,
    # [>= num_reqs_padded, W, words], int64
    batch_ancestors: torch.Tensor,
    # [>= num_reqs_padded], int32
    tree_len: torch.Tensor,
    # [>= num_reqs_padded], int32
    prefix_len: torch.Tensor,
    impl: Impl = "auto",
) -> None:
    """Turn the last rows of each tree request into tree rows.

    Request r has ``cu_num_logits[r + 1] - cu_num_logits[r]`` logits rows (at most W).
    If they are more than one and its slot holds a tree, they are the tree: ``tree_len``
    is their number (root included, possibly fewer or more than the tree's nodes), and
    row i, at ``base + i`` with ``base = query_start_loc[r + 1] - tree_len[r]``, takes
    position ``positions[base] + depth of node i``. Otherwise ``tree_len`` is 0.

    ``batch_ancestors[r]`` is copied whole (all W rows) for a tree request and left
    alone for any other. ``prefix_len[r]`` is the position of the request's first row,
    the number of its committed tokens. Both lengths of rows
    ``num_reqs .. num_reqs_padded - 1`` become 0. The host never waits.
    """
    if num_reqs_padded == 0:
        return
    if use_triton(impl, tree_len):
        from .kernel import prepare_tree_step as launch
    else:
        launch = prepare_tree_step_reference
    launch(
        slots,
        query_start_loc,
        cu_num_logits,
        num_reqs,
        num_reqs_padded,
        depths,
        ancestors,
        num_nodes,
        positions,
        batch_ancestors,
        tree_len,
        prefix_len,
    )
