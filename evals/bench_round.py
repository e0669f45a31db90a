# SPDX-License-Identifier: Apache-2.0
"""Milliseconds per engine step: no speculation, native chain, trees.

    python evals/bench_round.py --budgets 16,32,48,64,96 --batches 1,8,32

Engines of Qwen3-8B's shape with dummy weights, all of vLLM's defaults (CUDA graphs,
async scheduling, torch.compile). All engines of a run start together, since starting
is CPU work, and then measure one after another. A random draft is hardly ever
accepted, so a step commits about one token and the context stays where it is; the
tokens per step are printed beside the time.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from engine_wave import announce_done, announce_ready, report, run_wave
from model_shapes import write_qwen3_8b

WARMUP_STEPS = 8


def speculative_config(kind: str, draft: str) -> dict[str, Any] | None:
    """``none``, ``chain``, ``auto`` (a tree as it comes) or a fixed budget in nodes."""
    if kind == "none":
        return None
    config: dict[str, Any] = dict(
        method="dflash", model=draft, num_speculative_tokens=15
    )
    config["ddtree"] = {"chain": False, "auto": True}.get(kind)
    if config["ddtree"] is None:
        config["ddtree"] = {"budget": int(kind), "budget_per_batch_size": "fixed"}
    return config


def run_engine(args: argparse.Namespace) -> None:
    """Child: start one engine, wait for GO, measure, print JSON lines."""
    import random

    from vllm import LLM, SamplingParams
    from vllm.sampling_params import RequestOutputKind

    batches = [int(b) for b in args.batches.split(",")]
    kwargs: dict[str, Any] = dict(
        model=args.target,
        skip_tokenizer_init=True,
        load_format="dummy",
        max_model_len=2048,
        max_num_seqs=max(batches),
        max_num_batched_tokens=8192,
        gpu_memory_utilization=0.2,
        kv_cache_memory_bytes=int(7.5 * 2**30),
    )
    if args.backend:
        kwargs["attention_backend"] = args.backend
    config = speculative_config(args.engine, args.draft)
    if config is not None:
        kwargs["speculative_config"] = config
    if args.engine != "auto":
        width = {"none": 1, "chain": 16}.get(args.engine) or int(args.engine) + 1
        kwargs["compilation_config"] = {
            "cudagraph_capture_sizes": sorted(b * width for b in batches)
        }
    engine = LLM(**kwargs).llm_engine
    announce_ready()
    rng = random.Random(1)
    prompts = {
        (b, i): [rng.randrange(10, 150000) for _ in range(args.context)]
        for b in batches
        for i in range(b)
    }
    request_id = 0

    def measure(batch: int, max_tokens: int) -> tuple[list[float], list[float]]:
        nonlocal request_id
        params = SamplingParams(
            temperature=0.0,
            max_tokens=max_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        for i in range(batch):
            request_id += 1
            engine.add_request(
                str(request_id), {"prompt_token_ids": prompts[batch, i]}, params
            )
        steps = []
        while engine.has_unfinished_requests():
            outputs = engine.step()
            tokens = sum(len(o.outputs[0].token_ids) for o in outputs)
            steps.append((time.perf_counter(), len(outputs), tokens))
        full = [
            i
            for i in range(1, len(steps))
            if steps[i][1] == batch and steps[i - 1][1] == batch
        ][WARMUP_STEPS:]
        times = [1e3 * (steps[i][0] - steps[i - 1][0]) for i in full]
        return times, [steps[i][2] / batch for i in full]

    for batch in batches:
        measure(batch, 12 + WARMUP_STEPS)
    for repeat in range(args.repeats):
        for batch in batches:
            times, tokens = measure(batch, args.steps)
            if not times:
                continue
            ordered = sorted(times)
            row = dict(
                engine=args.engine,
                batch=batch,
                repeat=repeat,
                ms=statistics.median(times),
                p10=ordered[len(ordered) // 10],
                p90=ordered[len(ordered) * 9 // 10],
                tokens_per_step=statistics.mean(tokens),
                steps=len(times),
            )
            report(row)
    announce_done()


def print_table(rows: list[dict[str, Any]]) -> None:
    """Median of the repeats, and the ratio to the chain of the same batch."""
    merged: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for row in rows:
        merged.setdefault((row["engine"], row["batch"]), []).append(row)
    ms = {key: statistics.median(r["ms"] for r in rs) for key, rs in merged.items()}
    print("\n| engine | batch | ms per step | to chain | tokens per step | steps |")
    print("|---|---|---|---|---|---|")
    for (engine, batch), repeats in merged.items():
        chain = ms.get(("chain", batch))
        ratio = f"{ms[engine, batch] / chain:.3f}" if chain else "-"
        tokens = statistics.mean(r["tokens_per_step"] for r in repeats)
        steps = sum(r["steps"] for r in repeats)
        print(
            f"| {engine} | {batch} | {ms[engine, batch]:.3f} | {ratio} | "
            f"{tokens:.2f} | {steps} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", help="comma list; default none, chain, budgets")
    parser.add_argument("--budgets", default="16,32,48,64,96")
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--context", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=70)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--backend", help="attention backend; vLLM's choice if absent")
    parser.add_argument("--out", type=Path, help="write the rows as JSON")
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    parser.add_argument("--target", help=argparse.SUPPRESS)
    parser.add_argument("--draft", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.engine:
        run_engine(args)
        return
    base = Path(tempfile.mkdtemp())
    target, draft = write_qwen3_8b(base)
    names = (args.engines or f"none,chain,{args.budgets}").split(",")
    options = ["--batches", args.batches, "--context", str(args.context)]
    options += ["--steps", str(args.steps), "--repeats", str(args.repeats)]
    if args.backend:
        options += ["--backend", args.backend]
    commands = {
        name: [sys.executable, __file__, "--engine", name, "--target", target]
        + ["--draft", draft, *options]
        for name in names
    }
    rows = run_wave(commands, base)
    print_table(rows)
    if args.out:
        args.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
