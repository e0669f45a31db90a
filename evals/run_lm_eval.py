# SPDX-License-Identifier: Apache-2.0
"""lm-eval on one target without speculation, with vLLM's chain, and with trees.

    python evals/run_lm_eval.py --config evals/configs/local_cpu.yaml --limit 4

Every engine answers the same items in a process of its own: offline, or behind a
``vllm serve`` that is started for it (``--backend local-completions``). Each response
is compared with the one without speculation. docs/evaluation.md explains the output.

Exit code 1: a condition of the configuration does not hold (a response or score differs
where they must be equal, a mean differs too much, a score is too low). 2: the run could
not be made.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import provenance
from accuracy.compare import check, format_table
from accuracy.config import (
    BACKENDS,
    EMBEDDED,
    OFFLINE_BACKEND,
    RESPONSE_RULES,
    EvalConfig,
    load,
    select_engines,
)

from vllm_dflash.cli.demo import signals_interrupt
from vllm_dflash.demo.compare import acceptance_length
from vllm_dflash.demo.pair import ModelPair, embedded_draft, embedded_pair
from vllm_dflash.demo.serve import (
    CPU_RUNNER_ENV,
    ServerError,
    ServerSpec,
    VLLMServer,
    describe_log,
    free_port,
)

EVALS = Path(__file__).resolve().parent
WORKER = EVALS / "accuracy" / "worker.py"
MAX_SHOWN_FAILURES = 20


def main() -> int:
    args = _parse()
    try:
        config = _load(args)
        with signals_interrupt():
            results, log_dir = run(config, args.confirm_run_unsafe_code)
    except (ValueError, ServerError, subprocess.CalledProcessError) as error:
        print(f"run_lm_eval: {error}", file=sys.stderr)
        return 2
    comparison = check(config, results)
    report = {
        "kind": "lm_eval",
        "provenance": provenance.collect("lm-eval", "datasets"),
        "config": {"file": args.config.name, **vars(config)},
        "comparison": comparison,
        "results": results,
    }
    output = args.output or EVALS / "results" / f"lm_eval_{args.config.stem}.local.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(format_table(results, comparison))
    print(f"\nResults: {output}\nLogs: {log_dir}", file=sys.stderr)
    failures = comparison["failures"]
    for line in failures[:MAX_SHOWN_FAILURES]:
        print(f"FAILED: {line}", file=sys.stderr)
    if len(failures) > MAX_SHOWN_FAILURES:
        hidden = len(failures) - MAX_SHOWN_FAILURES
        print(f"and {hidden} more, in the results", file=sys.stderr)
    return int(bool(failures))


@dataclass(frozen=True)
class Evaluation:
    """One engine of a configuration.

    Attributes:
        speculative_config: None is no speculation.
        job: What the worker does, but for lm-eval's ``model_args``.
    """

    config: EvalConfig
    pair: ModelPair
    is_cpu: bool
    name: str
    speculative_config: dict[str, Any] | None
    job: dict[str, Any]
    log_dir: Path

    def run(self) -> dict[str, Any]:
        """Return items, duration and counters."""
        is_offline = self.config.backend == OFFLINE_BACKEND
        return self._run_offline() if is_offline else self._run_behind_server()

    def _run_offline(self) -> dict[str, Any]:
        model_args: dict[str, Any] = {
            "pretrained": self.pair.target,
            "dtype": self.config.dtype,
            "disable_log_stats": False,
            **self.config.engine_args,
            **self.config.model_args,
        }
        if self.is_cpu:
            model_args["enforce_eager"] = True
        if self.speculative_config is not None:
            model_args["speculative_config"] = self.speculative_config
        env = {**os.environ, **(CPU_RUNNER_ENV if self.is_cpu else {})}
        if self.is_cpu:
            env.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        env.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        return self._run_worker(model_args, env | self._exact_products())

    def _exact_products(self) -> dict[str, str]:
        """Variables of an engine whose answers must be equal.

        vLLM's fp32 attention on a GPU is Triton's, in TF32 unless told otherwise.
        """
        is_fp32 = self.config.dtype == "float32"
        return {"TRITON_F32_DEFAULT": "ieee"} if is_fp32 else {}

    def _run_behind_server(self) -> dict[str, Any]:
        is_chat = self.config.backend == "local-chat-completions"
        options = {"dtype": self.config.dtype, **self.config.engine_args}
        max_model_len = options.pop("max_model_len", 2048)
        spec = ServerSpec(
            label=self.name,
            pair=self.pair,
            is_cpu=self.is_cpu,
            port=free_port(),
            speculative_config=self.speculative_config,
            max_model_len=max_model_len,
            extra_args=serve_flags(options),
            variables=self._exact_products(),
        )
        log_path = self.log_dir / f"{self.name}-server.log"
        with VLLMServer(spec, log_path, _log) as server:
            route = "chat/completions" if is_chat else "completions"
            model_args: dict[str, Any] = {
                "model": self.pair.served_name,
                "base_url": f"{server.client.base_url}/v1/{route}",
                "num_concurrent": self.config.num_concurrent,
                "max_length": max_model_len,
                "timeout": 1800,
                **self.config.model_args,
            }
            if not is_chat:
                # Prompts go as token ids, so a chat template's own BOS is not doubled.
                model_args |= {
                    "tokenizer": self.pair.target,
                    "tokenizer_backend": "huggingface",
                }
            before = server.client.counters()
            result = self._run_worker(model_args, dict(os.environ))
            after = server.client.counters()
        result["counters"] = {key: after[key] - before.get(key, 0) for key in after}
        return result

    def _run_worker(
        self, model_args: dict[str, Any], env: dict[str, str]
    ) -> dict[str, Any]:
        job_path = self.log_dir / f"{self.name}.job.json"
        result_path = self.log_dir / f"{self.name}.json"
        job = {**self.job, "model_args": model_args}
        job_path.write_text(json.dumps(job), encoding="utf-8")
        if self.config.offline:
            env |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
        if job["confirm_run_unsafe_code"]:
            # What the data set library asks for besides, for HumanEval and MBPP.
            env.setdefault("HF_ALLOW_CODE_EVAL", "1")
        command = [sys.executable, str(WORKER), str(job_path), str(result_path)]
        _run_process(command, env, self.log_dir / f"{self.name}.log")
        return json.loads(result_path.read_text(encoding="utf-8"))


def run(
    config: EvalConfig, confirm_run_unsafe_code: bool = False
) -> tuple[dict[str, Any], Path]:
    """Evaluate every engine of a configuration, one after another.

    Returns:
        Items, duration and acceptance length by engine, and the folder of the logs.
    """
    pair = _model_pair(config)
    is_cpu = not provenance.has_gpu()
    log_dir = Path(tempfile.mkdtemp(prefix="lm-eval-"))
    results = {}
    for name, options in config.engines.items():
        _log(f"== {name}")
        speculative_config = None
        if options is not None:
            speculative_config = {"method": "dflash", "model": pair.draft, **options}
        job = {
            "backend": config.backend,
            "tasks": config.tasks,
            "num_fewshot": config.num_fewshot,
            "limit": config.limit,
            "apply_chat_template": config.apply_chat_template,
            "max_new_tokens": config.max_new_tokens,
            "confirm_run_unsafe_code": confirm_run_unsafe_code,
        }
        result = Evaluation(
            config, pair, is_cpu, name, speculative_config, job, log_dir
        ).run()
        counters = result.pop("counters")
        result["acceptance_length"] = acceptance_length({}, counters)
        results[name] = result
        count = sum(map(len, result["items"].values()))
        _log(f"{name}: {count} items in {result['duration_s']:.0f} s")
    return results, log_dir


def _run_process(command: list[str], env: dict[str, str], log_path: Path) -> None:
    with log_path.open("w", encoding="utf-8") as log:
        process = subprocess.Popen(
            command,
            env=env,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            returncode = process.wait()
        finally:
            # The engine's own processes, should it have died or been interrupted.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if returncode != 0:
        _log(describe_log(log_path))
        raise subprocess.CalledProcessError(returncode, command)


def serve_flags(options: dict[str, Any]) -> list[str]:
    """Return engine arguments as flags of ``vllm serve``."""
    flags = []
    for key, value in options.items():
        flag = key.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
            continue
        text = json.dumps(value) if isinstance(value, dict | list) else str(value)
        flags += [f"--{flag}", text]
    return flags


def _model_pair(config: EvalConfig) -> ModelPair:
    if config.model == EMBEDDED:
        pair = embedded_pair(_log)
        if config.draft == EMBEDDED:
            return pair
        return ModelPair(pair.target, config.draft, pair.served_name, True)
    draft = str(embedded_draft()) if config.draft == EMBEDDED else config.draft
    return ModelPair(config.model, draft, config.model, is_embedded=config.offline)


def _load(args: argparse.Namespace) -> EvalConfig:
    overrides = {
        "model": args.model,
        "draft": args.draft,
        "backend": args.backend,
        "limit": args.limit,
        "dtype": args.dtype,
        "responses": args.responses,
        "tasks": args.tasks and args.tasks.split(","),
    }
    config = load(args.config, overrides)
    select_engines(config, args.engines and args.engines.split(","))
    return config


def _log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--output", type=Path, help="where to write the JSON")
    parser.add_argument(
        "--confirm-run-unsafe-code",
        "--confirm_run_unsafe_code",
        action="store_true",
        help="allow tasks that run code which the model wrote",
    )
    group = parser.add_argument_group("instead of what the configuration says")
    group.add_argument("--model")
    group.add_argument("--draft")
    group.add_argument("--backend", choices=BACKENDS)
    group.add_argument("--limit", type=int, help="items per task")
    group.add_argument("--dtype")
    group.add_argument("--responses", choices=RESPONSE_RULES)
    group.add_argument("--tasks", help="comma list")
    group.add_argument("--engines", help="comma list, ar is always there")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
