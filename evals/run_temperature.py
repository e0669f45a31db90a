# SPDX-License-Identifier: Apache-2.0
"""Acceptance length at several temperatures, with and without scaling tree scores.

Answers held-out prompts with a seed of their own at every temperature: without
speculation, and with trees whose scores are taken at the request's temperature or at
temperature 1. The answers must be equal, so both kinds of tree are measured on the
same text. Each configuration is an engine in a process of its own.

    .venv/bin/python evals/run_temperature.py --limit 12 --max-tokens 64

Exit code 1: an answer differs from the one without speculation.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from run_acceptance import BASELINE, MAX_MODEL_LEN, differences, load_prompts

from vllm_dflash.demo.compare import acceptance_length
from vllm_dflash.demo.pair import DEFAULT_DEPTH, ModelPair, embedded_pair
from vllm_dflash.demo.serve import CPU_RUNNER_ENV

Results = dict[str, dict[str, Any]]


def main() -> int:
    args = _parse()
    if args.worker:
        _run_worker(json.loads(args.worker), args.output)
        return 0
    pair = _model_pair(args)
    prompts = load_prompts(args.limit)
    results: dict[str, Results] = {}
    for name, speculative_config in _configurations(args, pair).items():
        print(f"== {name}", file=sys.stderr, flush=True)
        results[name] = _run_in_subprocess(
            {
                "engine": {
                    "model": pair.target,
                    "dtype": args.dtype,
                    "max_model_len": MAX_MODEL_LEN,
                    "max_num_seqs": args.max_num_seqs,
                    "enforce_eager": not _has_gpu(),
                    "speculative_config": speculative_config,
                },
                "max_tokens": args.max_tokens,
                "temperatures": args.temperatures,
                "prompts": prompts,
            }
        )
        if args.output:
            args.output.write_text(json.dumps(results, indent=1) + "\n")
    print(format_table(results, args.temperatures))
    different = [
        f"{name} at {temperature}: {text}"
        for name, result in results.items()
        for temperature, run in result.items()
        for text in differences(
            run["outputs"], results[BASELINE][temperature]["outputs"]
        )
    ]
    print(*different, sep="\n", file=sys.stderr)
    return int(bool(different))


def format_table(results: dict[str, Results], temperatures: list[float]) -> str:
    """Return acceptance lengths and the number of equal answers as Markdown."""
    lines = [
        "| tree | "
        + " | ".join(f"T = {t}" for t in temperatures)
        + " | equal answers |",
        "|---|" + "---:|" * (len(temperatures) + 1),
    ]
    baseline = results[BASELINE]
    for name, result in results.items():
        if name == BASELINE:
            continue
        lengths = [
            f"{acceptance_length({}, result[str(t)]['counters']):.3f}"
            for t in temperatures
        ]
        pairs = [
            (tokens, baseline[t]["outputs"][prompt])
            for t, run in result.items()
            for prompt, tokens in run["outputs"].items()
        ]
        equal = f"{sum(a == b for a, b in pairs)} of {len(pairs)}"
        lines.append(f"| {name} | {' | '.join(lengths)} | {equal} |")
    return "\n".join(lines)


def _configurations(
    args: argparse.Namespace, pair: ModelPair
) -> dict[str, dict[str, Any] | None]:
    configurations: dict[str, dict[str, Any] | None] = {BASELINE: None}
    for budget in args.budgets:
        for scale in (True, False):
            name = f"budget {budget}, scores at {'the temperature' if scale else '1'}"
            configurations[name] = {
                "method": "dflash",
                "model": pair.draft,
                "num_speculative_tokens": args.depth,
                "ddtree": {"budget": budget, "scale_by_temperature": scale},
            }
    return configurations


def _run_in_subprocess(job: dict[str, Any]) -> Results:
    env = {**os.environ, "HF_HUB_OFFLINE": "1"}
    if not _has_gpu():
        env |= CPU_RUNNER_ENV
        env.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    env.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "result.json"
        command = [sys.executable, __file__, "--worker", json.dumps(job)]
        # The table alone goes to stdout.
        subprocess.run(
            [*command, "--output", str(output)], env=env, stdout=sys.stderr, check=True
        )
        return json.loads(output.read_text(encoding="utf-8"))


def _run_worker(job: dict[str, Any], output: Path) -> None:
    from vllm import LLM, SamplingParams

    llm = LLM(**job["engine"], disable_log_stats=False)
    messages = [prompt["messages"] for prompt in job["prompts"]]
    results: Results = {}
    for temperature in job["temperatures"]:
        params = [
            SamplingParams(
                temperature=temperature, seed=seed, max_tokens=job["max_tokens"]
            )
            for seed in range(len(messages))
        ]
        before = _counters(llm)
        answers = llm.chat(messages, params, use_tqdm=False)
        after = _counters(llm)
        results[str(temperature)] = {
            "outputs": {
                prompt["id"]: list(answer.outputs[0].token_ids)
                for prompt, answer in zip(job["prompts"], answers, strict=True)
            },
            "counters": {name: after[name] - before.get(name, 0) for name in after},
        }
        print(f"temperature {temperature} done", file=sys.stderr, flush=True)
    output.write_text(json.dumps(results), encoding="utf-8")


def _counters(llm: Any) -> dict[str, float]:
    return {
        # LLM.get_metrics leaves out the suffix that the server's /metrics has.
        f"{metric.name}_total": metric.value
        for metric in llm.get_metrics()
        if metric.name.startswith("vllm:spec_decode_num_") and hasattr(metric, "value")
    }


def _model_pair(args: argparse.Namespace) -> ModelPair:
    if args.model is None:
        return embedded_pair(lambda text: print(text, file=sys.stderr, flush=True))
    return ModelPair(args.model, args.draft_model, args.model, is_embedded=False)


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--limit", type=int, default=12, help="number of prompts")
    parser.add_argument("--budgets", type=int, nargs="*", default=[16])
    parser.add_argument(
        "--temperatures", type=float, nargs="*", default=[0.7, 1.0, 1.3]
    )
    parser.add_argument("--depth", type=int, default=DEFAULT_DEPTH)
    parser.add_argument("--max-num-seqs", type=int, default=4)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--model")
    parser.add_argument("--draft-model")
    parser.add_argument("--output", type=Path, help="where to write the JSON")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if (args.model is None) != (args.draft_model is None):
        parser.error("--model and --draft-model belong together")
    return args


if __name__ == "__main__":
    sys.exit(main())
