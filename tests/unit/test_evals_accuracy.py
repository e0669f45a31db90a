# SPDX-License-Identifier: Apache-2.0
"""Configurations of the accuracy evaluation, and its item by item comparison."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from evals_modules import EVALS, import_evals

from vllm_dflash.demo.pair import ModelPair

CONFIGS = sorted((EVALS / "configs").glob("*.yaml"))
MINIMAL = {
    "model": "target",
    "draft": "draft",
    "tasks": ["task"],
    "engines": {"ar": None, "tree": {"ddtree": True}},
}


@pytest.fixture(scope="module")
def evals():
    return import_evals(
        run_lm_eval="run_lm_eval",
        compare="accuracy.compare",
        config="accuracy.config",
    )


def load(evals, tmp_path, **values):
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({**MINIMAL, **values}))
    return evals.config.load(path, {})


def item(name, response, accuracy=1.0, **extra):
    base = {"filter": "none", "prompt_hash": name, "scores": {"accuracy": accuracy}}
    return {**base, "id": name, "responses": [[response]], **extra}


def results(**engines):
    return {
        name: {"items": {"task": items}, "acceptance_length": None}
        for name, items in engines.items()
    }


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_shipped_configurations_are_valid(evals, path):
    config = evals.config.load(path, {})
    assert list(config.engines) == ["ar", "chain", "tree"]
    assert config.engines["chain"]["ddtree"] is False
    local = [name for name in config.tasks if name.startswith("local_")]
    files = {f"local_{path.stem}" for path in (EVALS / "tasks").glob("*.yaml")}
    assert set(local) <= files
    assert config.offline == (local == config.tasks)


def test_local_configurations_cover_every_local_task(evals):
    files = {f"local_{path.stem}" for path in (EVALS / "tasks").glob("*.yaml")}
    for name in ("local_cpu", "local_gpu", "local_gpu_fp32"):
        config = evals.config.load(EVALS / "configs" / f"{name}.yaml", {})
        assert set(config.tasks) == files


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"task": []}, r"unknown keys: \['task'\].*Allowed are"),
        ({"backend": "hf"}, "'backend' is 'hf'.*local-completions.*Type"),
        ({"responses": "exact"}, "'responses' is 'exact'.*equal"),
        ({"tasks": []}, "'tasks' is empty"),
        ({"engines": {"tree": {}}}, "no 'ar' without speculation"),
        ({"engines": {"ar": {"ddtree": True}}}, "no 'ar' without speculation"),
        ({"min_scores": {"other": {"a": 1}}}, r"not evaluated: \['other'\]"),
    ],
)
def test_bad_configuration_is_named(evals, tmp_path, values, message):
    with pytest.raises(ValueError, match=message):
        load(evals, tmp_path, **values)


def test_missing_key_is_named(evals, tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("model: a\ndraft: b\ntasks: [c]\n")
    with pytest.raises(ValueError, match=r"lacks \['engines'\]"):
        evals.config.load(path, {})


def test_command_line_wins_and_keeps_the_baseline(evals, tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({**MINIMAL, "limit": 3}))
    config = evals.config.load(path, {"limit": 5, "model": None})
    assert (config.limit, config.model) == (5, "target")
    config.engines = {"ar": None, "chain": {}, "tree": {}}
    evals.config.select_engines(config, ["tree"])
    assert list(config.engines) == ["ar", "tree"]
    with pytest.raises(ValueError, match="'best'"):
        evals.config.select_engines(config, ["best"])


def test_equal_responses_hold(evals, tmp_path):
    config = load(evals, tmp_path, responses="equal")
    same = [item("a", "x"), item("b", "y", 0.0)]
    comparison = evals.compare.check(config, results(ar=same, tree=same))
    assert comparison["failures"] == []
    table = evals.compare.format_table(results(ar=same, tree=same), comparison)
    assert "| tree | task | accuracy 0.500 | 2 | 0 | 0 | - |" in table


def test_a_different_response_fails_even_with_the_same_score(evals, tmp_path):
    config = load(evals, tmp_path, responses="equal")
    found = results(ar=[item("a", "same x")], tree=[item("a", "same y")])
    assert evals.compare.check(config, found)["failures"] == [
        "tree, task, item a: the response differs at character 5"
    ]


def test_scores_that_swap_fail_although_the_mean_is_equal(evals, tmp_path):
    config = load(evals, tmp_path, responses="equal")
    found = results(
        ar=[item("a", "x", 1.0), item("b", "y", 0.0)],
        tree=[item("a", "x", 0.0), item("b", "y", 1.0)],
    )
    failures = evals.compare.check(config, found)["failures"]
    assert [line.split(":")[0] for line in failures] == [
        "tree, task, item a",
        "tree, task, item b",
    ]


@pytest.mark.parametrize(
    ("allowed", "fails"),
    [(0.5, False), (0.49, True), ({"task": 0.5}, False), ({"default": 0.1}, True)],
)
def test_report_mode_lists_and_only_the_mean_decides(evals, tmp_path, allowed, fails):
    config = load(evals, tmp_path, max_mean_difference=allowed)
    found = results(
        ar=[item("a", "x"), item("b", "y")],
        tree=[item("a", "z", 0.0), item("b", "y")],
    )
    comparison = evals.compare.check(config, found)
    assert len(comparison["engines"]["tree"]["task"]["different_responses"]) == 1
    assert bool(comparison["failures"]) == fails


def test_floor_holds_for_the_baseline_too(evals, tmp_path):
    config = load(evals, tmp_path, min_scores={"task": {"accuracy": 0.6}})
    low = [item("a", "x"), item("b", "y", 0.0)]
    failures = evals.compare.check(config, results(ar=low, tree=low))["failures"]
    assert [line.split(",")[0] for line in failures] == ["ar", "tree"]
    config = load(evals, tmp_path, min_scores={"task": {"no_such": 0.6}})
    failures = evals.compare.check(config, results(ar=low))["failures"]
    assert "no metric no_such" in failures[0]


def test_log_probabilities_count_by_their_scores_only(evals, tmp_path):
    config = load(evals, tmp_path, responses="equal")
    ours = item("a", None, responses=[[[-1.25, True]]])
    theirs = item("a", None, responses=[[[-1.26, True]]])
    found = results(ar=[theirs], tree=[ours])
    comparison = evals.compare.check(config, found)
    assert comparison["failures"] == []
    # Nothing was compared as text, and the table says so.
    assert "| 1 | - | 0 |" in evals.compare.format_table(found, comparison)


def test_engines_must_have_had_the_same_items(evals, tmp_path):
    config = load(evals, tmp_path)
    found = results(ar=[item("a", "x")], tree=[item("b", "x")])
    with pytest.raises(RuntimeError, match="different items"):
        evals.compare.check(config, found)


def evaluation(evals, tmp_path, monkeypatch, **values):
    """An evaluation whose worker writes down what it gets."""
    run_lm_eval = evals.run_lm_eval
    monkeypatch.setenv("HF_ALLOW_CODE_EVAL", "0")
    started = {}

    def run_process(command, env, log_path):
        job_path, result_path = map(Path, command[-2:])
        started.update(env=env, log=log_path.name, job=json.loads(job_path.read_text()))
        result_path.write_text('{"items": {}, "counters": {}}')

    monkeypatch.setattr(run_lm_eval, "_run_process", run_process)
    made = run_lm_eval.Evaluation(
        config=load(evals, tmp_path, dtype="float32", **values),
        pair=ModelPair("/target", "/draft", "name", is_embedded=True),
        is_cpu=True,
        name="tree",
        speculative_config={"method": "dflash"},
        job={"tasks": ["task"], "confirm_run_unsafe_code": False},
        log_dir=tmp_path,
    )
    return made, started


def test_offline_worker_gets_the_engine(evals, tmp_path, monkeypatch):
    engine_args = {"max_num_seqs": 4}
    made, started = evaluation(evals, tmp_path, monkeypatch, engine_args=engine_args)
    assert made.run() == {"items": {}, "counters": {}}
    assert started["job"] == {
        "tasks": ["task"],
        "confirm_run_unsafe_code": False,
        "model_args": {
            "pretrained": "/target",
            "dtype": "float32",
            "disable_log_stats": False,
            "max_num_seqs": 4,
            "enforce_eager": True,
            "speculative_config": {"method": "dflash"},
        },
    }
    assert started["log"] == "tree.log"
    assert started["env"]["VLLM_DFLASH_CPU"] == "1"
    assert started["env"]["HF_ALLOW_CODE_EVAL"] == "0"
    # fp32 answers must be equal.
    assert started["env"]["TRITON_F32_DEFAULT"] == "ieee"


@pytest.mark.parametrize("route", ["completions", "chat-completions"])
def test_worker_asks_a_server_that_has_the_engine(evals, tmp_path, monkeypatch, route):
    made, started = evaluation(
        evals,
        tmp_path,
        monkeypatch,
        backend=f"local-{route}",
        engine_args={"max_model_len": 512, "max_num_seqs": 4},
    )
    specs = []

    class Server:
        def __init__(self, spec, log_path, log):
            specs.append((spec, log_path.name))
            counts = iter([{"drafts": 2}, {"drafts": 9, "accepted": 4}])
            self.client = SimpleNamespace(
                base_url="http://127.0.0.1:1", counters=lambda: next(counts)
            )

        def __enter__(self):
            return self

        def __exit__(self, *exc):
            pass

    monkeypatch.setattr(evals.run_lm_eval, "VLLMServer", Server)
    assert made.run()["counters"] == {"drafts": 7, "accepted": 4}
    [(spec, log_name)] = specs
    assert (spec.label, log_name) == ("tree", "tree-server.log")
    assert spec.max_model_len == 512
    assert spec.variables == {"TRITON_F32_DEFAULT": "ieee"}
    assert spec.speculative_config == {"method": "dflash"}
    assert spec.extra_args == ["--dtype", "float32", "--max-num-seqs", "4"]
    model_args = started["job"]["model_args"]
    path = route.replace("-", "/")
    assert model_args["base_url"] == f"http://127.0.0.1:1/v1/{path}"
    assert model_args["max_length"] == 512
    assert ("tokenizer" in model_args) == (route == "completions")
    assert "speculative_config" not in model_args


def test_engine_arguments_become_flags(evals):
    flags = evals.run_lm_eval.serve_flags(
        {"max_num_seqs": 8, "enforce_eager": True, "enable_prefix_caching": False}
        | {"compilation_config": {"mode": 0}}
    )
    assert flags == [
        "--max-num-seqs",
        "8",
        "--enforce-eager",
        "--no-enable-prefix-caching",
        "--compilation-config",
        '{"mode": 0}',
    ]
