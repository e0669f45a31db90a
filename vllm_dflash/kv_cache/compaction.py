# SPDX-License-Identifier: Apache-2.0
"""Accepted path -> contiguous KV, for every target layer of every cache group.

Node ``i`` of a verify step wrote its KV to the slot of position ``p + i``; after the
walk, entry ``i`` of the path belongs to position ``p + i``. Bytes are moved, so every
dtype and layout works, and only slots ``p .. p + budget`` of the request are touched.
Draft layers are left out: the draft's context KV is written from path rows.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch

from vllm_dflash.tree.verify_step import VerifyStep
from vllm_dflash_kernels.kv_compaction import KVCacheTable, compact_kv


class KVCompactor:
    """Moves accepted KV entries; one launch per group of equally laid out layers."""

    def __init__(self) -> None:
        # (index of the KV cache group, layers of one layout in it)
        self._tables: list[tuple[int, KVCacheTable]] = []
        # [num_kv_cache_groups, max_num_tokens], int64: the current step's slots.
        self._slot_mappings: torch.Tensor | None = None

    def bind(
        self,
        # Layer names of each KV cache group, draft layers excluded
        layer_names_by_group: Sequence[Sequence[str]],
        # Layer name -> logical cache [num_blocks, num_heads, block_size, content]
        caches: Mapping[str, torch.Tensor],
        slot_mappings: torch.Tensor,
    ) -> None:
        """Remember the caches; called again whenever they are reallocated."""
        self._slot_mappings = slot_mappings
        self._tables = []
        for group, layer_names in enumerate(layer_names_by_group):
            by_layout: dict[tuple, dict[int, torch.Tensor]] = defaultdict(dict)
            for name in layer_names:
                cache = caches[name]
                layout = (cache.shape[1:], cache.stride(), cache.dtype)
                # Layers that share a cache are moved once.
                by_layout[layout].setdefault(cache.data_ptr(), cache)
            for shared in by_layout.values():
                self._tables.append((group, KVCacheTable(list(shared.values()))))

    def compact(
        self,
        step: VerifyStep,
        # [num_reqs + 1], int32
        query_start_loc: torch.Tensor,
        # [num_reqs], int32: length of each path, root included
        num_sampled: torch.Tensor,
        num_reqs: int,
    ) -> None:
        """Move the accepted entries of the current step into place."""
        assert self._slot_mappings is not None, "bind() was not called"
        for group, table in self._tables:
            compact_kv(
                table,
                self._slot_mappings[group],
                query_start_loc,
                step.tree_len,
                step.path,
                num_sampled,
                num_reqs=num_reqs,
            )
