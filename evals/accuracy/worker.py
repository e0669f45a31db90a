# SPDX-License-Identifier: Apache-2.0
"""Evaluates one engine with lm-eval; runs in a process of its own.

python evals/accuracy/worker.py JOB.json RESULT.json
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

TASKS = Path(__file__).resolve().parent.parent / "tasks"
LOCAL_PREFIX = "local_"


def main() -> None:
    job_path, result_path = map(Path, sys.argv[1:])
    job = json.loads(job_path.read_text(encoding="utf-8"))
    result = evaluate(make_model(job), job)
    result_path.write_text(json.dumps(result), encoding="utf-8")


def make_model(job: dict[str, Any]) -> Any:
    """Return lm-eval's model of a job: an engine in this process, or a client."""
    # Only here, so that everything else works without lm-eval.
    from lm_eval.api.registry import get_model

    # A dict, since the k=v,... string can't carry a nested speculative_config.
    return get_model(job["backend"]).create_from_arg_obj(job["model_args"])


def evaluate(model: Any, job: dict[str, Any]) -> dict[str, Any]:
    """Run the tasks of a job and return its items and the engine's counters."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    needs_others = not all(name.startswith(LOCAL_PREFIX) for name in job["tasks"])
    manager = TaskManager(include_path=str(TASKS), include_defaults=needs_others)
    limit_tokens = job["max_new_tokens"]
    started = time.perf_counter()
    output = simple_evaluate(
        model=model,
        tasks=job["tasks"],
        num_fewshot=job["num_fewshot"],
        limit=job["limit"],
        apply_chat_template=job["apply_chat_template"],
        gen_kwargs={"max_gen_toks": limit_tokens} if limit_tokens else None,
        task_manager=manager,
        log_samples=True,
        bootstrap_iters=0,
        confirm_run_unsafe_code=job["confirm_run_unsafe_code"],
    )
    return {
        "duration_s": time.perf_counter() - started,
        "items": {
            task: [_item(sample) for sample in samples]
            for task, samples in output["samples"].items()
        },
        "counters": _counters(model),
    }


def _item(sample: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": sample["doc"].get("id", sample["doc_id"]),
        "filter": sample["filter"],
        "prompt_hash": sample["prompt_hash"],
        "responses": sample["resps"],
        "scores": {metric: _plain(sample[metric]) for metric in sample["metrics"]},
    }


def _plain(value: Any) -> Any:
    """A score as JSON has it; some tasks return tuples of counts or flags."""
    if hasattr(value, "item"):
        return value.item()
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return value if isinstance(value, str | int | float | None) else repr(value)


def _counters(model: Any) -> dict[str, float] | None:
    """An in-process engine's counters, named as in ``/metrics``; else None."""
    engine = getattr(model, "model", None)
    if not hasattr(engine, "get_metrics"):
        return None
    return {
        f"{metric.name}_total": metric.value
        for metric in engine.get_metrics()
        if metric.name.startswith("vllm:spec_decode_num_") and hasattr(metric, "value")
    }


if __name__ == "__main__":
    main()
