# SPDX-License-Identifier: Apache-2.0
"""Rows of the accepted paths.

    tree:   rows[o + i] = base + path[i], position[base] + i   for i < n, else i = 0
    other:  rows[o + i] = start + i,      position[start + i]

Grid (num_reqs, PROGRAMS): the programs of a request share its rows block by block, so
that a long prefill is not one program's work; a tree request needs only the first.
Reads the path or the positions of the request, writes its output rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..relaunch import KeptKernel

_BLOCK = 256
_PROGRAMS = 8


# A slice's address is not a new compilation while serving.
@triton.jit(
    do_not_specialize_on_alignment=[
        "query_start_loc_ptr",
        "tree_len_ptr",
        "path_ptr",
        "num_sampled_ptr",
        "positions_ptr",
        "out_query_start_loc_ptr",
        "rows_ptr",
        "out_positions_ptr",
        "num_padding_ptr",
    ],
)
def _path_rows_kernel(
    query_start_loc_ptr,  # [num_reqs + 1], int32
    tree_len_ptr,  # [num_reqs], int32
    path_ptr,  # [num_reqs, MAX_ROWS], int32
    path_stride,
    num_sampled_ptr,  # [num_reqs], int32
    positions_ptr,  # [num_tokens], int64
    out_query_start_loc_ptr,  # [num_reqs + 1], int32
    rows_ptr,  # [num_out_tokens], int64
    out_positions_ptr,  # [num_out_tokens], int64
    num_padding_ptr,  # [num_reqs], int32
    BLOCK: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    req = tl.program_id(0).to(tl.int64)
    first_block = tl.program_id(1)
    length = tl.load(tree_len_ptr + req)
    is_tree = length > 0
    start = tl.load(query_start_loc_ptr + req).to(tl.int64)
    end = tl.load(query_start_loc_ptr + req + 1).to(tl.int64)
    base = tl.where(is_tree, end - length, start)
    out_start = tl.load(out_query_start_loc_ptr + req).to(tl.int64)
    num_rows = tl.load(out_query_start_loc_ptr + req + 1) - out_start
    num_path = tl.where(is_tree, tl.load(num_sampled_ptr + req), 0)
    if first_block == 0:
        tl.store(num_padding_ptr + req, tl.where(is_tree, num_rows - num_path, 0))

    offset = first_block * BLOCK
    while offset < num_rows:
        index = offset + tl.arange(0, BLOCK)
        is_row = index < num_rows
        is_path = index < num_path
        node = tl.load(
            path_ptr + req * path_stride + index, mask=is_row & is_path, other=0
        )
        row = base + tl.where(is_tree, node, index)
        # A path row's position is the root's plus its place in the path.
        source = tl.where(is_tree, base, row)
        position = tl.load(positions_ptr + source, mask=is_row, other=0)
        position += tl.where(is_path, index, 0)
        tl.store(rows_ptr + out_start + index, row, mask=is_row)
        tl.store(out_positions_ptr + out_start + index, position, mask=is_row)
        offset += BLOCK * PROGRAMS


_KEPT = KeptKernel(_path_rows_kernel, num_warps=2)


def path_rows(
    query_start_loc: torch.Tensor,
    tree_len: torch.Tensor,
    path: torch.Tensor,
    num_sampled_walk: torch.Tensor,
    positions: torch.Tensor,
    out_query_start_loc: torch.Tensor,
    num_reqs: int,
    rows: torch.Tensor,
    out_positions: torch.Tensor,
    num_padding: torch.Tensor,
) -> None:
    assert path.stride(1) == 1
    args = (
        query_start_loc,
        tree_len,
        path,
        path.stride(0),
        num_sampled_walk,
        positions,
        out_query_start_loc,
        rows,
        out_positions,
        num_padding,
    )
    _KEPT.launch((num_reqs, _PROGRAMS, 1), args, BLOCK=_BLOCK, PROGRAMS=_PROGRAMS)
