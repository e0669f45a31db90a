# SPDX-License-Identifier: Apache-2.0
"""Rows of several tensors, side by side.

    out[i] = [sources[0][rows[i]], sources[1][rows[i]], ...]

Grid (num_rows, num_sources, column blocks): one program copies one block of one row.
Reads and writes each element once. The sources are arguments and not a table of
addresses: a table would have to be sent to the device in every step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from ..relaunch import KeptKernel

MAX_SOURCES = 8
_BLOCK = 2048


@triton.jit
def _gather_rows_kernel(
    source0,  # each [num_tokens, num_columns], contiguous columns
    source1,
    source2,
    source3,
    source4,
    source5,
    source6,
    source7,
    rows_ptr,  # [num_rows], int64
    out_ptr,  # [num_rows, num_sources * num_columns]
    source_stride,
    out_stride,
    num_columns,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    which = tl.program_id(1)
    source = source0
    if which == 1:
        source = source1
    if which == 2:
        source = source2
    if which == 3:
        source = source3
    if which == 4:
        source = source4
    if which == 5:
        source = source5
    if which == 6:
        source = source6
    if which == 7:
        source = source7
    row = tl.load(rows_ptr + index)
    columns = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < num_columns
    values = tl.load(source + row * source_stride + columns, mask=mask)
    out = out_ptr + index * out_stride + which * num_columns + columns
    tl.store(out, values, mask=mask)


_KEPT = KeptKernel(_gather_rows_kernel, num_warps=4)


def gather_rows(
    sources: Sequence[torch.Tensor], rows: torch.Tensor, out: torch.Tensor
) -> None:
    padded = [*sources, *[sources[0]] * (MAX_SOURCES - len(sources))]
    num_columns = sources[0].shape[1]
    grid = (rows.shape[0], len(sources), triton.cdiv(num_columns, _BLOCK))
    strides = (sources[0].stride(0), out.stride(0))
    _KEPT.launch(grid, (*padded, rows, out, *strides, num_columns), BLOCK=_BLOCK)
