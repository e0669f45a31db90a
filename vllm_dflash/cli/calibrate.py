# SPDX-License-Identifier: Apache-2.0
"""``vllm-dflash calibrate``: measure, choose and keep a budget schedule."""

import argparse
import time
from pathlib import Path
from typing import Any

from vllm_dflash import envs
from vllm_dflash.cli.arguments import CommandError, positive
from vllm_dflash.config import DEFAULT_BUDGET, DEFAULT_BUDGET_CPU, resolve_depth
from vllm_dflash.schedule import BudgetSchedule

# What a kept schedule has to reach of the best choice, by `--check`.
BAR = 0.97
# Tokens that the timed requests may grow by.
_ROOM = 2048


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the subcommand."""
    parser.add_argument("model", help="the target")
    parser.add_argument("draft_model", help="its DFlash draft")
    parser.add_argument("--depth", type=positive, help="draft depth (default: all)")
    parser.add_argument(
        "--budget", type=positive, help="largest tree (default 47; on the CPU 16)"
    )
    parser.add_argument(
        "--max-num-seqs", type=positive, default=64, help="largest batch (default 64)"
    )
    parser.add_argument(
        "--prompts", type=Path, help="JSON lines with messages or prompt (default: 16)"
    )
    parser.add_argument(
        "--context", type=positive, default=512, help="tokens before the timed steps"
    )
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument(
        "--max-tokens", type=positive, default=128, help="per answer (default 128)"
    )
    keeping = parser.add_mutually_exclusive_group()
    keeping.add_argument(
        "--dry-run", action="store_true", help="print the schedule, keep nothing"
    )
    keeping.add_argument(
        "--check",
        action="store_true",
        help="compare the kept schedule with what is measured now; exit code 1 if it "
        f"is below {BAR} of the best choice at a batch size",
    )


def run_calibrate(args: argparse.Namespace) -> int:
    """Run the calibration that the arguments describe; returns the exit code."""
    # The scheduler and the trees must be within reach.
    envs.keep_engine_in_process()
    from vllm_dflash.calibrate import choose, measure, prompts, store

    try:
        conversations = prompts.read_messages(args.prompts)
        engine_args, nodes, sizes, depth = _engine_args(args)
        from vllm import LLM
        from vllm.platforms import current_platform

        started = time.monotonic()
        llm = LLM(**engine_args)
    except ValueError as error:
        raise CommandError(str(error)) from error
    budget = nodes[-1]
    try:
        print(f"Engine up after {time.monotonic() - started:.0f} s.", flush=True)
        setup = store.describe_setup(
            llm.llm_engine.vllm_config.speculative_config,
            kv_cache_dtype=engine_args.get("kv_cache_dtype", "auto"),
            tensor_parallel_size=1,
            budget=budget,
            depth=depth,
        )
        kept = store.load(setup)
        if args.check and kept is None:
            raise CommandError(
                f"there is no kept schedule to check (got no {setup.path}). Allowed: "
                "after the same command without --check."
            )
        bench = measure.Bench(llm.llm_engine)
        asked = prompts.tokenize(llm.get_tokenizer(), conversations)
        paths = bench.accepted_paths(asked, budget, args.max_tokens, args.temperature)
        tokens = choose.tokens_by_nodes(paths, budget, depth)
        print(f"{len(paths)} trees verified, {tokens[budget]:.2f} tokens a step.")
        long_prompts = [prompts.lengthen(prompt, args.context) for prompt in asked]
        # Steps on the CPU are long, and nothing to tune a server by.
        rounds = 1 if current_platform.is_cpu() else measure.ROUNDS
        measured = bench.time_sizes(long_prompts, sizes, nodes, _ROOM, rounds)
    finally:
        llm.llm_engine.engine_core.shutdown()
    if args.check:
        assert kept is not None
        return _check(kept, measured, tokens)
    schedule = choose.choose_schedule(measured, tokens, args.max_num_seqs)
    print(f"Measured in {time.monotonic() - started:.0f} s.\n")
    _print_table(measured, tokens, nodes, sizes, schedule)
    if all(count == 0 for _, _, count in schedule):
        print(
            "\nSpeculation pays at no batch size with this draft, so no schedule is "
            "kept. Serve without --speculative-config, or with a better draft."
        )
        return 0
    print(f'\n"budget_per_batch_size": {[list(entry) for entry in schedule]}')
    if args.dry_run:
        return 0
    details: dict[str, Any] = dict(
        tokens_by_nodes={str(n): round(tokens[n], 3) for n in nodes},
        step_ms=[[b, n, round(ms, 3)] for (b, n), ms in sorted(measured.items())],
        verified_trees=len(paths),
        temperature=args.temperature,
        context=args.context,
    )
    path = store.save(setup, schedule, details)
    print(f'Kept in {path}: "auto" uses it for this pair, GPU and budget {budget}.')
    return 0


def _check(
    kept: BudgetSchedule,
    measured: dict[tuple[int, int], float],
    tokens: list[float],
) -> int:
    """Print how near a schedule of an earlier run comes to the best; the exit code."""
    from vllm_dflash.calibrate import choose

    print(f'\nKept: "budget_per_batch_size": {[list(entry) for entry in kept]}\n')
    print("| batch | kept | tok/s | best | tok/s | kept to best |")
    print("|---:|---:|---:|---:|---:|---:|")
    rows = choose.compare(kept, measured, tokens)
    if not rows:
        raise CommandError(
            "the kept schedule can't be checked: nothing was measured of its choices "
            f"(got {[list(entry) for entry in kept]}). Allowed: the options that it "
            "was made with."
        )
    for row in rows:
        print(
            f"| {row.batch} | {row.nodes} | {row.tokens_per_s:.0f} | {row.best} | "
            f"{row.best_tokens_per_s:.0f} | {row.ratio:.3f} |"
        )
    worst = min(row.ratio for row in rows)
    is_good = worst >= BAR
    print(
        f"\nAt worst {worst:.3f} of the best choice: "
        + ("as it should be." if is_good else f"below {BAR}. Calibrate again.")
    )
    return 0 if is_good else 1


def _engine_args(
    args: argparse.Namespace,
) -> tuple[dict[str, Any], list[int], list[int], int]:
    """(arguments of the engine, numbers of nodes, batch sizes, draft depth)."""
    from vllm.platforms import current_platform
    from vllm.transformers_utils.config import get_config

    from vllm_dflash.calibrate import measure

    extra = _parse_engine_options(args.serve_args)
    if extra.get("tensor_parallel_size", 1) != 1:
        raise CommandError(
            "calibrate measures one GPU (got --tensor-parallel-size "
            f"{extra['tensor_parallel_size']}). Allowed: 1. Write a schedule by hand, "
            'or leave "auto" to the formula by model size.'
        )
    trust = extra.get("trust_remote_code", False)
    draft = get_config(args.draft_model, trust_remote_code=trust)
    depth = resolve_depth(args.depth, getattr(draft, "block_size", None))
    is_cpu = current_platform.is_cpu()
    default = max(DEFAULT_BUDGET_CPU if is_cpu else DEFAULT_BUDGET, depth)
    budget = args.budget or default
    nodes = measure.candidate_nodes(budget, depth)
    sizes = measure.batch_sizes(args.max_num_seqs)
    options: dict[str, Any] = dict(
        max_model_len=args.context + args.max_tokens + _ROOM + 2 * budget,
        max_num_batched_tokens=8192,
        enable_prefix_caching=False,
    )
    options |= extra
    options |= dict(
        model=args.model,
        # vLLM reads as many entries of the schedule as there may be requests.
        max_num_seqs=max(args.max_num_seqs, len(nodes)),
        speculative_config=dict(
            method="dflash",
            model=args.draft_model,
            num_speculative_tokens=depth,
            ddtree=dict(
                budget=budget, budget_per_batch_size=measure.schedule_of_all(nodes)
            ),
        ),
    )
    if not is_cpu and not options.get("enforce_eager"):
        options["compilation_config"] = dict(
            cudagraph_capture_sizes=measure.capture_sizes(
                nodes, sizes, measure.MAX_ROWS
            )
        )
    return options, nodes, sizes, depth


def _parse_engine_options(words: list[str]) -> dict[str, Any]:
    """Options after ``--`` that differ from vLLM's defaults."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    given = vars(parser.parse_args(words))
    defaults = vars(parser.parse_args([]))
    return {
        name: value
        for name, value in given.items()
        if value != defaults[name] and hasattr(EngineArgs, name)
    }


def _print_table(
    measured: dict[tuple[int, int], float],
    tokens: list[float],
    nodes: list[int],
    sizes: list[int],
    schedule: BudgetSchedule,
) -> None:
    """Tokens per second of every cell; the schedule's choice has a star."""
    print("| nodes | tokens a step | " + " | ".join(f"batch {s}" for s in sizes) + " |")
    print("|" + "---|" * (2 + len(sizes)))
    for count in nodes:
        cells = []
        for size in sizes:
            ms = measured.get((size, count))
            if ms is None:
                cells.append("-")
                continue
            speed = 1e3 * size * tokens[count] / ms
            chosen = any(a <= size <= b and n == count for a, b, n in schedule)
            cells.append(f"{speed:.0f} tok/s, {ms:.2f} ms" + (" *" if chosen else ""))
        print(f"| {count} | {tokens[count]:.2f} | " + " | ".join(cells) + " |")
