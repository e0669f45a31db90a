# SPDX-License-Identifier: Apache-2.0
"""Sweeps the tiles and splits of tree attention; compiles ahead in other processes."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import os
import subprocess
import sys
import time
from dataclasses import replace

import torch
from tree_attention_workload import Shape, Workload, tree_call

from vllm_dflash_kernels.tree_attention.tiles import (
    SplitPlan,
    Tile,
    estimate_shared_bytes,
    select_tile,
)

# (batch, context) that a tile must serve; the geometric mean over them decides.
CASES = ((1, 1000), (1, 8192), (8, 2048), (8, 8192))
SPLITS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32)
SHARED_BYTES = 227 * 1024


# (rows, keys, warps, stages); chosen by compiling for sm_90: none of them spills.
SWEEP = (
    (64, 32, 4, 3), (64, 32, 4, 4), (64, 64, 4, 2), (64, 64, 4, 3), (64, 128, 4, 2),
    (64, 128, 8, 2), (128, 32, 4, 3), (128, 32, 8, 3), (128, 32, 8, 4), (128, 64, 8, 2),
    (128, 64, 8, 3), (128, 64, 8, 4), (128, 128, 8, 2), (256, 32, 8, 3),
)  # fmt: skip


def candidates(shape: Shape, width: int) -> list[Tile]:
    """Tiles worth timing: those that fit, with the tail that the rows leave."""
    rows = width * (shape.num_heads // shape.num_kv_heads)
    tiles = []
    for block_m, block_n, warps, stages in SWEEP:
        if block_m >= 2 * max(rows, 64):
            continue
        rest = rows % block_m
        tail = max(16, 1 << max(rest - 1, 0).bit_length())
        if rest == 0 or rows < block_m or tail >= block_m:
            tail = 0
        tile = Tile(block_m, block_n, warps, stages, tail_m=tail)
        if estimate_shared_bytes(tile, shape.head_size, 2, 2) > SHARED_BYTES:
            continue
        used = (block_m + 2 * stages * block_n) * shape.head_size * 2 + 1024
        ctas = max(1, min(SHARED_BYTES // used, 8 // warps))
        tiles.append(replace(tile, ctas_per_sm=ctas))
    return tiles


def variants(args: argparse.Namespace) -> list[tuple[Shape, int, Tile | None]]:
    """What has to be compiled: tuned tiles, or the table's choice."""
    pairs = itertools.product(args.shapes, args.widths)
    if not args.tune:
        return [(shape, width, None) for shape, width in pairs]
    return [(s, w, tile) for s, w in pairs for tile in candidates(s, w)]


def compile_slice(args: argparse.Namespace) -> None:
    """Child process: fill the compile cache with every n-th variant."""
    index, count = map(int, args.compile.split("/"))
    for shape, width, tile in variants(args)[index::count]:
        w = Workload(shape, 64, 1, width, rotate=False)
        for splits in (1, 2, 4, 8, 16, 32) if tile is None else (2,):
            plan = SplitPlan(splits, splits)
            # A failure shows again, with its reason, where the variant is timed.
            with contextlib.suppress(Exception):
                tree_call(w, tile=tile, plan=plan)(0)
    torch.cuda.synchronize()


def start_compilers(args: argparse.Namespace, argv: list[str]) -> list:
    count = max(1, min(args.workers, os.cpu_count() or 1, len(variants(args))))
    return [
        subprocess.Popen(
            [sys.executable, sys.argv[0], *argv, "--compile", f"{i}/{count}"],
            stdout=subprocess.DEVNULL,
        )
        for i in range(count)
    ]


def name(tile: Tile) -> str:
    tail = f"+{tile.tail_m}" if tile.tail_m else ""
    return (
        f"{tile.block_m}{tail} x {tile.block_n}, {tile.num_warps} warps, "
        f"{tile.num_stages} stages, {tile.ctas_per_sm}/SM"
    )


def timed(w: Workload, expected, tools, **overrides) -> float:
    """Microseconds, inf if the variant fails or is wrong."""
    time_call, calls_of, rms_ratio = tools
    try:
        call = tree_call(w, **overrides)
        w.out.fill_(torch.nan)
        call(0)
        if rms_ratio(expected, w.out) > 1e-2:
            print(f"WRONG RESULT: {overrides}")
            return math.inf
        return time_call(call, calls_of(w), replays=5)
    except Exception as error:
        torch.cuda.synchronize()
        print(f"failed: {type(error).__name__}: {str(error)[:100]} for {overrides}")
        return math.inf


def tune(args: argparse.Namespace, *tools) -> None:
    deadline = time.monotonic() + args.seconds
    for shape, width in itertools.product(args.shapes, args.widths):
        rows = width * (shape.num_heads // shape.num_kv_heads)
        print(f"\n## {shape}, width {width} ({rows} packed rows)")
        workloads = {c: Workload(shape, c[1], c[0], width) for c in CASES}
        expected = {}
        for case, w in workloads.items():
            tree_call(w)(0)
            expected[case] = w.out.clone()
        current = select_tile(rows, shape.head_size, 227)
        tiles = candidates(shape, width)
        tiles += [current] if current not in tiles else []
        results = {}
        for tile in tiles:
            if time.monotonic() > deadline:
                print("time limit: the remaining tiles were not timed")
                break
            results[tile] = [
                timed(workloads[c], expected[c], tools, tile=tile) for c in CASES
            ]
        ranking = sorted(results, key=lambda t: math.prod(results[t]))
        print("| tile | " + " | ".join(f"b{b} c{c} us" for b, c in CASES) + " | mean |")
        print("|" + "---|" * (len(CASES) + 2))
        for tile in ranking[:8] + [t for t in [current] if t not in ranking[:8]]:
            if tile not in results:
                continue
            mean = math.prod(results[tile]) ** (1 / len(CASES))
            mark = " (table)" if tile == current else ""
            cells = " | ".join(f"{t:.1f}" for t in results[tile])
            print(f"| {name(tile)}{mark} | {cells} | {mean:.2f} |", flush=True)
        for case in CASES:
            best = min(results, key=lambda t, c=case: results[t][CASES.index(c)])
            print(f"best for {case}: {name(best)}")
        if not ranking:
            return
        print("| splits | " + " | ".join(f"b{b} c{c} us" for b, c in CASES) + " |")
        print("|" + "---|" * (len(CASES) + 1))
        for splits in SPLITS:
            cells = []
            for case in CASES:
                plan = SplitPlan(splits, splits)
                w = workloads[case]
                if splits > 8 and case[0] > 1:
                    cells.append("-")
                    continue
                t = timed(w, expected[case], tools, tile=ranking[0], plan=plan)
                cells.append(f"{t:.1f}")
            print(f"| {splits} | {' | '.join(cells)} |", flush=True)
        off = [
            timed(workloads[c], expected[c], tools, tile=ranking[0], launch_pdl=False)
            for c in CASES
        ]
        print("without dependent launch: " + ", ".join(f"{t:.1f}" for t in off))
        del workloads, expected
        torch.cuda.empty_cache()


if __name__ == "__main__":
    raise SystemExit("Run bench_tree_attention.py --tune.")
