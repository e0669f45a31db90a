# SPDX-License-Identifier: Apache-2.0
"""Serving speed of one pair: no speculation, vLLM's chain, trees fixed and automatic.

    python evals/bench_serving.py --concurrency 1,8,32 --temperatures 0,1 --mixed auto

All servers start together and stay up; ``vllm bench serve`` then measures one at a
time. Each repeat visits every load, and within a load the servers in a new random
order, so that a machine that gets slower or faster does so for all of them. With every
repeat the servers exchange their cores: as many repeats as servers are fairest. Prompts
are the held-out chats of ``prompts/heldout.jsonl``. Without ``--model`` the embedded
pair is served. ``--mixed`` adds a load that rises from one request at a time to full
while it is measured (serving/mixed.py). docs/evaluation.md explains the output.
"""

import argparse
import dataclasses
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import provenance
from serving.also import check_also, parse_also
from serving.arguments import (
    add_serving_arguments,
    log,
    numbers,
    parse_serving_arguments,
    serving_options,
)
from serving.load import Load, LoadError, closed_load, measure, write_prompts
from serving.mixed import AUTO, Ramp, find_ramp, parse_ramp
from serving.servers import SERVERS, ServerWave, ServingOptions, speculative_config
from serving.table import markdown

from vllm_dflash.cli.demo import signals_interrupt
from vllm_dflash.demo.serve import ServerError

RESULTS = Path(__file__).resolve().parent / "results"
MIN_PROMPTS = 8
MIXED = "mixed"
# Temperature, and concurrency or MIXED.
Setting = tuple[float, Any]


def main() -> int:
    args = _parse()
    options = serving_options(args)
    report: dict[str, Any] = {
        "kind": "serving",
        "provenance": provenance.collect("pandas"),
        "settings": {
            "model": options.pair.served_name,
            "draft": "embedded" if options.pair.is_embedded else options.pair.draft,
            "max_tokens": args.max_tokens,
            "prompts_per_slot": args.prompts_per_slot,
            "repeats": args.repeats,
            "order_seed": args.order_seed,
            "ignore_eos": args.ignore_eos,
            "also": args.also and dataclasses.asdict(args.also),
            "mixed": args.mixed and str(args.mixed),
            "mixed_prompts": mixed_prompts(args) if args.mixed else None,
        },
        "rows": [],
    }
    args.output.parent.mkdir(parents=True, exist_ok=True)
    try:
        for name in args.servers:
            speculative_config(name, options)
        if args.also:
            check_also(args.also, args.servers, args.temperatures, args.concurrency)
        with signals_interrupt():
            for row in run(args, options, report["settings"]):
                report["rows"].append(row)
                # After each row, so that a run that is cut short is not lost.
                text = json.dumps(report, indent=1) + "\n"
                args.output.write_text(text, encoding="utf-8")
    except (ValueError, ServerError, LoadError) as error:
        print(f"bench_serving: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        log("interrupted; what was measured is written")
    rows = report["rows"]
    if not rows:
        print("bench_serving: nothing was measured", file=sys.stderr)
        return 2
    print(markdown(rows))
    log(f"\nResults: {args.output}")
    if args.plots:
        from serving import plots

        for path in plots.save({args.output.stem: rows}, args.output.with_suffix("")):
            log(f"Plot: {path}")
    return 0


def run(
    args: argparse.Namespace, options: ServingOptions, settings: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """Start the servers, warm them up, and yield a row for each measurement.

    What trees the servers say that they have is put into the settings.
    """
    log_dir = Path(tempfile.mkdtemp(prefix="bench-serving-"))
    log(f"Logs: {log_dir}")
    prompts = log_dir / "prompts.jsonl"
    write_prompts(options.pair.target, prompts)
    rows: list[dict[str, Any]] = []
    ramps: dict[float, Ramp] = {}
    deadline = time.monotonic() + 60 * args.time_limit if args.time_limit else None
    with ServerWave(args.servers, options, log_dir, log) as wave:
        settings["trees"] = wave.trees()
        turn = 0
        for number, (repeat, setting, name) in enumerate(_schedule(args)):
            if deadline is not None and time.monotonic() > deadline:
                log(f"--time-limit {args.time_limit:g}: the rest is not measured")
                return
            if repeat is not None and repeat != turn:
                turn = repeat
                wave.rotate(turn)
            temperature, concurrency = setting
            if concurrency != MIXED:
                load = closed_load(args, setting, repeat)
            else:
                if temperature not in ramps:
                    is_auto = args.mixed == AUTO
                    ramp = find_ramp(rows, temperature) if is_auto else args.mixed
                    ramps[temperature] = ramp
                load = mixed_load(args, temperature, repeat, ramps[temperature])
            started = time.perf_counter()
            row = measure(wave.servers[name], load, prompts, log_dir / "bench.log")
            label = "warm-up" if repeat is None else f"repeat {repeat}"
            log(
                f"{label} {load} {name}: "
                f"{row['result']['output_throughput']:.1f} tokens/s "
                f"({time.perf_counter() - started:.0f} s)"
            )
            if repeat is not None:
                rows.append({**row, "repeat": repeat, "order": number})
                yield rows[-1]


def mixed_load(
    args: argparse.Namespace, temperature: float, repeat: int | None, ramp: Ramp
) -> Load:
    """Return a measurement of the mixed load; if repeat is None, its short warm-up."""
    is_warm_up = repeat is None
    return Load(
        temperature=temperature,
        concurrency=None,
        num_prompts=max(args.concurrency) if is_warm_up else mixed_prompts(args),
        max_tokens=args.max_tokens,
        seed=repeat or 0,
        ignore_eos=args.ignore_eos,
        ramp=ramp.warm_up() if is_warm_up else ramp,
    )


def mixed_prompts(args: argparse.Namespace) -> int:
    """Return the requests of a mixed load."""
    default = max(max(args.concurrency) * args.prompts_per_slot, args.min_prompts)
    return args.mixed_prompts or default


def schedule(
    servers: list[str],
    settings: list[Setting],
    repeats: int,
    seed: int,
    mixed: list[Setting] | None = None,
) -> list[tuple[int | None, Setting, str]]:
    """Return (repeat, load, server) in the order of measuring; repeat None warms up.

    Every load is warmed up once on every server: a kernel is compiled when it is first
    used, and a tree's size depends on the load. Mixed loads come after the others of
    a repeat, and so does their warm-up: its rates may be those the others have shown.
    """
    rng = random.Random(seed)
    order: list[tuple[int | None, Setting, str]] = [
        (None, setting, server) for setting in settings for server in servers
    ]
    for repeat in range(repeats):
        for setting in rng.sample(settings, len(settings)):
            for server in rng.sample(servers, len(servers)):
                order.append((repeat, setting, server))
        mixed = mixed or []
        if repeat == 0:
            order += [
                (None, setting, server) for setting in mixed for server in servers
            ]
        for setting in rng.sample(mixed, len(mixed)):
            for server in rng.sample(servers, len(servers)):
                order.append((repeat, setting, server))
    return order


def _schedule(args: argparse.Namespace) -> list[tuple[int | None, Setting, str]]:
    settings = [(t, c) for t in args.temperatures for c in args.concurrency]
    mixed = [(t, MIXED) for t in args.temperatures] if args.mixed else []
    order = schedule(args.servers, settings, args.repeats, args.order_seed, mixed)
    return order + (
        args.also.schedule(args.servers, args.order_seed) if args.also else []
    )


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--servers",
        type=lambda text: text.split(","),
        default=list(SERVERS),
        help=f"of {','.join(SERVERS)} and tree-N, a fixed tree of N nodes",
    )
    parser.add_argument(
        "--concurrency", type=numbers(int), default=[1, 2, 4, 8, 16, 32, 64]
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--also",
        type=parse_also,
        metavar="T:C,..:REPEATS[:SERVER,..]",
        help="then more loads, with repeats of their own",
    )
    parser.add_argument(
        "--mixed",
        type=parse_ramp,
        metavar="auto|START:END",
        help="also a load that rises while it is measured, requests per second; auto "
        "takes them from the other loads",
    )
    parser.add_argument(
        "--mixed-prompts", type=int, help="requests of it; as the largest concurrency's"
    )
    add_serving_arguments(parser, MIN_PROMPTS, "of each server, on a GPU")
    parser.add_argument(
        "--time-limit", type=float, help="minutes after which no measurement starts"
    )
    parser.add_argument("--output", type=Path, default=RESULTS / "serving.local.json")
    parser.add_argument(
        "--plots",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="PNG and SVG beside the JSON",
    )
    args = parse_serving_arguments(parser)
    if args.mixed_prompts is not None and args.mixed_prompts < 1:
        parser.error(
            f"--mixed-prompts is {args.mixed_prompts}. Allowed are 1 and more. "
            "Type --mixed-prompts 256"
        )
    return args


if __name__ == "__main__":
    sys.exit(main())
