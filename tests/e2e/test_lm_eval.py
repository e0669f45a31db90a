# SPDX-License-Identifier: Apache-2.0
"""lm-eval on engines with and without trees: same items, same answers."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest
from engines import TREE_BUDGET, gpu_memory
from evals_modules import EVALS, import_evals
from tiny_models import write_draft, write_target
from tiny_tokenizer import write_tokenizer

from vllm_dflash.demo.convert import ConversionError
from vllm_dflash.demo.fetch import FetchError
from vllm_dflash.demo.pair import embedded_pair

pytest.importorskip("lm_eval", reason="needs the extra eval")

pytestmark = pytest.mark.e2e

TASKS = ["local_copying", "local_python_functions"]


@pytest.fixture(scope="module")
def evals():
    return import_evals(
        compare="accuracy.compare", config="accuracy.config", worker="accuracy.worker"
    )


@pytest.fixture(scope="module")
def targets(tmp_path_factory) -> list[str]:
    """Two tiny targets with a tokenizer, different weights."""
    paths = []
    for seed in (0, 3):
        path = tmp_path_factory.mktemp(f"target{seed}")
        write_target(path, seed=seed)
        write_tokenizer(str(path))
        paths.append(str(path))
    return paths


def evaluate(
    evals: Any, target: str, speculative_config: dict[str, Any] | None
) -> dict[str, Any]:
    from vllm.distributed import cleanup_dist_env_and_memory

    from vllm_dflash.attention.registry import remove_tree_backends

    model_args: dict[str, Any] = {
        "pretrained": target,
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 1024,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 1024,
        "num_gpu_blocks_override": 256,
        "block_size": 32,
        "disable_log_stats": False,
        **gpu_memory(),
    }
    if speculative_config is not None:
        model_args["speculative_config"] = speculative_config
    options = {
        "backend": "vllm",
        "model_args": model_args,
        "tasks": TASKS,
        "num_fewshot": 1,
        "limit": 2,
        "apply_chat_template": False,
        "max_new_tokens": 12,
        "confirm_run_unsafe_code": True,
    }
    model = evals.worker.make_model(options)
    try:
        result = evals.worker.evaluate(model, options)
    finally:
        model.model.llm_engine.engine_core.shutdown()
        del model
        remove_tree_backends()
        cleanup_dist_env_and_memory()
    return {**result, "acceptance_length": None}


def test_tree_answers_every_item_as_without_speculation(
    evals, targets, tmp_path, monkeypatch
):
    # The tasks are found from any working directory, and without a network.
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    draft = write_draft(tmp_path / "draft")
    tree_config = {
        "method": "dflash",
        "model": draft,
        "ddtree": {"budget": TREE_BUDGET},
    }
    found = {
        "ar": evaluate(evals, targets[0], None),
        "tree": evaluate(evals, targets[0], tree_config),
    }
    config = evals.config.EvalConfig(
        model=targets[0],
        draft=draft,
        tasks=TASKS,
        engines={"ar": None, "tree": {}},
        responses="equal",
    )
    comparison = evals.compare.check(config, found)
    assert comparison["failures"] == []
    counts = {task: len(items) for task, items in found["tree"]["items"].items()}
    assert counts == dict.fromkeys(TASKS, 2)
    rows = comparison["engines"]["tree"].values()
    assert [row["num_texts"] for row in rows] == [2, 2]
    assert found["tree"]["counters"]["vllm:spec_decode_num_drafts_total"] > 0
    # Another target's answers must be told apart, or the comparison proves nothing.
    found["tree"] = evaluate(evals, targets[1], None)
    failures = evals.compare.check(config, found)["failures"]
    assert len(failures) >= 4


def test_script_compares_chain_and_tree_of_tiny_models(targets, tmp_path):
    """`evals/run_lm_eval.py` itself, as one types it."""
    draft = write_draft(tmp_path / "draft")
    config = {
        "model": targets[0],
        "draft": draft,
        "tasks": TASKS[:1],
        "engines": {
            "ar": None,
            "chain": {"ddtree": False},
            "tree": {"ddtree": {"budget": TREE_BUDGET}},
        },
        "dtype": "float32",
        "limit": 2,
        "num_fewshot": 1,
        "apply_chat_template": False,
        "max_new_tokens": 12,
        "offline": True,
        "engine_args": {
            "max_model_len": 1024,
            "max_num_seqs": 4,
            "num_gpu_blocks_override": 256,
            **gpu_memory(),
        },
        "responses": "equal",
    }
    path, output = tmp_path / "tiny.yaml", tmp_path / "result.json"
    # JSON is YAML.
    path.write_text(json.dumps(config))
    command = [sys.executable, str(EVALS / "run_lm_eval.py"), "--config", str(path)]
    result = subprocess.run(
        [*command, "--output", str(output)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    report = json.loads(output.read_text())
    assert report["comparison"]["failures"] == []
    lengths = {k: v["acceptance_length"] for k, v in report["results"].items()}
    assert lengths.pop("ar") is None
    # A random draft is hardly ever right.
    assert set(lengths) == {"chain", "tree"} and min(lengths.values()) >= 1
    items = {k: v["items"][TASKS[0]] for k, v in report["results"].items()}
    assert [len(each) for each in items.values()] == [2, 2, 2]
    for name in lengths:
        assert report["comparison"]["engines"][name][TASKS[0]]["num_texts"] == 2
        assert name in result.stdout


def test_code_is_not_run_without_consent(evals):
    job = {
        # lm-eval's stand-in for a model.
        "backend": "dummy",
        "model_args": {},
        "tasks": ["local_python_functions"],
        "num_fewshot": 1,
        "limit": 1,
        "apply_chat_template": False,
        "max_new_tokens": 4,
        "confirm_run_unsafe_code": False,
    }
    with pytest.raises(ValueError, match="unsafe"):
        evals.worker.evaluate(evals.worker.make_model(job), job)
    job["confirm_run_unsafe_code"] = True
    result = evals.worker.evaluate(evals.worker.make_model(job), job)
    assert len(result["items"]["local_python_functions"]) == 1


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["vllm", "local-completions"])
def test_embedded_pair_answers_local_tasks_alike(tmp_path, backend):
    try:
        embedded_pair(print)
    except (FetchError, ConversionError) as error:
        pytest.skip(f"the embedded pair's target can't be had: {error}")
    output = tmp_path / "result.json"
    command = [sys.executable, str(EVALS / "run_lm_eval.py"), "--backend", backend]
    command += ["--config", str(EVALS / "configs" / "local_cpu.yaml"), "--limit", "4"]
    command += ["--confirm-run-unsafe-code", "--output", str(output)]
    env = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    result = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, env=env, check=False
    )
    assert result.returncode == 0, result.stderr[-3000:]
    report = json.loads(output.read_text())
    assert report["comparison"]["failures"] == []
    lengths = {k: v["acceptance_length"] for k, v in report["results"].items()}
    assert lengths["ar"] is None
    assert lengths["tree"] > lengths["chain"] > 1
    for task, rows in report["comparison"]["engines"]["tree"].items():
        assert rows["num_texts"] == 4, task
    items = report["results"]["tree"]["items"]["local_json_extraction"]
    assert any(item["scores"]["fields"] > 0 for item in items)
    assert report["provenance"]["versions"]["lm-eval"]
