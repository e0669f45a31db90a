# SPDX-License-Identifier: Apache-2.0
"""Follow the target's own tokens down the tree of every request."""

from __future__ import annotations

import torch

from ..dispatch import Impl, use_triton
from .reference import walk_tree_reference

__all__ = ["walk_tree"]


def walk_tree(
    # [num_logits], int64, the token the target drew at each logits row
    target_tokens: torch.Tensor,
    # [num_logits], int32, the input token of each logits row
    node_tokens: torch.Tensor,
    # [>= num_reqs + 1], int32
    cu_num_logits: torch.Tensor,
    # [>= num_reqs], int64, -1 = no tree
    slots: torch.Tensor,
    # [max_num_reqs, W], int32
    parents: torch.Tensor,
    # [>= num_reqs], int32
    tree_len: torch.Tensor,
    *,
    num_reqs: int | None = None,
    # [num_logits], bool, rows that must not be accepted
    invalid_drafts: torch.Tensor | None = None,
    # [>= num_reqs, W], int64, -1 padded
    sampled: torch.Tensor,
    # [>= num_reqs], int32
    num_sampled: torch.Tensor,
    # [>= num_reqs, K + 1], int32, 0 padded
    path: torch.Tensor,
    # [C], int64, added to
    rank_counts: torch.Tensor | None = None,
    impl: Impl = "auto",
) -> None:
    """Write the accepted path of each request and the tokens drawn along it.

    From the root (row ``cu_num_logits[r]``): emit the row's target token, go on to the
    child that carries this token and is not invalid, stop where there is none or after
    K + 1 rows. So ``path[r, :n]`` are node indices, root first and strictly increasing,
    and ``sampled[r, :n]`` the n - 1 accepted drafts and the bonus token, with
    ``n = num_sampled[r]``. Nodes from ``tree_len`` on do not exist; without a tree
    only the first row's token is emitted. Children of one node carry different tokens;
    should two be equal, the lower node is followed.

    ``rank_counts[k]`` grows by the accepted nodes that have k lower siblings, that is
    by those that were the draft's k-th choice after their parent.

    A request without logits rows gets ``num_sampled`` 0. ``num_reqs`` defaults to
    ``slots.shape[0]``. Rows past it are left alone. The host never waits.
    """
    num_reqs = slots.shape[0] if num_reqs is None else num_reqs
    if num_reqs == 0:
        return
    if use_triton(impl, target_tokens):
        from .kernel import walk_tree as launch
    else:
        launch = walk_tree_reference
    launch(
        target_tokens,
        node_tokens,
        cu_num_logits,
        slots,
        parents,
        tree_len,
        num_reqs,
        invalid_drafts,
        sampled,
        num_sampled,
        path,
        rank_counts,
    )
