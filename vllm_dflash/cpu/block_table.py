# SPDX-License-Identifier: Apache-2.0
"""Twins of `vllm/v1/worker/gpu/block_table.py` and of its staged writes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from vllm_dflash.cpu import replacements

_MODULE = "vllm.v1.worker.gpu.block_table"
# vLLM's slot of a token without a cache entry.
_PAD_SLOT_ID = -1


def gather_block_tables(
    self: Any,
    idx_mapping: torch.Tensor,
    num_reqs_padded: int,
    out: tuple[torch.Tensor, ...] | None = None,
    out_ptrs: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """Copy the block tables of the batch, zero the padded rows."""
    if self.num_kv_cache_groups == 0:
        return ()
    del out_ptrs
    if out is None:
        out = tuple(self.input_block_tables)
    slots = idx_mapping.tolist()
    for group, target in enumerate(out):
        rows = target.numpy()
        source = self.block_tables[group].gpu.numpy()
        num_blocks = self.num_blocks.gpu[group]
        for row, slot in enumerate(slots[:num_reqs_padded]):
            count = int(num_blocks[slot])
            rows[row, :count] = source[slot, :count]
        rows[len(slots) : num_reqs_padded] = 0
    return tuple(table[:num_reqs_padded] for table in out)


def compute_slot_mappings(
    self: Any,
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    positions: torch.Tensor,
    num_tokens_padded: int,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Write the cache slot of each token; slots past the batch become -1."""
    slot_mappings = self.slot_mappings if out is None else out
    if self.num_kv_cache_groups == 0:
        return slot_mappings[:, :num_tokens_padded]
    if self.cp_size != 1:
        return replacements.original(f"{_MODULE}:BlockTables.compute_slot_mappings")(
            self, idx_mapping, query_start_loc, positions, num_tokens_padded, out
        )
    starts, places = query_start_loc.numpy(), positions.numpy()
    slots = idx_mapping.tolist()
    for group, block_size in enumerate(self.block_sizes):
        mapping = slot_mappings[group].numpy()
        table = self.block_tables[group].gpu.numpy()
        enabled = self._slot_mapping_enabled[group]
        for row, slot in enumerate(slots):
            tokens = slice(starts[row], starts[row + 1])
            if slot < 0 or not enabled:
                mapping[tokens] = _PAD_SLOT_ID
                continue
            blocks = table[slot, places[tokens] // block_size].astype(np.int64)
            mapping[tokens] = blocks * block_size + places[tokens] % block_size
        mapping[starts[len(slots)] :] = _PAD_SLOT_ID
    return slot_mappings[:, :num_tokens_padded]


def apply_write(self: Any) -> None:
    """Write the staged values of a `StagedWriteTensor`."""
    contents = self._staged_write_contents
    begin = 0
    for row, start, end in zip(
        self._staged_write_indices,
        self._staged_write_starts,
        self._staged_write_cu_lens,
        strict=True,
    ):
        values = torch.tensor(contents[begin:end], dtype=self.dtype)
        target = self.gpu[row] if self.gpu.dim() > 1 else self.gpu[row:]
        target[start : start + len(values)] = values
        begin = end
    self.clear_staged_writes()


def apply_fused_writes(
    self: Any, tensors: Any, output_ptrs: torch.Tensor, output_strides: torch.Tensor
) -> None:
    """Write the staged values of several tensors; the twin of `FusedStagedWriter`."""
    del self, output_ptrs, output_strides
    for tensor in tensors:
        apply_write(tensor)
