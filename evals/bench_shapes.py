# SPDX-License-Identifier: Apache-2.0
"""Milliseconds of a step by tree size, of large targets' shapes with dummy weights.

    python evals/bench_shapes.py --shapes qwen3-30b-a3b,llama-70b-rank@16

One engine for each shape captures the graphs of every width, and all are timed on the
same running requests (`vllm_dflash.calibrate.measure`). 0 nodes is no speculation: no
drafting and one row of a request. A random draft is hardly ever accepted, so the
context stays where it is. `NAME@N` is a shape of N target layers: what does not fit
into a GPU is measured at two depths, and grows by the same time for each layer. A
`rank` is what one of two GPUs computes, without what they say to each other.

All engines start together and measure one after another, so together they must fit
into the GPU. vLLM's defaults otherwise: torch.compile, CUDA graphs, bf16.
"""

import argparse
import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import provenance
from engine_wave import announce_done, announce_ready, report, run_wave
from model_shapes import SHAPES, parse_shape, write_pair

NODES = (0, 15, 16, 47)
# Tokens that the timed requests may grow by.
ROOM = 900
GIB = 2**30


def run_engine(args: argparse.Namespace) -> None:
    """Child: start the engine of a shape, wait for the turn, measure."""
    from vllm_dflash import envs

    # The scheduler's table of tree sizes must be within reach.
    envs.keep_engine_in_process()
    from vllm import LLM

    from vllm_dflash.calibrate import measure

    batches = [int(b) for b in args.batches.split(",")]
    nodes = sorted({int(n) for n in args.nodes.split(",")})
    engine = LLM(
        model=args.target,
        skip_tokenizer_init=True,
        load_format=args.load_format,
        max_model_len=args.context + ROOM + 2 * nodes[-1],
        # vLLM reads as many entries of the schedule as there may be requests.
        max_num_seqs=max(*batches, len(nodes)),
        max_num_batched_tokens=8192,
        enable_prefix_caching=False,
        gpu_memory_utilization=0.05,
        kv_cache_memory_bytes=int(args.kv_cache_gib * GIB),
        speculative_config=dict(
            method="dflash",
            model=args.draft,
            num_speculative_tokens=args.depth,
            ddtree=dict(
                budget=nodes[-1],
                budget_per_batch_size=measure.schedule_of_all(nodes),
            ),
        ),
        compilation_config=dict(
            cudagraph_capture_sizes=measure.capture_sizes(
                nodes, batches, measure.MAX_ROWS
            )
        ),
    ).llm_engine
    announce_ready()
    bench = measure.Bench(engine)
    rng = random.Random(1)
    vocab_size = engine.vllm_config.model_config.get_vocab_size()
    prompts = [
        [rng.randrange(vocab_size) for _ in range(args.context)]
        for _ in range(max(batches))
    ]
    for batch in batches:
        times = bench.time_steps(prompts, batch, nodes, ROOM)
        for count, ms in times.items():
            row = dict(shape=args.shape, batch=batch, nodes=count, ms=round(ms, 4))
            report(row)
    announce_done()


def print_table(rows: list[dict[str, Any]]) -> None:
    """A line for each shape and batch, ratios to no speculation in brackets."""
    nodes = sorted({row["nodes"] for row in rows})
    ms = {(row["shape"], row["batch"], row["nodes"]): row["ms"] for row in rows}
    heads = [f"{count} nodes" if count else "no speculation" for count in nodes]
    print(f"\n| shape | batch | {' | '.join(heads)} |")
    print(f"|---|---:|{'---:|' * len(nodes)}")
    for shape, batch in dict.fromkeys((row["shape"], row["batch"]) for row in rows):
        cells = []
        for count in nodes:
            own, base = (ms.get((shape, batch, n)) for n in (count, nodes[0]))
            cell = "-" if own is None else f"{own:.2f}"
            if own is not None and base is not None and count:
                cell += f" ({own / base:.2f})"
            cells.append(cell)
        print(f"| {shape} | {batch} | {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--shapes",
        default="qwen3-30b-a3b,llama-70b-rank@16,llama-70b-rank@32",
        help=f"of {', '.join(SHAPES)}; NAME@LAYERS for fewer layers",
    )
    parser.add_argument("--nodes", default=",".join(map(str, NODES)))
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--context", type=int, default=1000)
    parser.add_argument("--depth", type=int, default=15)
    parser.add_argument("--kv-cache-gib", type=float, default=5)
    parser.add_argument("--out", type=Path, help="write rows and provenance as JSON")
    # Of one of the processes; weights that exist are for tests on the CPU, where vLLM
    # can't make some up.
    parser.add_argument("--load-format", default="dummy", help=argparse.SUPPRESS)
    parser.add_argument("--shape", help=argparse.SUPPRESS)
    parser.add_argument("--target", help=argparse.SUPPRESS)
    parser.add_argument("--draft", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.shape:
        run_engine(args)
        return
    base = Path(tempfile.mkdtemp(prefix="bench-shapes-"))
    options = ["--nodes", args.nodes, "--batches", args.batches]
    options += ["--context", str(args.context), "--depth", str(args.depth)]
    options += ["--kv-cache-gib", str(args.kv_cache_gib)]
    try:
        shapes = {name: parse_shape(name) for name in args.shapes.split(",")}
    except ValueError as error:
        parser.error(str(error))
    commands = {}
    for name, shape in shapes.items():
        target, draft = write_pair(base / name, shape)
        commands[name] = [sys.executable, __file__, "--shape", name]
        commands[name] += ["--target", target, "--draft", draft, *options]
    rows = run_wave(commands, base)
    if not rows:
        sys.exit(f"bench_shapes: nothing was measured; see {base}/*.log")
    print_table(rows)
    if args.out:
        result = {"provenance": provenance.collect(), "rows": rows}
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
