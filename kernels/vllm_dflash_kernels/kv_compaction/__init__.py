# SPDX-License-Identifier: Apache-2.0
"""Move the KV entries of accepted paths to where a chain would have put them."""

from __future__ import annotations

import torch

from ..dispatch import Impl, use_triton
from .reference import compact_kv_reference
from .table import KVCacheTable

__all__ = ["KVCacheTable", "compact_kv"]


def compact_kv(
    table: KVCacheTable,
    # [>= num_tokens], int64, -1 = not stored
    slot_mapping: torch.Tensor,
    # [>= num_reqs + 1], int32
    query_start_loc: torch.Tensor,
    # [>= num_reqs], int32, 0 = no tree
    tree_len: torch.Tensor,
    # [>= num_reqs, K + 1], int32, strictly increasing up to the path's length
    path: torch.Tensor,
    # [>= num_reqs], int32, rows of the path (the walk's num_sampled)
    num_sampled_walk: torch.Tensor,
    *,
    num_reqs: int,
    impl: Impl = "auto",
) -> None:
    """Copy every accepted node's cache entry to its place in the path, in place.

    For each tree request with ``base = query_start_loc[r + 1] - tree_len[r]`` and each
    ``1 <= i < num_sampled_walk[r]`` with ``path[r, i] != i``, the bytes of slot
    ``slot_mapping[base + path[r, i]]`` replace those of ``slot_mapping[base + i]``, for
    all heads of all layers. The copies of a request act at once: a slot that is both
    read and written gives its old content. Requests must not share the slots of their
    trees; no other slot is touched. The host never waits.

    Args:
        table: The caches of one KV cache group (one slot mapping).
    """
    if num_reqs == 0 or not table.num_layers:
        return
    if use_triton(impl, slot_mapping):
        from .kernel import compact_kv as launch
    else:
        launch = compact_kv_reference
    launch(
        table,
        slot_mapping,
        query_start_loc,
        tree_len,
        path,
        num_sampled_walk,
        num_reqs,
    )
