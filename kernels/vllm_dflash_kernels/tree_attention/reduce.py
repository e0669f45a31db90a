# SPDX-License-Identifier: Apache-2.0
"""Combines the partial outputs of the key splits of ``kernel.py``.

With the base-2 log-sum-exp ``l_s`` and the normalised output ``o_s`` of split ``s``,
and the attention sink ``z`` of the head (a logit without a value)::

    out = sum_s 2**l_s o_s / (sum_s 2**l_s + e**z)

Grid: ``(row blocks, kv heads, requests)``; one program is ``BLOCK_R`` packed rows of
one KV head. Reads ``active splits`` fp32 rows and writes one output row each. Requests
with one active split were finished by the attention kernel and are left alone. The
number of active splits is recomputed from the lengths, so split slots without keys
need no initialisation.
"""

import triton
import triton.language as tl

from .device_functions import split_plan


@triton.jit(
    do_not_specialize=[
        "num_splits",
        "max_query_len",
        "fill_splits",
        "min_tiles",
        "long_tiles",
    ]
)
def reduce_splits_kernel(
    out_ptr,
    partial_ptr,
    lse_ptr,
    seq_lens_ptr,
    query_start_loc_ptr,
    sinks_ptr,
    num_splits,
    max_query_len,
    fill_splits,
    min_tiles,
    long_tiles,
    stride_ot,
    stride_oh,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    WINDOW: tl.constexpr,
    USE_SINKS: tl.constexpr,
    LAUNCH_PDL: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    SPLITS_PAD: tl.constexpr,
):
    """Grid ``(row blocks, kv heads, requests)``; see the module docstring."""
    LOG2E: tl.constexpr = 1.4426950408889634
    kv_head = tl.program_id(1)
    request = tl.program_id(2)
    seq_len = tl.load(seq_lens_ptr + request)
    query_start = tl.load(query_start_loc_ptr + request)
    query_len = tl.load(query_start_loc_ptr + request + 1) - query_start
    _first_key, _share, active_splits = split_plan(
        seq_len,
        query_len,
        num_splits,
        fill_splits,
        min_tiles,
        long_tiles,
        WINDOW,
        BLOCK_N,
    )
    if LAUNCH_PDL:
        # Every program waits, also those without work: the launch after this one may
        # rely on the attention kernel being complete. The lengths above are older.
        tl.extra.cuda.gdc_wait()
    if active_splits <= 1:
        return
    first_row = tl.program_id(0) * BLOCK_R
    num_rows = tl.minimum(query_len, max_query_len) * GROUP
    if first_row >= num_rows:
        return

    row = first_row + tl.arange(0, BLOCK_R)
    row_ok = row < num_rows
    token = row // GROUP
    head = kv_head * GROUP + row % GROUP
    split = tl.arange(0, SPLITS_PAD)
    offs_d = tl.arange(0, HEAD_PAD)
    base = (request * NUM_KV_HEADS + kv_head).to(tl.int64) * num_splits
    rows = (base + split)[:, None] * (max_query_len * GROUP) + row[None, :]
    mask = (split < active_splits)[:, None] & row_ok[None, :]
    lse = tl.load(lse_ptr + rows, mask=mask, other=float("-inf"))
    d_mask = mask[:, :, None] & (offs_d < HEAD_SIZE)[None, None, :]
    o_ptrs = partial_ptr + rows[:, :, None] * HEAD_SIZE + offs_d[None, None, :]
    o = tl.load(o_ptrs, mask=d_mask, other=0.0)

    top = tl.max(lse, 0)
    if USE_SINKS:
        sink = tl.load(sinks_ptr + head, mask=row_ok, other=0.0).to(tl.float32) * LOG2E
        top = tl.maximum(top, sink)
    top = tl.where(top == float("-inf"), 0.0, top)
    weight = tl.math.exp2(lse - top[None, :])
    total = tl.sum(weight, 0)
    if USE_SINKS:
        total += tl.math.exp2(sink - top)
    weight = weight / tl.where(total == 0.0, 1.0, total)[None, :]
    acc = tl.sum(o * weight[:, :, None], 0)

    o_rows = (query_start + token).to(tl.int64) * stride_ot + head * stride_oh
    tl.store(
        out_ptr + o_rows[:, None] + offs_d[None, :],
        acc.to(out_ptr.dtype.element_ty),
        mask=row_ok[:, None] & (offs_d < HEAD_SIZE)[None, :],
    )
