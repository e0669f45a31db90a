# SPDX-License-Identifier: Apache-2.0
"""Triton functions that the attention and the reduction kernel share."""

import triton
import triton.language as tl


@triton.jit
def split_plan(
    seq_len,
    query_len,
    num_splits,
    fill_splits,
    min_tiles,
    long_tiles,
    WINDOW: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """First key, key tiles per split and active splits of one request.

    A request is cut into ``fill_splits`` shares of at least ``min_tiles`` tiles. A
    share longer than ``long_tiles`` is cut further while ``num_splits`` permits, so
    one long request doesn't hold up a batch of short ones. Length 0: no split.
    """
    first_key = 0
    if WINDOW > 0:
        first_key = tl.maximum(seq_len - query_len - (WINDOW - 1), 0)
        first_key = first_key // BLOCK_N * BLOCK_N
    num_tiles = tl.cdiv(seq_len - first_key, BLOCK_N)
    share = tl.cdiv(num_tiles, fill_splits)
    finest = tl.maximum(tl.cdiv(num_tiles, num_splits), long_tiles)
    share = tl.maximum(tl.minimum(share, finest), min_tiles)
    return first_key, share, tl.cdiv(num_tiles, share)


@triton.jit
def popcount(x):
    """Set bits of every int64 as int32; the masks undo the arithmetic shifts' sign."""
    x = x - ((x >> 1) & 0x5555555555555555)
    x = (x & 0x3333333333333333) + ((x >> 2) & 0x3333333333333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F0F0F0F0F
    x = x + (x >> 8)
    x = x + (x >> 16)
    x = x + (x >> 32)
    return (x & 0x7F).to(tl.int32)


@triton.jit
def load_words(pointers, mask, other: tl.constexpr, WORDS: tl.constexpr):
    """Up to four ancestor words of each row; the missing ones repeat the first."""
    word0 = tl.load(pointers, mask=mask, other=other)
    word1 = word0
    word2 = word0
    word3 = word0
    if WORDS > 1:
        word1 = tl.load(pointers + 1, mask=mask, other=other)
    if WORDS > 2:
        word2 = tl.load(pointers + 2, mask=mask, other=other)
    if WORDS > 3:
        word3 = tl.load(pointers + 3, mask=mask, other=other)
    return word0, word1, word2, word3


@triton.jit
def count_bits(word0, word1, word2, word3, WORDS: tl.constexpr):
    """Ancestors of each row, itself included, int32."""
    count = popcount(word0)
    if WORDS > 1:
        count += popcount(word1)
    if WORDS > 2:
        count += popcount(word2)
    if WORDS > 3:
        count += popcount(word3)
    return count


@triton.jit
def from_cache(x, dtype: tl.constexpr, KV_FP8: tl.constexpr):
    """Cache elements as ``dtype``; e4m3 bytes come out as value / 256, exactly.

    Moving the e4m3 exponent and mantissa into an fp16 divides by 2**8, the bias
    difference; callers fold the 256 into the scales. It needs no fp8 instructions,
    which Triton has from sm_89 on only.
    """
    if KV_FP8:
        bits = x.to(tl.int16)
        bits = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        x = bits.to(tl.float16, bitcast=True)
    return x.to(dtype)


@triton.jit
def load_blocks(table_row, start, hi, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Block ids of the keys of one tile: one id if a block holds whole tiles.

    Keys at or beyond ``hi`` get block 0, which exists, so their loads are safe.
    """
    offs_n = tl.arange(0, BLOCK_N)
    if BLOCK_SIZE % BLOCK_N == 0:
        block = tl.load(table_row + start // BLOCK_SIZE, mask=start < hi, other=0)
    elif BLOCK_N % BLOCK_SIZE == 0:
        index = start // BLOCK_SIZE + offs_n // BLOCK_SIZE
        block = tl.load(table_row + index, mask=start + offs_n < hi, other=0)
    else:
        index = (start + offs_n) // BLOCK_SIZE
        block = tl.load(table_row + index, mask=start + offs_n < hi, other=0)
    return block


@triton.jit
def cache_rows(
    block,
    start,
    stride_block,
    stride_slot,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Element offsets ``[BLOCK_N]`` of one tile's keys; tiles start at BLOCK_N."""
    offs_n = tl.arange(0, BLOCK_N)
    if BLOCK_N % BLOCK_SIZE == 0:
        slot = offs_n % BLOCK_SIZE
    elif BLOCK_SIZE % BLOCK_N == 0:
        slot = start % BLOCK_SIZE + offs_n
    else:
        slot = (start + offs_n) % BLOCK_SIZE
    return block.to(tl.int64) * stride_block + slot.to(tl.int64) * stride_slot
