# SPDX-License-Identifier: Apache-2.0
"""Which tile and how many key splits a launch uses. Host arithmetic only.

The tile comes from one table by padded head size, shared memory of the device and
packed rows (query rows x query heads per KV head). The tests compile every entry ahead
of time for each architecture and compare its shared memory with the estimate here.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from ..dispatch import cdiv, next_power_of_2

MAX_WIDTH = 256
MAX_SPLITS = 32
# Splits of a batch never make more programs than this many waves of the machine.
MAX_WAVES = 2
# A batch that fills the machine without splits still cuts a request longer than this.
LONG_KEYS = 8192
# Choices remembered: a step without a graph asks for the same one in every layer.
_MAX_PLANS = 1024
HEAD_SIZES = (64, 80, 96, 128, 192, 256)
# Largest shared memory of one program in KB, by compute capability.
SHARED_KB = {75: 64, 80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}


@dataclass(frozen=True)
class Tile:
    """Launch parameters of the attention kernel.

    Attributes:
        block_m: Packed rows of a full row tile.
        block_n: Keys of one step.
        num_warps: Warps of a program.
        num_stages: Depth of the K/V software pipeline.
        ctas_per_sm: Programs that share a multiprocessor; steers the splits only.
        tail_m: Rows of the last, narrower row tile; 0 if all tiles are full ones.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    ctas_per_sm: int = 1
    tail_m: int = 0

    def num_full_tiles(self, rows: int) -> int:
        return rows // self.block_m + (rows % self.block_m > self.tail_m)

    def num_row_tiles(self, rows: int) -> int:
        return cdiv(rows, self.block_m)


@dataclass(frozen=True)
class SplitPlan:
    """How the device cuts each request's keys (``device_functions.split_plan``)."""

    num_splits: int
    fill_splits: int
    min_tiles: int = 1
    long_tiles: int = 1


_ANY = MAX_WIDTH * 1024
# (padded head size, shared KB) -> (largest number of packed rows, tile), ascending.
TILE_TABLE: dict[tuple[int, int], tuple[tuple[int, Tile], ...]] = {
    (64, 64): ((16, Tile(16, 64, 4, 2)), (_ANY, Tile(32, 32, 4, 2))),
    (128, 64): ((16, Tile(16, 32, 4, 2)), (_ANY, Tile(32, 32, 4, 2))),
    (256, 64): ((_ANY, Tile(16, 16, 4, 2)),),
    (64, 99): (
        (16, Tile(16, 64, 4, 3, 2)),
        (32, Tile(32, 64, 4, 3, 2)),
        (_ANY, Tile(64, 64, 4, 2, 2)),
    ),
    (128, 99): (
        (16, Tile(16, 32, 4, 3, 2)),
        (32, Tile(32, 32, 4, 3, 2)),
        (_ANY, Tile(64, 32, 4, 2, 2)),
    ),
    (256, 99): (
        (16, Tile(16, 32, 4, 2, 2)),
        (32, Tile(32, 32, 4, 2)),
        (_ANY, Tile(64, 16, 8, 3)),
    ),
    (64, 163): (
        (16, Tile(16, 64, 4, 3, 4)),
        (32, Tile(32, 64, 4, 3, 3)),
        (64, Tile(64, 64, 4, 3, 3)),
        (_ANY, Tile(128, 64, 8, 3)),
    ),
    (128, 163): (
        (16, Tile(16, 64, 4, 3, 2)),
        (32, Tile(32, 32, 4, 3, 3)),
        (64, Tile(64, 32, 4, 3, 2)),
        (_ANY, Tile(128, 32, 8, 3)),
    ),
    (256, 163): (
        (16, Tile(16, 32, 4, 3)),
        (32, Tile(32, 32, 4, 2, 2)),
        (_ANY, Tile(64, 32, 8, 2)),
    ),
    # Measured on an H200 (bench_tree_attention.py --tune); B200 takes the same entries.
    (64, 227): (
        (16, Tile(16, 64, 4, 3, 4)),
        (32, Tile(32, 64, 4, 3, 3)),
        (160, Tile(64, 64, 4, 3, 2)),
        (_ANY, Tile(128, 32, 8, 3)),
    ),
    (128, 227): (
        (16, Tile(16, 64, 4, 3, 2)),
        (32, Tile(32, 64, 4, 3, 2)),
        (64, Tile(64, 64, 4, 3, 2)),
        (96, Tile(128, 64, 8, 3)),
        (_ANY, Tile(64, 64, 4, 3, 2)),
    ),
    (256, 227): (
        (16, Tile(16, 32, 4, 3, 2)),
        (32, Tile(32, 32, 4, 3, 2)),
        (_ANY, Tile(64, 32, 8, 3)),
    ),
}
# fp32 goes through the scalar units: correctness only.
_FULL_PRECISION_TILE = Tile(16, 16, 4, 2)


def shared_memory_kb(capability: int, limit_bytes: int | None = None) -> int:
    """Shared memory class of a device, from its limit if known, else its capability."""
    classes = sorted(set(SHARED_KB.values()))
    if limit_bytes is None:
        return SHARED_KB.get(capability, classes[0])
    fitting = [kb for kb in classes if kb * 1024 <= limit_bytes]
    return fitting[-1] if fitting else classes[0]


def all_tiles(head_size: int, shared_kb: int, full_precision: bool) -> list[Tile]:
    """Every tile that ``select_tile`` may choose, tails apart."""
    if full_precision:
        return [_FULL_PRECISION_TILE]
    head_pad = max(next_power_of_2(head_size), 64)
    return [tile for _, tile in TILE_TABLE[head_pad, shared_kb]]


@functools.lru_cache(_MAX_PLANS)
def select_tile(
    rows: int, head_size: int, shared_kb: int, *, full_precision: bool = False
) -> Tile:
    """Tile for ``rows`` packed rows, with the narrowest tail that holds the rest.

    Args:
        rows: Query rows times query heads per KV head.
        head_size: One of ``HEAD_SIZES`` (others up to 256 work, untuned).
        shared_kb: Class from ``shared_memory_kb``.
        full_precision: fp32 operands, which no tensor core takes: small tiles.
    """
    head_pad = max(next_power_of_2(head_size), 64)
    if full_precision:
        return _FULL_PRECISION_TILE
    tile = next(t for most, t in TILE_TABLE[head_pad, shared_kb] if rows <= most)
    rest = rows % tile.block_m
    tail = max(16, next_power_of_2(rest))
    if rows < tile.block_m or rest == 0 or tail == tile.block_m:
        return tile
    return replace(tile, tail_m=tail)


@functools.lru_cache(_MAX_PLANS)
def plan_splits(
    num_reqs: int,
    num_kv_heads: int,
    rows: int,
    tile: Tile,
    max_seq_len: int,
    num_sms: int,
    num_splits: int | None = None,
) -> SplitPlan:
    """Cut the keys so that the grid fills whole waves of the machine.

    Only host constants enter: the plan is part of a captured graph, the lengths are
    not. ``num_splits`` forces a number.
    """
    max_tiles = max(cdiv(max_seq_len, tile.block_n), 1)
    if num_splits is not None:
        if not 1 <= num_splits <= MAX_SPLITS:
            raise ValueError(
                f"Wrong number of key splits (got num_splits={num_splits}). "
                f"Allowed: 1 to {MAX_SPLITS}, or None to choose."
            )
        return SplitPlan(num_splits, num_splits)
    slots = num_sms * tile.ctas_per_sm
    programs = num_reqs * num_kv_heads * tile.num_row_tiles(rows)
    most = max(min(MAX_WAVES * slots // programs, max_tiles, MAX_SPLITS), 1)
    waves = [programs * s / slots for s in range(1, most + 1)]
    filled = [w / max(-(-w // 1), 1.0) for w in waves]
    fill = next(s for s, f in enumerate(filled, 1) if f >= 0.95 * max(filled))
    long_tiles = LONG_KEYS // tile.block_n
    # Spare splits cost an empty program each, so they exist only where they can help.
    spare = min(most, cdiv(max_tiles, long_tiles))
    return SplitPlan(max(fill, spare), fill, 1, long_tiles)


def prefers_given_prefix(
    num_reqs: int, num_kv_heads: int, rows: int, head_size: int
) -> bool:
    """Whether FlashAttention-3 should attend to the committed keys (``prefix_lse``).

    Where programs or rows are many, its overlap of softmax and matrix products
    outweighs one more launch. Measured on an H200 (``bench_tree_attention.py``), for
    contexts from 2k on. Host constants only, as in ``plan_splits``.
    """
    if head_size < 128:
        # Cheap products: it wins where the rows fill its tiles of 64 exactly or nearly.
        return num_reqs * num_kv_heads >= 24 and 128 < rows <= 192
    return rows > 192 or num_reqs * num_kv_heads >= 32


def estimate_shared_bytes(
    tile: Tile, head_size: int, q_bytes: int, kv_bytes: int
) -> int:
    """Upper estimate of one program's shared memory: Q, the K/V pipeline, P, rest."""
    head_pad = next_power_of_2(head_size)
    pipeline = tile.num_stages * 2 * tile.block_n * head_pad * kv_bytes
    converted = tile.block_n * head_pad * q_bytes if kv_bytes < q_bytes else 0
    scores = tile.block_m * tile.block_n * q_bytes
    return tile.block_m * head_pad * q_bytes + pipeline + converted + scores + 2048
