# SPDX-License-Identifier: Apache-2.0
"""Tokens per second of a real pair: no speculation, native chain, trees.

    python evals/bench_pair.py TARGET DRAFT --budgets 32,48,64 --concurrency 1,8,32

Answers the held-out prompts through ``LLM.chat`` with vLLM's defaults, each engine in
a process of its own, all started together. The engines measure in turn, ``--repeats``
times. Prints the median tokens per second (with the lowest and highest), acceptance
length, and how many answers equal those without speculation of the same run.

In bf16 two kernels round differently, so an answer may leave the other at a near tie:
for each differing answer the gap between the best two log-probabilities at the first
differing token is looked up in a run without speculation, and the largest is printed.
Under sampling a difference is as harmless (the noise decides) but has no such gap.
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
from bench_round import speculative_config
from engine_wave import announce_done, announce_ready, hand_on, report, run_wave
from first_difference import first_difference

from vllm_dflash.calibrate.prompts import in_turn

PROMPTS = Path(__file__).parent / "prompts" / "heldout.jsonl"


def load_chats(limit: int) -> list[list[dict[str, str]]]:
    """Held-out conversations, kinds interleaved."""
    items = [json.loads(line) for line in PROMPTS.read_text().splitlines()]
    places = in_turn([item["kind"] for item in items])
    return [items[place]["messages"] for place in places[:limit]]


def run_engine(args: argparse.Namespace) -> None:
    """Child: start one engine, wait for its turn, measure."""
    from vllm import LLM, SamplingParams

    levels = [int(c) for c in args.concurrency.split(",")]
    kwargs: dict[str, Any] = dict(
        model=args.target,
        max_model_len=2048,
        max_num_seqs=max(levels),
        max_num_batched_tokens=8192,
        gpu_memory_utilization=0.1,
        kv_cache_memory_bytes=4 << 30,
        disable_log_stats=False,
        enable_prefix_caching=False,
        dtype=args.dtype,
    )
    if args.backend:
        kwargs["attention_backend"] = args.backend
    config = speculative_config(args.engine, args.draft)
    if config is not None:
        kwargs["speculative_config"] = config
    llm = LLM(**kwargs)
    chats = load_chats(args.limit)

    def counters() -> tuple[int, int]:
        values = {m.name: getattr(m, "value", 0) for m in llm.get_metrics()}
        return (
            values.get("vllm:spec_decode_num_drafts", 0),
            values.get("vllm:spec_decode_num_accepted_tokens", 0),
        )

    def answer(level: int, messages: list[Any], temperature: float, max_tokens: int):
        before, start, tokens = counters(), time.perf_counter(), []
        for i in range(0, len(messages), level):
            batch = messages[i : i + level]
            params = [
                SamplingParams(
                    temperature=temperature, seed=i + j, max_tokens=max_tokens
                )
                for j in range(len(batch))
            ]
            outputs = llm.chat(batch, params, use_tqdm=False)
            tokens += [list(o.outputs[0].token_ids) for o in outputs]
        seconds = time.perf_counter() - start
        drafts, accepted = (a - b for a, b in zip(counters(), before, strict=True))
        return tokens, seconds, 1 + accepted / drafts if drafts else None

    def top_two_gaps(messages: list[Any]) -> tuple[list[Any], list[list[float]]]:
        params = SamplingParams(temperature=0, max_tokens=args.max_tokens, logprobs=2)
        outputs = llm.chat(messages, params, use_tqdm=False)
        gaps = []
        for output in outputs:
            best = [
                sorted((v.logprob for v in step.values()), reverse=True)[:2]
                for step in output.outputs[0].logprobs
            ]
            gaps.append([round(b[0] - b[1], 4) for b in best])
        return [list(o.outputs[0].token_ids) for o in outputs], gaps

    announce_ready()
    for repeat in range(args.repeats):
        if repeat:
            hand_on()
        for temperature in (float(t) for t in args.temperatures.split(",")):
            for level in levels:
                # A few prompts one by one, all of them in larger batches.
                messages = chats[: 12 if level == 1 else len(chats)]
                if repeat == 0:
                    # Once unmeasured: Triton compiles a kernel at its first use.
                    answer(level, messages, temperature, args.max_tokens)
                tokens, seconds, length = answer(
                    level, messages, temperature, args.max_tokens
                )
                report(
                    dict(
                        engine=args.engine,
                        temperature=temperature,
                        concurrency=level,
                        repeat=repeat,
                        tokens_per_s=sum(map(len, tokens)) / seconds,
                        acceptance_length=length,
                        tokens=tokens if repeat == 0 else None,
                    )
                )
    if args.engine == "none":
        tokens, gaps = top_two_gaps(chats)
        report(dict(engine="gaps", tokens=tokens, gaps=gaps))
    announce_done()


def divergence_gaps(
    answers: list[list[int]], base: list[list[int]], reference: dict[str, Any]
) -> list[float]:
    """Gap of the best two tokens where each differing answer leaves ``base``."""
    found = []
    known = zip(reference["tokens"], reference["gaps"], strict=True)
    for ours, theirs, (tokens, gaps) in zip(answers, base, known, strict=False):
        shared = first_difference(ours, theirs)
        if shared is None:
            continue
        if shared < len(gaps) and tokens[:shared] == theirs[:shared]:
            found.append(gaps[shared])
    return found


def print_table(rows: list[dict[str, Any]]) -> None:
    """One line a setting, ratios within the run."""
    reference = next((r for r in rows if r["engine"] == "gaps"), None)
    rows = [r for r in rows if r["engine"] != "gaps"]
    repeats: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for r in rows:
        key = (r["engine"], r["temperature"], r["concurrency"])
        repeats.setdefault(key, []).append(r)
    found = {key: dict(runs[0]) for key, runs in repeats.items()}
    for key, row in found.items():
        speeds = [r["tokens_per_s"] for r in repeats[key]]
        row["tokens_per_s"] = statistics.median(speeds)
        row["range"] = f"{min(speeds):.0f}-{max(speeds):.0f}"
    print(
        "\n| engine | T | concurrency | tokens/s | range | to chain | to none | ",
        end="",
    )
    print("acceptance length | answers equal | largest gap at a difference |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for (engine, temperature, level), row in found.items():
        none = found.get(("none", temperature, level))
        chain = found.get(("chain", temperature, level))
        speed = row["tokens_per_s"]
        cells = [f"{speed:.0f}", row["range"]]
        for other in (chain, none):
            cells.append(f"{speed / other['tokens_per_s']:.2f}" if other else "-")
        length = row["acceptance_length"]
        cells.append(f"{length:.2f}" if length else "-")
        if none:
            pairs = list(zip(row["tokens"], none["tokens"], strict=True))
            cells.append(f"{sum(a == b for a, b in pairs)}/{len(pairs)}")
        else:
            cells.append("-")
        gaps = []
        if none and reference and temperature == 0:
            gaps = divergence_gaps(row["tokens"], none["tokens"], reference)
        cells.append(f"{max(gaps):.3f} ({len(gaps)})" if gaps else "-")
        print(f"| {engine} | {temperature} | {level} | " + " | ".join(cells) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target")
    parser.add_argument("draft")
    parser.add_argument("--engines", help="comma list; default none, chain, budgets")
    parser.add_argument("--budgets", default="32,48,64")
    parser.add_argument("--concurrency", default="1,8,32")
    parser.add_argument("--temperatures", default="0,1")
    parser.add_argument("--max-tokens", type=int, default=192)
    parser.add_argument("--limit", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--backend", help="attention backend; vLLM's choice if absent")
    parser.add_argument("--out", type=Path, help="write the rows as JSON")
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.engine:
        run_engine(args)
        return
    names = (args.engines or f"none,chain,{args.budgets}").split(",")
    commands = {
        name: [sys.executable, __file__, *sys.argv[1:], "--engine", name]
        for name in names
    }
    rows = run_wave(commands, Path(tempfile.mkdtemp()))
    print_table(rows)
    if args.out:
        args.out.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
