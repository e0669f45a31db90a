# SPDX-License-Identifier: Apache-2.0
"""Split-KV attention of tree (or causal) query rows over a paged KV cache.

For query row ``i`` of request ``r`` with ``p = seq_len - query_len`` committed keys::

    out[i] = softmax_j(scale * <q_i, k_j>) v_j        over the visible keys j
    j < p                                  always visible
    rows before the tree (and tree_len 0)  j <= p + i
    tree row of node n                     the rows before the tree, and every node m
                                           whose bit is set in ancestors[r, n]

With a sliding window a key must also be less than ``window`` positions behind the
query, where the position of a tree row is ``tree start + depth`` and the depth of a
node is the number of its ancestor bits minus one.

Grid: ``(row tiles, splits, requests * kv heads)``. One program is one tile of packed
rows (``token * group + head in group``) of one KV head over one share of the keys, so
a key block is read once per tile for all query heads of the group. Row tiles are the
fastest axis: tiles that share keys run together and meet in the L2 cache. The last
tile may be narrower (``TAIL_M``), which spares widths such as 2**n + 1 the padding.

Splits derive their share from ``seq_lens`` on the device (``split_plan``), so one
captured grid serves every length. A request with one active split is finished here;
otherwise fp32 partial outputs (normalised) and base-2 log-sum-exps go to the
workspace and ``reduce.py`` combines them.

With ``FROM_PREFIX`` another kernel has attended to the committed keys: ``out`` holds
its result and ``prefix_lse`` the log-sum-exps. They start the online softmax of each
row, and only the step's own keys are read. A row's program reads its ``out`` before it
writes it, so no second buffer is needed.

Reads ``tiles * keys`` cache rows, writes one partial row a query row and split.
Assumes: unit stride of the head dimension, no ancestor behind its node in slot order,
positive ``scale``. Rows at or beyond ``query_len`` or ``max_query_len`` and requests of
length 0 (padding of a replayed CUDA graph) are never written.
"""

import triton
import triton.language as tl

from .device_functions import (
    cache_rows,
    count_bits,
    from_cache,
    load_blocks,
    load_words,
    split_plan,
)


@triton.jit
def _attend(
    where,
    lengths,
    plan,
    pointers,
    scales,
    strides,
    FROM_PREFIX: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WORDS: tl.constexpr,
    WINDOW: tl.constexpr,
    USE_SOFTCAP: tl.constexpr,
    USE_SINKS: tl.constexpr,
    KV_FP8: tl.constexpr,
    USE_SCALES: tl.constexpr,
    PRECISION: tl.constexpr,
    LAUNCH_PDL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One tile of ``BLOCK_M`` packed rows over one share of the keys."""
    LOG2E: tl.constexpr = 1.4426950408889634
    first_row, split, request, kv_head = where
    query_start, query_len, seq_len, max_query_len = lengths
    first_key, share, active_splits, num_splits = plan
    out_ptr, partial_ptr, lse_ptr, query_ptr, key_ptr, table_ptr = pointers[:6]
    ancestors_ptr, tree_len_ptr, sinks_ptr = pointers[6:9]
    k_scale_ptr, v_scale_ptr, prefix_lse_ptr = pointers[9:]
    scale, softcap = scales
    stride_ot, stride_oh, stride_qt, stride_qh = strides[:4]
    stride_block, stride_head, stride_slot, value_offset = strides[4:8]
    stride_table, stride_ar, stride_an, stride_lh = strides[8:]
    q_dtype = query_ptr.dtype.element_ty

    lo = first_key + split * share * BLOCK_N
    hi = tl.minimum(lo + share * BLOCK_N, seq_len)
    prefix = seq_len - query_len
    offs_d = tl.arange(0, HEAD_PAD)
    table_row = table_ptr + request.to(tl.int64) * stride_table
    block = load_blocks(table_row, lo, hi, BLOCK_SIZE, BLOCK_N)

    row = first_row + tl.arange(0, BLOCK_M)
    token = row // GROUP
    head = kv_head * GROUP + row % GROUP
    row_ok = token < tl.minimum(query_len, max_query_len)
    o_mask = row_ok[:, None] & (offs_d < HEAD_SIZE)[None, :]
    q_rows = (query_start + token).to(tl.int64) * stride_qt + head * stride_qh
    q = tl.load(query_ptr + q_rows[:, None] + offs_d[None, :], mask=o_mask, other=0.0)

    # Rows before the tree (all rows where there is none) are plain causal: they get
    # every bit set, and the bound by slot below is their whole mask.
    num_causal = query_len - tl.load(tree_len_ptr + request)
    tree_start = prefix + num_causal
    node = token - num_causal
    word_ok = row_ok & (node >= 0)
    tree = ancestors_ptr + request.to(tl.int64) * stride_ar
    words = tree + node.to(tl.int64) * stride_an
    word0, word1, word2, word3 = load_words(words, word_ok, -1, WORDS)
    position = prefix + token
    if WINDOW > 0:
        depth = count_bits(word0, word1, word2, word3, WORDS) - 1
        position = tl.where(node >= 0, tree_start + depth, position)

    logit_scale = scale
    value_scale = 1.0
    if USE_SCALES:
        logit_scale *= tl.load(k_scale_ptr).to(tl.float32)
        value_scale = tl.load(v_scale_ptr).to(tl.float32)
    if KV_FP8:
        logit_scale *= 256.0
        value_scale *= 256.0
    exp2_scale = logit_scale * LOG2E
    if USE_SOFTCAP:
        exp2_scale = LOG2E

    key_base = key_ptr + kv_head.to(tl.int64) * stride_head
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, HEAD_PAD], tl.float32)
    if FROM_PREFIX:
        # Without committed keys the result is undefined (its log-sum-exp infinite).
        known = row_ok & (position > token)
        lse_at = prefix_lse_ptr + head.to(tl.int64) * stride_lh + query_start + token
        row_max = tl.load(lse_at, mask=known, other=float("-inf")) * LOG2E
        row_sum = tl.where(known, 1.0, 0.0)
        o_rows = (query_start + token).to(tl.int64) * stride_ot + head * stride_oh
        o_ptrs = out_ptr + o_rows[:, None] + offs_d[None, :]
        acc = tl.load(o_ptrs, mask=known[:, None] & o_mask, other=0.0).to(tl.float32)

    for start in range(lo, hi, BLOCK_N):
        offs_n = start + tl.arange(0, BLOCK_N)
        in_range = offs_n < hi
        rows = cache_rows(block, start, stride_block, stride_slot, BLOCK_SIZE, BLOCK_N)
        keys = key_base + rows[:, None] + offs_d[None, :]
        v_mask = in_range[:, None]
        if HEAD_PAD != HEAD_SIZE:
            k = tl.load(keys, mask=(offs_d < HEAD_SIZE)[None, :], other=0)
            v_mask = v_mask & (offs_d < HEAD_SIZE)[None, :]
        else:
            # Slots past the end belong to a valid block; their scores are masked.
            k = tl.load(keys)
        v = tl.load(keys + value_offset, mask=v_mask, other=0)
        # The next tile's block ids travel one iteration ahead: the pipeliner then sees
        # K and V as direct loads and issues them num_stages - 1 tiles early.
        block = load_blocks(table_row, start + BLOCK_N, hi, BLOCK_SIZE, BLOCK_N)

        k = from_cache(k, q_dtype, KV_FP8)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if USE_SOFTCAP:
            s = softcap * (2.0 * tl.sigmoid(s * (2.0 * logit_scale / softcap)) - 1.0)
        needs_mask = start + BLOCK_N > prefix
        if WINDOW > 0:
            needs_mask = needs_mask | (start < seq_len - WINDOW)
        if needs_mask:
            column = offs_n - tree_start
            word = word0[:, None]
            if WORDS > 1:
                word = tl.where((column >= 64)[None, :], word1[:, None], word)
            if WORDS > 2:
                word = tl.where((column >= 128)[None, :], word2[:, None], word)
            if WORDS > 3:
                word = tl.where((column >= 192)[None, :], word3[:, None], word)
            bit = (word >> (column & 63).to(tl.int64)[None, :]) & 1
            visible = (column < 0)[None, :] | (bit != 0)
            visible = visible & ((offs_n - prefix)[None, :] <= token[:, None])
            if FROM_PREFIX:
                visible = visible & (offs_n >= prefix)[None, :]
            if WINDOW > 0:
                in_tree = (column >= 0) & in_range
                column_words = tree + column.to(tl.int64) * stride_an
                c0, c1, c2, c3 = load_words(column_words, in_tree, 0, WORDS)
                column_depth = count_bits(c0, c1, c2, c3, WORDS)
                key_position = tl.where(in_tree, tree_start + column_depth - 1, offs_n)
                distance = position[:, None] - key_position[None, :]
                visible = visible & (distance < WINDOW)
            s = tl.where(visible, s, float("-inf"))

        new_max = tl.maximum(row_max, tl.max(s, 1) * exp2_scale)
        # A row that has seen no key yet stays at -inf; 0 spares it inf - inf.
        safe_max = tl.where(new_max == float("-inf"), 0.0, new_max)
        p = tl.math.exp2(s * exp2_scale - safe_max[:, None])
        correction = tl.math.exp2(row_max - safe_max)
        row_sum = row_sum * correction + tl.sum(p, 1)
        acc = acc * correction[:, None]
        v = from_cache(v, q_dtype, KV_FP8)
        acc = tl.dot(p.to(q_dtype), v, acc, input_precision=PRECISION)
        row_max = new_max

    if LAUNCH_PDL:
        tl.extra.cuda.gdc_launch_dependents()
    if active_splits == 1:
        if USE_SINKS:
            sink = tl.load(sinks_ptr + head, mask=row_ok, other=0.0).to(tl.float32)
            safe_max = tl.where(row_max == float("-inf"), 0.0, row_max)
            row_sum += tl.math.exp2(sink * LOG2E - safe_max)
        acc = acc * (value_scale / tl.where(row_sum == 0.0, 1.0, row_sum))[:, None]
        o_rows = (query_start + token).to(tl.int64) * stride_ot + head * stride_oh
        o_ptrs = out_ptr + o_rows[:, None] + offs_d[None, :]
        tl.store(o_ptrs, acc.to(out_ptr.dtype.element_ty), mask=o_mask)
    else:
        row_sum = tl.where(row_sum == 0.0, 1.0, row_sum)
        acc = acc * (value_scale / row_sum)[:, None]
        group_index = (request * NUM_KV_HEADS + kv_head).to(tl.int64)
        rows = (group_index * num_splits + split) * (max_query_len * GROUP) + row
        p_ptrs = partial_ptr + rows[:, None] * HEAD_SIZE + offs_d[None, :]
        tl.store(p_ptrs, acc, mask=o_mask)
        tl.store(lse_ptr + rows, row_max + tl.math.log2(row_sum), mask=row_ok)


# Host integers that change from call to call must not recompile the kernel.
@triton.jit(
    do_not_specialize=[
        "num_full_tiles",
        "max_query_len",
        "fill_splits",
        "min_tiles",
        "long_tiles",
    ]
)
def tree_attention_kernel(
    out_ptr,
    partial_ptr,
    lse_ptr,
    query_ptr,
    key_ptr,
    table_ptr,
    seq_lens_ptr,
    query_start_loc_ptr,
    ancestors_ptr,
    tree_len_ptr,
    sinks_ptr,
    k_scale_ptr,
    v_scale_ptr,
    prefix_lse_ptr,
    scale,
    softcap,
    num_full_tiles,
    max_query_len,
    fill_splits,
    min_tiles,
    long_tiles,
    stride_ot,
    stride_oh,
    stride_qt,
    stride_qh,
    stride_block,
    stride_head,
    stride_slot,
    value_offset,
    stride_table,
    stride_ar,
    stride_an,
    stride_lh,
    FROM_PREFIX: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WORDS: tl.constexpr,
    WINDOW: tl.constexpr,
    USE_SOFTCAP: tl.constexpr,
    USE_SINKS: tl.constexpr,
    KV_FP8: tl.constexpr,
    USE_SCALES: tl.constexpr,
    PRECISION: tl.constexpr,
    LAUNCH_PDL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TAIL_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Grid ``(row tiles, splits, requests * kv heads)``; see the module docstring."""
    tile = tl.program_id(0)
    split = tl.program_id(1)
    request = tl.program_id(2) // NUM_KV_HEADS
    kv_head = tl.program_id(2) % NUM_KV_HEADS
    num_splits = tl.num_programs(1)

    seq_len = tl.load(seq_lens_ptr + request)
    query_start = tl.load(query_start_loc_ptr + request)
    query_len = tl.load(query_start_loc_ptr + request + 1) - query_start
    first_row = tile * BLOCK_M
    if first_row >= query_len * GROUP:
        return
    first_key, share, active_splits = split_plan(
        seq_len,
        query_len,
        num_splits,
        fill_splits,
        min_tiles,
        long_tiles,
        WINDOW,
        BLOCK_N,
    )
    if FROM_PREFIX:
        first_key = (seq_len - query_len) // BLOCK_N * BLOCK_N
        share = tl.cdiv(seq_len - first_key, BLOCK_N)
        active_splits = 1
    if split >= active_splits:
        return

    where = (first_row, split, request, kv_head)
    lengths = (query_start, query_len, seq_len, max_query_len)
    plan = (first_key, share, active_splits, num_splits)
    pointers = (
        out_ptr,
        partial_ptr,
        lse_ptr,
        query_ptr,
        key_ptr,
        table_ptr,
        ancestors_ptr,
        tree_len_ptr,
        sinks_ptr,
        k_scale_ptr,
        v_scale_ptr,
        prefix_lse_ptr,
    )
    scales = (scale, softcap)
    strides = (
        stride_ot,
        stride_oh,
        stride_qt,
        stride_qh,
        stride_block,
        stride_head,
        stride_slot,
        value_offset,
        stride_table,
        stride_ar,
        stride_an,
        stride_lh,
    )
    if tile < num_full_tiles:
        _attend(
            where,
            lengths,
            plan,
            pointers,
            scales,
            strides,
            FROM_PREFIX,
            NUM_KV_HEADS,
            GROUP,
            HEAD_SIZE,
            HEAD_PAD,
            BLOCK_SIZE,
            WORDS,
            WINDOW,
            USE_SOFTCAP,
            USE_SINKS,
            KV_FP8,
            USE_SCALES,
            PRECISION,
            LAUNCH_PDL,
            BLOCK_M,
            BLOCK_N,
        )
    elif TAIL_M > 0:
        _attend(
            where,
            lengths,
            plan,
            pointers,
            scales,
            strides,
            FROM_PREFIX,
            NUM_KV_HEADS,
            GROUP,
            HEAD_SIZE,
            HEAD_PAD,
            BLOCK_SIZE,
            WORDS,
            WINDOW,
            USE_SOFTCAP,
            USE_SINKS,
            KV_FP8,
            USE_SCALES,
            PRECISION,
            LAUNCH_PDL,
            TAIL_M,
            BLOCK_N,
        )
