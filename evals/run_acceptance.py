# SPDX-License-Identifier: Apache-2.0
"""Acceptance length by task, depth, rank, temperature and budget, offline.

Answers the held-out prompts, or ``--prompts`` of your own: without speculation, with
vLLM's DFlash chain, and with a tree of each budget. Each configuration is an engine in
a process of its own; all else is equal. Prints tables and writes everything, answers
included, as JSON with provenance. ``--trees FOLDER`` keeps every verified tree for
``vllm-dflash show-tree``.

    .venv/bin/python evals/run_acceptance.py --limit 8 --budgets 16 --output out.json

Exit code 1: a greedy answer, or a seeded one of a tree, differs from the one without
speculation. vLLM's chain has other draws: above temperature 0 it answers otherwise.
"""

import argparse
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from acceptance_engine import (
    BASELINE,
    Job,
    Wave,
    add_counters,
    add_engine_options,
    describe,
    differences,
    engine_options,
    model_pair,
    run,
)
from acceptance_prompts import Prompt, load_prompts, tasks
from acceptance_tables import (
    RankCount,
    budget_curve,
    counts_agree,
    format_curve,
    format_depths,
    format_ranks,
    format_tasks,
    rank_counts,
    reached_by_chain,
    reached_depths,
    rounds_by_wave,
)

from vllm_dflash.cli.arguments import json_object
from vllm_dflash.demo.compare import acceptance_length
from vllm_dflash.demo.pair import ModelPair
from vllm_dflash.metrics.tree_dump import TreeRound, read_dump

Waves = dict[str, dict[str, Any]]
Trees = dict[str, list[TreeRound]]


def main() -> int:
    parser = _parser()
    args = parser.parse_args()
    pair = model_pair(parser, args)
    prompts = load_prompts(args.prompts, args.limit)
    waves = make_waves(prompts, args.temperatures, args.max_tokens)
    results, trees = measure(args, pair, waves)
    report: dict[str, Any] = {
        "provenance": describe(args, pair),
        "summary": {},
        "details": {},
    }
    for temperature in args.temperatures:
        title = f"T = {temperature:g}"
        of_temperature = {
            name: _of(result["waves"], temperature) for name, result in results.items()
        }
        summary = {
            name: summarise(found, of_temperature[BASELINE])
            for name, found in of_temperature.items()
        }
        if temperature > 0:
            summary[f"chain {args.depth}"]["has_other_draws"] = True
        kept = {name: _of(found, temperature) for name, found in trees.items()}
        details = describe_trees(summary, of_temperature, kept, args)
        print(f"\n## {title}\n\n{format_report(summary, details)}")
        suffix = f", {title}" if len(args.temperatures) > 1 else ""
        report["summary"] |= {name + suffix: row for name, row in summary.items()}
        report["details"][title] = details
    report["results"] = results
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    different = False
    for name, result in results.items():
        for wave, found in result["waves"].items():
            if name.startswith("chain") and not wave.startswith("0/"):
                continue
            expected = results[BASELINE]["waves"][wave]["outputs"]
            for text in differences(found["outputs"], expected):
                print(f"{name}, {wave}: {text}", file=sys.stderr)
                different = True
    return int(different)


def measure(
    args: argparse.Namespace, pair: ModelPair, waves: list[Wave]
) -> tuple[dict[str, dict[str, Any]], dict[str, Trees]]:
    """Run every configuration; returns its result and its verified trees by name.

    Interrupted after the first tree, it returns what was measured, and the budgets that
    were not are taken out of `args`.
    """
    results: dict[str, dict[str, Any]] = {}
    trees: dict[str, Trees] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.trees or Path(temporary)
        try:
            for name, speculative in configurations(args).items():
                print(f"== {name}", file=sys.stderr, flush=True)
                dump = folder.resolve() / f"{name.replace(' ', '-')}.jsonl"
                is_tree = name.startswith("tree")
                if is_tree:
                    # A dump is appended to.
                    dump.unlink(missing_ok=True)
                job = Job(
                    engine_options(args, pair, speculative),
                    waves,
                    chat_template_kwargs=args.chat_template_kwargs,
                    dump=str(dump) if is_tree else None,
                )
                found = run(job, pair.is_embedded)
                if is_tree:
                    trees[name] = rounds_by_wave(read_dump(dump).rounds, found["waves"])
                results[name] = found
        except KeyboardInterrupt:
            if not trees:
                raise
            args.budgets = [b for b in args.budgets if f"tree {b}" in results]
            print("interrupted; what was measured is reported", file=sys.stderr)
    return results, trees


def make_waves(
    prompts: list[Prompt], temperatures: list[float], max_tokens: int
) -> list[Wave]:
    """One wave for each temperature and task; seeds are the prompts' numbers."""
    waves = []
    for temperature in temperatures:
        first_seed = 0
        for task in tasks(prompts):
            of_task = [prompt for prompt in prompts if prompt["kind"] == task]
            sampling = {"temperature": temperature, "max_tokens": max_tokens}
            waves.append(Wave(f"{temperature:g}/{task}", of_task, sampling, first_seed))
            first_seed += len(of_task)
    return waves


def summarise(waves: Waves, baseline: Waves) -> dict[str, Any]:
    """Return acceptance length by task and over all, and the number of equal answers.

    Over a group of prompts the length is tokens accepted, bonus included, per verify,
    so long answers weigh more.
    """
    total = add_counters([wave["counters"] for wave in waves.values()])
    pairs = [
        (tokens, baseline[task]["outputs"][prompt])
        for task, wave in waves.items()
        for prompt, tokens in wave["outputs"].items()
    ]
    return {
        "acceptance_length": {
            **{
                task: acceptance_length({}, wave["counters"])
                for task, wave in waves.items()
            },
            "all": acceptance_length({}, total),
        },
        "num_tokens": sum(len(tokens) for tokens, _ in pairs),
        "num_equal": sum(tokens == expected for tokens, expected in pairs),
        "num_prompts": len(pairs),
    }


def describe_trees(
    summary: dict[str, dict[str, Any]],
    waves: dict[str, Waves],
    trees: dict[str, Trees],
    args: argparse.Namespace,
) -> dict[str, Any]:
    """What the verified trees of one temperature say, beside the acceptance length."""
    depth = args.depth
    chain = f"chain {depth}"
    chain_counters = add_counters([wave["counters"] for wave in waves[chain].values()])
    details: dict[str, Any] = {
        "by_depth": {chain: reached_by_chain(chain_counters, depth)},
        "by_rank": {},
        "curve": {},
        "measured": {},
    }
    for name, by_task in trees.items():
        rounds = [item for found in by_task.values() for item in found]
        counters = [wave["counters"] for wave in waves[name].values()]
        if not counts_agree(rounds, add_counters(counters)):
            print(f"{name}: the dump and vLLM's counters differ", file=sys.stderr)
        details["by_depth"][name] = reached_depths(rounds, depth)
        details["by_rank"][name] = [asdict(count) for count in rank_counts(rounds)]
    if trees:
        *smaller, budget = sorted(args.budgets)
        largest = trees[f"tree {budget}"]
        everything = [item for found in largest.values() for item in found]
        for task, rounds in {**largest, "all": everything}.items():
            details["curve"][task] = budget_curve(rounds, budget, depth)
            details["measured"][task] = {
                b: summary[f"tree {b}"]["acceptance_length"][task] for b in smaller
            }
    return details


def format_report(summary: dict[str, dict[str, Any]], details: dict[str, Any]) -> str:
    """The tables of one temperature as Markdown."""
    parts = [format_tasks(summary), format_depths(details["by_depth"])]
    if details["curve"]:
        ranks = {
            name: [RankCount(**count) for count in counts]
            for name, counts in details["by_rank"].items()
        }
        parts += [
            format_ranks(ranks),
            format_curve(details["curve"], details["measured"]),
        ]
    return "\n\n".join(parts)


def configurations(args: argparse.Namespace) -> dict[str, dict[str, Any] | None]:
    """Configuration -> what its speculative_config has beside the pair and depth."""
    found: dict[str, dict[str, Any] | None] = {
        BASELINE: None,
        f"chain {args.depth}": {"ddtree": False},
    }
    for budget in args.budgets:
        options = {"budget": budget, "max_children": args.max_children}
        found[f"tree {budget}"] = {"ddtree": options}
    return found


def _of(by_wave: dict[str, Any], temperature: float) -> dict[str, Any]:
    """The waves of one temperature, by task."""
    prefix = f"{temperature:g}/"
    return {
        name.removeprefix(prefix): value
        for name, value in by_wave.items()
        if name.startswith(prefix)
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_engine_options(parser)
    parser.add_argument(
        "--prompts", type=Path, nargs="*", help="JSON lines, a file for each task"
    )
    parser.add_argument("--limit", type=int, help="number of prompts, default all")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--temperatures", type=float, nargs="*", default=[0.0])
    parser.add_argument("--budgets", type=int, nargs="*", default=[16, 32, 64])
    parser.add_argument("--max-children", type=int, default=8)
    parser.add_argument(
        "--chat-template-kwargs",
        type=json_object(
            "Variables of the chat template by name",
            """--chat-template-kwargs '{"enable_thinking": false}'""",
        ),
        default={},
        help='for the chat template, such as {"enable_thinking": false}',
    )
    parser.add_argument("--trees", type=Path, help="folder for the verified trees")
    return parser


if __name__ == "__main__":
    sys.exit(main())
