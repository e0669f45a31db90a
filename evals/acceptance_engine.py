# SPDX-License-Identifier: Apache-2.0
"""One engine in a process of its own: its answers, and how many drafts it accepted.

``run_acceptance.py`` and ``run_temperature.py`` describe an engine and the waves of
requests it is to answer as a `Job`; `run` starts it and brings back an answer for each.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from vllm_dflash.cli.arguments import json_object
from vllm_dflash.demo.pair import DEFAULT_DEPTH, ModelPair, embedded_pair
from vllm_dflash.demo.serve import CPU_RUNNER_ENV

sys.path.insert(0, str(Path(__file__).resolve().parent))
import provenance
from first_difference import first_difference

BASELINE = "no speculation"
MAX_MODEL_LEN = 2048
_PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos"

Prompt = dict[str, Any]


@dataclass
class Wave:
    """Requests that are sent at once; counted together.

    Attributes:
        name: Of the wave in the results.
        prompts: Each has an ``id`` and ``messages``.
        sampling: Arguments of SamplingParams. With a temperature above 0 the seed of a
            prompt is its place in ``prompts`` plus ``first_seed``.
        first_seed: Seed of the first prompt.
    """

    name: str
    prompts: list[Prompt]
    sampling: dict[str, Any]
    first_seed: int = 0


@dataclass
class Job:
    """An engine and what it answers.

    Attributes:
        engine: Arguments of vllm.LLM.
        waves: Answered one after another.
        chat_template_kwargs: For the target's chat template.
        scores: Name in `acceptance_scores.RULES` of another way to score candidates.
        dump: File for the verified trees; None: no dump.
    """

    engine: dict[str, Any]
    waves: list[Wave]
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    scores: str | None = None
    dump: str | None = None


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Options that say which pair is measured, and how it is run."""
    parser.add_argument("--model", help="target, default the embedded pair")
    parser.add_argument("--draft-model")
    parser.add_argument("--depth", type=int, default=DEFAULT_DEPTH)
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--max-model-len", type=int, default=MAX_MODEL_LEN)
    parser.add_argument("--max-num-seqs", type=int, default=4)
    parser.add_argument(
        "--engine-args",
        type=json_object(
            "Arguments of vllm.LLM by name",
            """--engine-args '{"gpu_memory_utilization": 0.3}'""",
        ),
        default={},
        help='more arguments of vllm.LLM, such as {"gpu_memory_utilization": 0.3}',
    )
    parser.add_argument("--output", type=Path, help="where to write the JSON")


def model_pair(parser: argparse.ArgumentParser, args: argparse.Namespace) -> ModelPair:
    """The pair that the options name; exits if they name half of one."""
    if (args.model is None) != (args.draft_model is None):
        parser.error("--model and --draft-model belong together")
    if args.model is None:
        return embedded_pair(lambda text: print(text, file=sys.stderr, flush=True))
    return ModelPair(args.model, args.draft_model, args.model, is_embedded=False)


def engine_options(
    args: argparse.Namespace, pair: ModelPair, speculative: dict[str, Any] | None
) -> dict[str, Any]:
    """Arguments of vllm.LLM; on the CPU fp32 and eager."""
    is_cpu = not provenance.has_gpu()
    if speculative is not None:
        speculative = {
            "method": "dflash",
            "model": pair.draft,
            "num_speculative_tokens": args.depth,
            **speculative,
        }
    return {
        "model": pair.target,
        "dtype": args.dtype or ("float32" if is_cpu else "bfloat16"),
        "max_model_len": args.max_model_len,
        "max_num_seqs": args.max_num_seqs,
        "enforce_eager": is_cpu,
        "speculative_config": speculative,
        **args.engine_args,
    }


def describe(args: argparse.Namespace, pair: ModelPair) -> dict[str, Any]:
    """Provenance of a run with these options."""
    return {
        **provenance.collect(),
        "dtype": engine_options(args, pair, None)["dtype"],
        "target": pair.served_name,
        "draft": "embedded" if pair.is_embedded else pair.draft,
        "depth": args.depth,
        "max_tokens": args.max_tokens,
        "max_num_seqs": args.max_num_seqs,
    }


def run(job: Job, is_local: bool) -> dict[str, Any]:
    """Answer the job in a process of its own.

    Args:
        job: What to run.
        is_local: Both models are folders; no model hub is asked.

    Returns:
        ``waves`` by name (``outputs`` by prompt id, ``counters``, ``requests``: vLLM's
        request id -> prompt id) and ``duration_s``.
    """
    env = dict(os.environ)
    if not provenance.has_gpu():
        env |= CPU_RUNNER_ENV
        env.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    if is_local:
        env["HF_HUB_OFFLINE"] = "1"
    env.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    # In the process, where the scores can be replaced and nothing outlives it.
    env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    env.pop("VLLM_DFLASH_DUMP_TREES", None)
    if job.dump is not None:
        env["VLLM_DFLASH_DUMP_TREES"] = job.dump
    with tempfile.TemporaryDirectory() as folder:
        source, output = Path(folder) / "job.json", Path(folder) / "result.json"
        source.write_text(json.dumps(asdict(job)), encoding="utf-8")
        # The tables alone go to stdout.
        subprocess.run(
            [sys.executable, __file__, str(source), str(output)],
            env=env,
            stdout=sys.stderr,
            check=True,
        )
        return json.loads(output.read_text(encoding="utf-8"))


def add_counters(counters: list[dict[str, Any]]) -> dict[str, Any]:
    """Sum counters of several waves."""
    total: dict[str, Any] = {}
    for values in counters:
        for name, value in values.items():
            if isinstance(value, list):
                pairs = zip(value, total.get(name, [0] * len(value)), strict=True)
                total[name] = [a + b for a, b in pairs]
            else:
                total[name] = total.get(name, 0) + value
    return total


def differences(
    outputs: dict[str, list[int]], baseline: dict[str, list[int]]
) -> list[str]:
    """Return one line for each answer that is not the baseline's."""
    lines = []
    for prompt_id, expected in baseline.items():
        tokens = outputs[prompt_id]
        position = first_difference(tokens, expected)
        if position is not None:
            lines.append(f"{prompt_id} differs at token {position} of {len(expected)}")
    return lines


def _work(job: Job, output: Path) -> None:
    if job.scores is not None:
        import acceptance_scores

        acceptance_scores.install(job.scores)
    from vllm import LLM, SamplingParams

    llm = LLM(**job.engine, disable_log_stats=False)
    warm_up = SamplingParams(temperature=0, max_tokens=8)
    llm.chat([{"role": "user", "content": "Hello."}], warm_up, use_tqdm=False)
    waves = {}
    started = time.perf_counter()
    for wave in job.waves:
        is_seeded = wave.sampling.get("temperature", 0) > 0
        params = [
            SamplingParams(**wave.sampling, seed=seed if is_seeded else None)
            for seed in range(wave.first_seed, wave.first_seed + len(wave.prompts))
        ]
        before = _counters(llm)
        answers = llm.chat(
            [prompt["messages"] for prompt in wave.prompts],
            params,
            use_tqdm=False,
            chat_template_kwargs=job.chat_template_kwargs or None,
        )
        pairs = list(zip(wave.prompts, answers, strict=True))
        waves[wave.name] = {
            "outputs": {p["id"]: list(a.outputs[0].token_ids) for p, a in pairs},
            "requests": {a.request_id: p["id"] for p, a in pairs},
            "counters": _since(before, _counters(llm)),
        }
        print(f"{wave.name}: {len(pairs)} answers", file=sys.stderr, flush=True)
    result = {"waves": waves, "duration_s": time.perf_counter() - started}
    output.write_text(json.dumps(result), encoding="utf-8")


def _counters(llm: Any) -> dict[str, Any]:
    """vLLM's counters of speculation, under the names that /metrics has."""
    counters: dict[str, Any] = {}
    for metric in llm.get_metrics():
        if metric.name.startswith(_PER_POSITION):
            counters[f"{_PER_POSITION}_total"] = list(metric.values)
        elif metric.name.startswith("vllm:spec_decode_num_"):
            counters[f"{metric.name}_total"] = metric.value
    return counters


def _since(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    negative = {
        name: [-v for v in value] if isinstance(value, list) else -value
        for name, value in before.items()
    }
    return add_counters([after, negative])


def _main() -> None:
    source, output = map(Path, sys.argv[1:])
    values = json.loads(source.read_text(encoding="utf-8"))
    waves = [Wave(**wave) for wave in values.pop("waves")]
    _work(Job(**values, waves=waves), output)


if __name__ == "__main__":
    _main()
