# SPDX-License-Identifier: Apache-2.0
"""Acceptance length and token equality on held-out prompts, offline.

Answers the prompts of ``prompts/heldout.jsonl`` greedily: without speculation, with
vLLM's DFlash chain, and with a tree of each budget. Each configuration is an engine in
a process of its own; all else is equal. Prints a table by kind of prompt and writes
everything, answers included, as JSON with provenance.

    .venv/bin/python evals/run_acceptance.py --limit 8 --budgets 16 --output out.json

Exit code 1: an answer differs from the one without speculation.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from vllm_dflash.demo.compare import acceptance_length
from vllm_dflash.demo.pair import DEFAULT_DEPTH, ModelPair, embedded_pair
from vllm_dflash.demo.serve import CPU_RUNNER_ENV

PROMPTS = Path(__file__).parent / "prompts" / "heldout.jsonl"
BASELINE = "no speculation"
MAX_MODEL_LEN = 2048


def main() -> int:
    args = _parse()
    if args.worker:
        _run_worker(json.loads(args.worker), args.output)
        return 0
    pair = _model_pair(args)
    prompts = load_prompts(args.limit)
    is_cpu = not _has_gpu()
    dtype = args.dtype or ("float32" if is_cpu else "bfloat16")
    results = {}
    for name, speculative_config in _configurations(args, pair).items():
        print(f"== {name}", file=sys.stderr, flush=True)
        job = {
            "engine": {
                "model": pair.target,
                "dtype": dtype,
                "max_model_len": MAX_MODEL_LEN,
                "max_num_seqs": args.max_num_seqs,
                "enforce_eager": is_cpu,
                "speculative_config": speculative_config,
            },
            "max_tokens": args.max_tokens,
            "prompts": prompts,
        }
        results[name] = _run_in_subprocess(job, is_cpu, pair.is_embedded)
    report = {
        "provenance": _provenance(args, pair, dtype, is_cpu),
        "summary": {
            name: summarise(result, results[BASELINE], prompts)
            for name, result in results.items()
        },
        "results": results,
    }
    print(format_table(report["summary"]))
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    different = False
    for name, result in results.items():
        for text in differences(result["outputs"], results[BASELINE]["outputs"]):
            print(f"{name}: {text}", file=sys.stderr)
            different = True
    return int(different)


def load_prompts(limit: int | None) -> list[dict[str, Any]]:
    """Return the prompts, or ``limit`` of them with the kinds in turn."""
    prompts = [json.loads(line) for line in PROMPTS.open(encoding="utf-8")]
    if limit is None:
        return prompts
    rank: dict[str, int] = {}
    order = []
    for index, prompt in enumerate(prompts):
        rank[prompt["kind"]] = rank.get(prompt["kind"], -1) + 1
        order.append((rank[prompt["kind"]], index))
    chosen = sorted(index for _, index in sorted(order)[:limit])
    return [prompts[index] for index in chosen]


def summarise(
    result: dict[str, Any], baseline: dict[str, Any], prompts: list[dict[str, Any]]
) -> dict[str, Any]:
    """Return acceptance length by kind and over all, and the number of equal answers.

    Over a group of prompts the length is tokens accepted, bonus included, per verify,
    so long answers weigh more.
    """
    outputs = result["outputs"]
    total = _sum_counters(result["counters"].values())
    return {
        "acceptance_length": {
            **{
                kind: acceptance_length({}, counters)
                for kind, counters in result["counters"].items()
            },
            "all": acceptance_length({}, total),
        },
        "num_tokens": sum(map(len, outputs.values())),
        "num_equal": sum(
            outputs[prompt["id"]] == baseline["outputs"][prompt["id"]]
            for prompt in prompts
        ),
        "num_prompts": len(prompts),
        "duration_s": result["duration_s"],
    }


def differences(
    outputs: dict[str, list[int]], baseline: dict[str, list[int]]
) -> list[str]:
    """Return one line for each answer that is not the baseline's."""
    lines = []
    for prompt_id, expected in baseline.items():
        tokens = outputs[prompt_id]
        if tokens != expected:
            pairs = zip(tokens, expected, strict=False)
            equal = (index for index, (a, b) in enumerate(pairs) if a != b)
            position = next(equal, min(len(tokens), len(expected)))
            lines.append(f"{prompt_id} differs at token {position} of {len(expected)}")
    return lines


def format_table(summary: dict[str, dict[str, Any]]) -> str:
    """Return the mean acceptance lengths as a Markdown table."""
    kinds = list(next(iter(summary.values()))["acceptance_length"])
    lines = [
        f"| | {' | '.join(kinds)} | equal answers | time |",
        "|---|" + "---:|" * (len(kinds) + 2),
    ]
    for name, row in summary.items():
        lengths = [row["acceptance_length"][kind] for kind in kinds]
        cells = ["-" if value is None else f"{value:.2f}" for value in lengths]
        equal = f"{row['num_equal']} of {row['num_prompts']}"
        lines.append(
            f"| {name} | {' | '.join(cells)} | {equal} | {row['duration_s']:.0f} s |"
        )
    return "\n".join(lines)


def _configurations(
    args: argparse.Namespace, pair: ModelPair
) -> dict[str, dict[str, Any] | None]:
    dflash = {
        "method": "dflash",
        "model": pair.draft,
        "num_speculative_tokens": args.depth,
    }
    configurations: dict[str, dict[str, Any] | None] = {
        BASELINE: None,
        f"chain {args.depth}": {**dflash, "ddtree": False},
    }
    for budget in args.budgets:
        options = {"budget": budget, "max_children": args.max_children}
        configurations[f"tree {budget}"] = {**dflash, "ddtree": options}
    return configurations


def _run_in_subprocess(
    job: dict[str, Any], is_cpu: bool, is_local: bool
) -> dict[str, Any]:
    env = {**os.environ, **(CPU_RUNNER_ENV if is_cpu else {})}
    if is_cpu:
        env.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    if is_local:
        env["HF_HUB_OFFLINE"] = "1"
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
    sampling_params = SamplingParams(temperature=0, max_tokens=job["max_tokens"])
    warm_up = SamplingParams(temperature=0, max_tokens=8)
    llm.chat([{"role": "user", "content": "Hello."}], warm_up, use_tqdm=False)
    outputs: dict[str, list[int]] = {}
    counters = {}
    started = time.perf_counter()
    for kind in dict.fromkeys(prompt["kind"] for prompt in job["prompts"]):
        prompts = [prompt for prompt in job["prompts"] if prompt["kind"] == kind]
        before = _counters(llm)
        answers = llm.chat(
            [prompt["messages"] for prompt in prompts], sampling_params, use_tqdm=False
        )
        after = _counters(llm)
        counters[kind] = {name: after[name] - before.get(name, 0) for name in after}
        for prompt, answer in zip(prompts, answers, strict=True):
            outputs[prompt["id"]] = list(answer.outputs[0].token_ids)
        print(f"{kind}: {len(prompts)} answers", file=sys.stderr, flush=True)
    duration_s = time.perf_counter() - started
    result = {"outputs": outputs, "counters": counters, "duration_s": duration_s}
    output.write_text(json.dumps(result), encoding="utf-8")


def _counters(llm: Any) -> dict[str, float]:
    return {
        # LLM.get_metrics leaves out the suffix that the server's /metrics has.
        f"{metric.name}_total": metric.value
        for metric in llm.get_metrics()
        if metric.name.startswith("vllm:spec_decode_num_") and hasattr(metric, "value")
    }


def _sum_counters(counters: Any) -> dict[str, float]:
    totals: dict[str, float] = {}
    for values in counters:
        for name, value in values.items():
            totals[name] = totals.get(name, 0) + value
    return totals


def _provenance(
    args: argparse.Namespace, pair: ModelPair, dtype: str, is_cpu: bool
) -> dict[str, Any]:
    distributions = ("vllm", "torch", "triton", "transformers", "vllm-dflash")
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "argv": sys.argv[1:],
        "git": _git_state(),
        "versions": {name: metadata.version(name) for name in distributions},
        "python": platform.python_version(),
        "device": _cpu_name() if is_cpu else _gpu_name(),
        "dtype": dtype,
        "target": pair.served_name,
        "draft": "embedded" if pair.is_embedded else pair.draft,
        "max_tokens": args.max_tokens,
        "max_num_seqs": args.max_num_seqs,
    }


def _git_state() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always"]
    result = subprocess.run(
        [*command, "--dirty", "--abbrev=40"],
        capture_output=True,
        text=True,
        check=False,
    )
    return result.stdout.strip() or "unknown"


def _model_pair(args: argparse.Namespace) -> ModelPair:
    if args.model is None:
        return embedded_pair(lambda text: print(text, file=sys.stderr, flush=True))
    return ModelPair(args.model, args.draft_model, args.model, is_embedded=False)


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return f"{os.cpu_count()} x {line.partition(':')[2].strip()}"
    return f"{os.cpu_count()} x {platform.machine()}"


def _gpu_name() -> str:
    import torch

    return torch.cuda.get_device_name(0)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--limit", type=int, help="number of prompts, default all 50")
    parser.add_argument("--budgets", type=int, nargs="*", default=[16, 32, 64])
    parser.add_argument("--depth", type=int, default=DEFAULT_DEPTH)
    parser.add_argument("--max-children", type=int, default=8)
    parser.add_argument("--max-num-seqs", type=int, default=4)
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"])
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
