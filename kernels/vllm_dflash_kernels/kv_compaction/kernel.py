# SPDX-License-Identifier: Apache-2.0
"""KV compaction over a table of cache addresses.

    entry[slot_mapping[base + i]] = entry[slot_mapping[base + path[i]]]

Grid (num_layers, num_heads * chunks, num_reqs): a program moves the same ``BLOCK``
words of one head's entries for the whole path of a request. It reads all of them into
registers before it writes, behind a barrier, so a destination may be another move's
source; programs share no bytes. A path that is already in place costs three loads.

Reads and writes ``content_bytes`` a head, layer and moved node. Assumes tree slots of
different requests are disjoint.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..dispatch import cdiv, next_power_of_2
from ..relaunch import KeptKernel
from .table import KVCacheTable

# Words a program moves per entry: with a path of 16 rows, 16 words a thread.
_MAX_BLOCK = 128


# A slice's address is not a new compilation while serving.
@triton.jit(
    do_not_specialize_on_alignment=[
        "slot_mapping_ptr",
        "query_start_loc_ptr",
        "tree_len_ptr",
        "path_ptr",
        "num_sampled_ptr",
    ],
)
def _compact_kv_kernel(
    layer_ptrs_ptr,  # [num_layers], int64 addresses
    slot_mapping_ptr,  # [num_tokens], int64
    query_start_loc_ptr,  # [num_reqs + 1], int32
    tree_len_ptr,  # [num_reqs], int32
    path_ptr,  # [num_reqs, MAX_ROWS], int32
    path_stride,
    num_sampled_ptr,  # [num_reqs], int32
    block_stride,  # strides in words
    head_stride,
    slot_stride,
    BLOCK_SIZE: tl.constexpr,
    CONTENT: tl.constexpr,  # words
    CHUNKS: tl.constexpr,
    MAX_ROWS: tl.constexpr,
    WORD_TYPE: tl.constexpr,
    BLOCK_PATH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    layer = tl.program_id(0)
    head = tl.program_id(1) // CHUNKS
    chunk = tl.program_id(1) % CHUNKS
    req = tl.program_id(2).to(tl.int64)
    length = tl.load(tree_len_ptr + req)
    num_path = tl.where(length > 0, tl.load(num_sampled_ptr + req), 0)
    place = tl.arange(0, BLOCK_PATH)
    is_path = (place >= 1) & (place < num_path) & (place < MAX_ROWS)
    node = tl.load(path_ptr + req * path_stride + place, mask=is_path, other=0)
    is_moved = is_path & (node != place)
    if tl.max(is_moved.to(tl.int32), 0) == 0:
        return

    base = tl.load(query_start_loc_ptr + req + 1).to(tl.int64) - length
    source = tl.load(slot_mapping_ptr + base + node, mask=is_moved, other=-1)
    destination = tl.load(slot_mapping_ptr + base + place, mask=is_moved, other=-1)
    is_moved = is_moved & (source >= 0) & (destination >= 0)
    source = tl.where(is_moved, source, 0)
    destination = tl.where(is_moved, destination, 0)

    word = chunk * BLOCK + tl.arange(0, BLOCK)
    mask = is_moved[:, None] & (word < CONTENT)[None, :]
    address = tl.load(layer_ptrs_ptr + layer)
    cache_ptr = address.to(tl.pointer_type(WORD_TYPE))
    head_offset = head.to(tl.int64) * head_stride
    source_offset = source // BLOCK_SIZE * block_stride
    source_offset += source % BLOCK_SIZE * slot_stride + head_offset
    destination_offset = destination // BLOCK_SIZE * block_stride
    destination_offset += destination % BLOCK_SIZE * slot_stride + head_offset
    moved = tl.load(cache_ptr + source_offset[:, None] + word[None, :], mask=mask)
    # A destination may be the source of another lane's row.
    tl.debug_barrier()
    tl.store(cache_ptr + destination_offset[:, None] + word[None, :], moved, mask=mask)


_WORD_TYPES = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}


_KEPT = KeptKernel(_compact_kv_kernel, num_warps=4)


def compact_kv(
    table: KVCacheTable,
    slot_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    tree_len: torch.Tensor,
    path: torch.Tensor,
    num_sampled_walk: torch.Tensor,
    num_reqs: int,
) -> None:
    assert path.stride(1) == 1
    word_bytes = table.word_bytes
    content = table.content_bytes // word_bytes
    block = min(next_power_of_2(content), _MAX_BLOCK)
    chunks = cdiv(content, block)
    args = (
        table.layer_ptrs,
        slot_mapping,
        query_start_loc,
        tree_len,
        path,
        path.stride(0),
        num_sampled_walk,
        table.block_stride_bytes // word_bytes,
        table.head_stride_bytes // word_bytes,
        table.slot_stride_bytes // word_bytes,
    )
    _KEPT.launch(
        (table.num_layers, table.num_heads * chunks, num_reqs),
        args,
        BLOCK_SIZE=table.block_size,
        CONTENT=content,
        CHUNKS=chunks,
        MAX_ROWS=path.shape[1],
        WORD_TYPE=_WORD_TYPES[word_bytes],
        BLOCK_PATH=next_power_of_2(path.shape[1]),
        BLOCK=block,
    )
