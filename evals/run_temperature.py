# SPDX-License-Identifier: Apache-2.0
"""Acceptance length of trees that are scored in several ways, by sampling options.

Answers held-out prompts with a seed of their own: without speculation, and with trees
under each of ``--scores``. The answers must be equal, so all kinds of tree are measured
on the same text. Each configuration is an engine in a process of its own.

    .venv/bin/python evals/run_temperature.py --limit 12 --max-tokens 64
    .venv/bin/python evals/run_temperature.py --scores 1 "survivors at 1" \
        --sampling '{"top_p": 0.9}' '{"top_k": 20, "top_p": 0.9}'

Exit code 1: an answer differs from the one without speculation.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import acceptance_scores
from acceptance_engine import (
    BASELINE,
    Job,
    Wave,
    add_engine_options,
    describe,
    differences,
    engine_options,
    model_pair,
    run,
)
from acceptance_prompts import load_prompts

from vllm_dflash.cli.arguments import json_object
from vllm_dflash.demo.compare import acceptance_length

# Configuration -> name of the wave -> its answers and counters.
Results = dict[str, dict[str, dict[str, Any]]]

SCORES = ("1", "the temperature", "the noise", *acceptance_scores.RULES)


def main() -> int:
    parser = _parser()
    args = parser.parse_args()
    pair = model_pair(parser, args)
    prompts = load_prompts(limit=args.limit)
    waves = [
        Wave(
            wave_name(sampling, temperature),
            prompts,
            {"temperature": temperature, "max_tokens": args.max_tokens, **sampling},
        )
        for sampling in args.sampling
        for temperature in args.temperatures
    ]
    report: dict[str, Any] = {"provenance": describe(args, pair)}
    results: Results = {}
    for name, (speculative, scores) in configurations(args).items():
        print(f"== {name}", file=sys.stderr, flush=True)
        job = Job(engine_options(args, pair, speculative), waves, scores=scores)
        results[name] = run(job, pair.is_embedded)["waves"]
        report["results"] = results
        if args.output:
            args.output.parent.mkdir(parents=True, exist_ok=True)
            text = json.dumps(report, indent=1) + "\n"
            args.output.write_text(text, encoding="utf-8")
    for sampling in args.sampling:
        print(f"\n{json.dumps(sampling)}\n")
        names = {f"T = {t}": wave_name(sampling, t) for t in args.temperatures}
        print(format_table(results, names))
    different = [
        f"{name}, {wave}: {text}"
        for name, result in results.items()
        for wave, answers in result.items()
        for text in differences(answers["outputs"], results[BASELINE][wave]["outputs"])
    ]
    print(*different, sep="\n", file=sys.stderr)
    return int(bool(different))


def wave_name(sampling: dict[str, Any], temperature: float) -> str:
    """Name of the requests with these options."""
    return json.dumps({"temperature": temperature, **sampling})


def configurations(
    args: argparse.Namespace,
) -> dict[str, tuple[dict[str, Any] | None, str | None]]:
    """Configuration -> (speculative_config, rule of `acceptance_scores`)."""
    found: dict[str, tuple[dict[str, Any] | None, str | None]] = {
        BASELINE: (None, None)
    }
    for budget in args.budgets:
        for scores in args.scores:
            options = {
                "budget": budget,
                "scale_by_temperature": scores == "the temperature",
                "use_noise": scores == "the noise",
            }
            rule = scores if scores in acceptance_scores.RULES else None
            label = f"at {scores}" if rule is None else f"of {scores}"
            label = "with the noise" if options["use_noise"] else label
            found[f"budget {budget}, scores {label}"] = ({"ddtree": options}, rule)
    return found


def format_table(results: Results, waves: dict[str, str]) -> str:
    """Return acceptance lengths and the number of equal answers as Markdown.

    Args:
        results: Of every configuration.
        waves: Heading of a column -> name of its wave.
    """
    lines = [
        "| tree | " + " | ".join(waves) + " | equal answers |",
        "|---|" + "---:|" * (len(waves) + 1),
    ]
    baseline = results[BASELINE]
    for name, result in results.items():
        if name == BASELINE:
            continue
        lengths = [
            f"{acceptance_length({}, result[wave]['counters']):.3f}"
            for wave in waves.values()
        ]
        pairs = [
            (tokens, baseline[wave]["outputs"][prompt])
            for wave in waves.values()
            for prompt, tokens in result[wave]["outputs"].items()
        ]
        equal = f"{sum(a == b for a, b in pairs)} of {len(pairs)}"
        lines.append(f"| {name} | {' | '.join(lengths)} | {equal} |")
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_engine_options(parser)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--limit", type=int, default=12, help="number of prompts")
    parser.add_argument("--budgets", type=int, nargs="*", default=[16])
    parser.add_argument(
        "--temperatures", type=float, nargs="*", default=[0.7, 1.0, 1.3]
    )
    parser.add_argument(
        "--scores",
        nargs="*",
        choices=SCORES,
        default=["the temperature", "1"],
        help="how candidates are scored",
    )
    parser.add_argument(
        "--sampling",
        type=json_object(
            "Arguments of SamplingParams by name", """--sampling '{"top_p": 0.9}'"""
        ),
        nargs="*",
        default=[{}],
        help="options of a request beside the temperature, as JSON objects",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
