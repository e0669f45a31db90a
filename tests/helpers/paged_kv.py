# SPDX-License-Identifier: Apache-2.0
"""The paged KV cache of an in-process engine, read through its block tables."""

from typing import Any

import torch
from engines import model_runner


class PagedKV:
    """Views of every layer's cache, [num_blocks, num_heads, block_size, content]."""

    def __init__(self, llm: Any):
        self.runner = model_runner(llm)
        compilation_config = self.runner.vllm_config.compilation_config
        self.layers = compilation_config.static_forward_context
        self.draft_layers = self.runner.speculator.draft_attn_layer_names
        self.caches: dict[str, torch.Tensor] = {}
        self.group_of: dict[str, int] = {}
        for index, group in enumerate(self.runner.kv_cache_config.kv_cache_groups):
            for name in group.layer_names:
                self.caches[name] = self.layers[name].kv_cache
                self.group_of[name] = index

    @property
    def target_layers(self) -> list[str]:
        return sorted(self.caches.keys() - self.draft_layers)

    def memory(self, name: str) -> int:
        """The memory of a layer; layers of different groups share it by blocks."""
        return self.caches[name].data_ptr()

    def reach(self, name: str) -> int:
        """How many of the last keys a layer's next row sees; others may be gone."""
        window = self.layers[name].impl.sliding_window
        return window - 1 if window > 0 else self.runner.max_model_len

    def locate(
        self, name: str, slot: int, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(block, offset) of a request's positions in a layer."""
        tables = self.runner.block_tables
        group = self.group_of[name]
        block_size = tables.block_sizes[group]
        blocks = tables.block_tables[group].gpu[slot][positions // block_size]
        return blocks.long(), positions % block_size

    def rows(self, name: str, slot: int, positions: torch.Tensor) -> torch.Tensor:
        """[len(positions), num_heads, content]."""
        blocks, offsets = self.locate(name, slot, positions)
        return self.caches[name][blocks, :, offsets]

    def snapshot(self) -> dict[str, torch.Tensor]:
        return {name: cache.clone() for name, cache in self.caches.items()}

    def changed(self, before: dict[str, torch.Tensor], name: str) -> set[tuple]:
        """(block, offset) of every row that differs from a snapshot."""
        different = (self.caches[name] != before[name]).any(dim=3).any(dim=1)
        return {tuple(place) for place in different.nonzero().tolist()}
