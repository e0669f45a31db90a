# SPDX-License-Identifier: Apache-2.0
"""Which rows of the verify step the draft model continues from."""

from __future__ import annotations

import torch

from ..dispatch import Impl, use_triton
from .reference import path_rows_reference

__all__ = ["path_rows"]


def path_rows(
    # [>= num_reqs + 1], int32
    query_start_loc: torch.Tensor,
    # [>= num_reqs], int32, 0 = no tree
    tree_len: torch.Tensor,
    # [>= num_reqs, K + 1], int32
    path: torch.Tensor,
    # [>= num_reqs], int32, rows of the path (the walk's num_sampled)
    num_sampled_walk: torch.Tensor,
    # [>= num_tokens], int64, as prepare_tree_step left them
    positions: torch.Tensor,
    # [>= num_reqs + 1], int32
    out_query_start_loc: torch.Tensor,
    *,
    num_reqs: int,
    # [>= out_query_start_loc[num_reqs]], int64
    rows: torch.Tensor,
    # [>= out_query_start_loc[num_reqs]], int64
    out_positions: torch.Tensor,
    # [>= num_reqs], int32
    num_padding: torch.Tensor,
    impl: Impl = "auto",
) -> None:
    """List the accepted rows of tree requests and every row of the others.

    ``out_query_start_loc`` is made on the host: ``min(tree_len, K + 1)`` rows for a
    tree request, its query length for any other. With ``n = num_sampled_walk[r]`` and
    ``base = query_start_loc[r + 1] - tree_len[r]``, output row i < n of a tree request
    is row ``base + path[r, i]`` at position ``positions[base] + i``; the remaining
    ones, ``num_padding[r]`` of them, repeat the root's row and position. Other
    requests are copied as they are, ``num_padding`` 0.

    ``rows`` and ``out_positions`` past the last request are left alone. The host never
    waits.
    """
    if num_reqs == 0:
        return
    if use_triton(impl, rows):
        from .kernel import path_rows as launch
    else:
        launch = path_rows_reference
    launch(
        query_start_loc,
        tree_len,
        path,
        num_sampled_walk,
        positions,
        out_query_start_loc,
        num_reqs,
        rows,
        out_positions,
        num_padding,
    )
