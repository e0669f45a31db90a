# SPDX-License-Identifier: Apache-2.0
"""Times tree attention against causal attention of the same width, on a CUDA machine.

    python kernels/benchmarks/bench_tree_attention.py            # the full table
    python kernels/benchmarks/bench_tree_attention.py --quick    # a third of it
    python kernels/benchmarks/bench_tree_attention.py --tune     # sweep the tiles

Per case: a CUDA graph of consecutive calls over rotating cache pools is replayed, the
median replay divided by the number of calls. Bandwidth is the bytes of the keys,
values, queries and outputs over that time, relative to a device copy measured in the
same run. A shape whose kernel disagrees with the fp32 reference, or with causal
FlashAttention-3 on a chain, gets times but no ratio.

Comparators that aren't importable are named as absent. One that takes a tree and
disagrees with the reference gets no time.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import platform
import subprocess
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).parent)]

import torch  # noqa: E402
import tree_attention_tuning as tuning  # noqa: E402
from tree_attention_workload import (  # noqa: E402
    COMPARATORS,
    ONE_TREE,
    Absent,
    Call,
    Shape,
    Workload,
    prefix_call,
    tree_call,
)

from vllm_dflash_kernels.tree_attention.reference import (  # noqa: E402
    tree_attention_reference,
)
from vllm_dflash_kernels.tree_attention.tiles import prefers_given_prefix  # noqa: E402

SHAPES = (Shape(32, 8, 128), Shape(9, 3, 64))
CONTEXTS = (512, 2048, 8192, 32768)
BATCHES = (1, 8, 32)
WIDTHS = (17, 33, 65)
MAX_CACHE_BYTES = 24e9
MAX_ERROR = 5e-3
COMPARATOR_ERROR = 1e-2


def time_call(call: Call, num_calls: int, replays: int = 7) -> float:
    """Median microseconds of one call, from graph replays of ``num_calls`` calls."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call(0)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for pool in range(num_calls):
            call(pool)
    times = []
    for replay in range(replays + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        if replay >= 2:
            times.append(start.elapsed_time(end))
    return sorted(times)[len(times) // 2] * 1e3 / num_calls


def copy_bandwidth() -> float:
    """Bytes per second of a large device copy, reads and writes counted."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    target.copy_(source)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    # Not in a graph: a captured copy is a memcpy node, slower than the copy kernel.
    for _ in range(20):
        target.copy_(source)
    end.record()
    torch.cuda.synchronize()
    return 20 * 2 * source.numel() / (start.elapsed_time(end) * 1e-3)


def calls_of(w: Workload) -> int:
    """Calls per graph: every pool once, about 20 for small caches."""
    return max(w.num_pools, 20 if w.kv_bytes < 2e8 else 4)


def rms_ratio(expected: torch.Tensor, actual: torch.Tensor) -> float:
    expected, actual = expected.double(), actual.double()
    error = (expected - actual).square().mean().sqrt() / expected.square().mean().sqrt()
    return float(error.nan_to_num(nan=float("inf")))


def check_against_reference(
    shape: Shape, width: int, make=tree_call, one_tree: bool = False
) -> float:
    """Largest RMS error ratio over unequal lengths and, unless ``one_tree``, trees."""
    w = Workload(shape, [17, 700, 1500], 3, width, one_tree=one_tree, rotate=False)
    w.out.fill_(torch.nan)
    result = make(w)(0)
    actual = (result if isinstance(result, torch.Tensor) else w.out).clone()
    w.out = torch.empty_like(w.out, dtype=torch.float32)
    options = w.tensors()
    tree_attention_reference(w.query, w.key_cache, w.value_cache, **options)
    return rms_ratio(w.out, actual)


def check_against_fa3(shape: Shape, context: int, batch: int, width: int) -> float:
    """RMS difference to causal FlashAttention-3 when the tree is a chain."""
    w = Workload(shape, context, batch, width, chain=True, rotate=False)
    w.out.fill_(torch.nan)
    COMPARATORS["FA3"](w)(0)
    expected = w.out.clone()
    w.out.fill_(torch.nan)
    tree_call(w)(0)
    return rms_ratio(expected, w.out)


def served_with_prefix(shape: Shape, batch: int, width: int) -> bool:
    rows = width * (shape.num_heads // shape.num_kv_heads)
    return prefers_given_prefix(batch, shape.num_kv_heads, rows, shape.head_size)


def attempt(function, *arguments):
    """A value, or the reason why there is none; one failure must not lose the rest."""
    try:
        return function(*arguments)
    except Absent as error:
        return f"absent: {error}"
    except Exception as error:
        torch.cuda.synchronize()
        return f"failed: {type(error).__name__}: {str(error).splitlines()[0][:90]}"


def describe() -> None:
    import triton

    try:
        vllm = importlib.import_module("vllm").__version__
    except Exception as error:
        vllm = f"not importable ({type(error).__name__})"
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    ).stdout.strip()
    properties = torch.cuda.get_device_properties(0)
    print(f"GPU {properties.name}, {properties.multi_processor_count} SMs")
    print(
        f"Python {platform.python_version()}, torch {torch.__version__}, "
        f"Triton {triton.__version__}, vLLM {vllm}, commit {commit or 'unknown'}"
    )
    print("command: python " + " ".join(sys.argv))


def show(value: object) -> str:
    return f"{value:.1f}" if isinstance(value, float) else "-"


def table(args: argparse.Namespace) -> None:
    deadline = time.monotonic() + args.seconds
    bandwidth = copy_bandwidth()
    print(f"device copy: {bandwidth / 1e12:.2f} TB/s (reads + writes)\n")
    names = list(COMPARATORS)
    reasons: dict[str, str] = {}
    trusted: dict[tuple[Shape, int], bool] = {}
    rejected: dict[tuple[str, Shape, int], str] = {}
    for shape, width in itertools.product(args.shapes, args.widths):
        error = attempt(check_against_reference, shape, width)
        trusted[shape, width] = isinstance(error, float) and error <= MAX_ERROR
        print(f"check {shape} width {width}: RMS error ratio {error}")
        error = attempt(check_against_reference, shape, width, prefix_call)
        print(f"check {shape} width {width}: prefix by FA3, RMS error ratio {error}")
        error = attempt(check_against_fa3, shape, 2048, 3, width)
        if isinstance(error, float) and error > COMPARATOR_ERROR:
            trusted[shape, width] = False
        print(f"check {shape} width {width}: chain against FA3 {error}", flush=True)
        for name, one_tree in ONE_TREE.items():
            error = attempt(
                check_against_reference, shape, width, COMPARATORS[name], one_tree
            )
            print(f"check {shape} width {width}: {name} {error}", flush=True)
            if isinstance(error, float) and error <= COMPARATOR_ERROR:
                continue
            if isinstance(error, float):
                error = f"RMS error ratio {error:.1e}: disagrees with the reference"
            rejected[name, shape, width] = error
    print(
        "\n| heads/kv/dim | batch | context | width | tree us | "
        + " | ".join(f"{name} us" for name in names)
        + " | served us | served / FA3 | GB/s | of copy |"
    )
    print("|" + "---|" * (9 + len(names)))
    for shape, batch, context, width in itertools.product(
        args.shapes, args.batches, args.contexts, args.widths
    ):
        row = f"| {shape} | {batch} | {context} | {width} |"
        if batch * context * shape.num_kv_heads * shape.head_size * 4 > MAX_CACHE_BYTES:
            print(row + " skipped: cache too large |")
            continue
        if time.monotonic() > deadline:
            print(row + f" skipped: {args.seconds} s are over |")
            continue
        w = attempt(Workload, shape, context, batch, width)
        if isinstance(w, str):
            print(row + f" {w} |")
            continue
        calls = calls_of(w)

        def measure(make, w=w, calls=calls) -> float:
            return time_call(make(w), calls)

        ours = attempt(measure, tree_call)
        if isinstance(ours, str):
            reasons["tree attention"] = ours
        others = {}
        for name in names:
            others[name] = rejected.get((name, shape, width)) or attempt(
                measure, COMPARATORS[name]
            )
            if isinstance(others[name], str):
                reasons[name] = others[name]
        flash = [v for n, v in others.items() if "FA3" in n and isinstance(v, float)]
        served, prefix = ours, others["FA prefix"]
        if isinstance(prefix, float) and served_with_prefix(shape, batch, width):
            served = prefix
        ratio = share = rate = "-"
        if isinstance(served, float) and trusted[shape, width]:
            ratio = f"{served / min(flash):.2f}" if flash else "-"
            rate = f"{w.bytes_moved / served / 1e3:.0f}"
            share = f"{w.bytes_moved / (served * 1e-6) / bandwidth:.0%}"
        elif not trusted[shape, width]:
            ratio = "check failed"
        cells = [show(ours), *(show(others[name]) for name in names), show(served)]
        print(f"{row} {' | '.join(cells)} | {ratio} | {rate} | {share} |", flush=True)
        del w
        torch.cuda.empty_cache()
    for name, reason in reasons.items():
        print(f"- {name}: {reason}")
    print("- served: what an engine takes, our kernel or FA3 for the committed keys")
    print(
        "- served / FA3: against the faster of FA3 as vLLM captures it (at most 32 "
        "splits, scheduler metadata) and FA3 with its own choice of splits"
    )
    print(
        "- xformers tree: contiguous copies of the cache, made outside, and the first "
        "request's tree for all; FlashInfer mask: the paged cache itself, planned "
        "outside with the true lengths"
    )
    print("- wanted: served / FA3 <= 1.15 from 2k on, >= 70 % of the copy from 8k on")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer cases")
    parser.add_argument("--tune", action="store_true", help="sweep tiles and splits")
    parser.add_argument("--widths", type=int, nargs="+")
    parser.add_argument("--contexts", type=int, nargs="+")
    parser.add_argument("--batches", type=int, nargs="+")
    parser.add_argument("--shapes", type=int, nargs="+", help="0: 32/8/128, 1: 9/3/64")
    parser.add_argument("--seconds", type=float, default=90.0, help="time limit")
    parser.add_argument("--workers", type=int, default=12, help="compile processes")
    parser.add_argument("--compile", help=argparse.SUPPRESS)
    args = parser.parse_args()
    quick = args.quick
    args.widths = args.widths or ((33,) if quick else WIDTHS)
    args.contexts = args.contexts or ((2048, 8192) if quick else CONTEXTS)
    args.batches = args.batches or ((1, 8) if quick else BATCHES)
    args.shapes = [SHAPES[i] for i in args.shapes or range(len(SHAPES))]
    if args.compile:
        tuning.compile_slice(args)
        return
    if not torch.cuda.is_available():
        raise SystemExit("This benchmark needs a CUDA device. Nothing was measured.")
    started = time.monotonic()
    compilers = tuning.start_compilers(args, sys.argv[1:])
    describe()
    for compiler in compilers:
        compiler.wait()
    print(f"compiled in {time.monotonic() - started:.1f} s", flush=True)
    if args.tune:
        for shape, width in itertools.product(args.shapes, args.widths):
            error = attempt(check_against_reference, shape, width)
            print(f"check {shape} width {width}: RMS error ratio {error}")
        tuning.tune(args, time_call, calls_of, rms_ratio)
    else:
        table(args)
    print(f"\n{time.monotonic() - started:.1f} s in all")


if __name__ == "__main__":
    main()
