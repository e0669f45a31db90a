# SPDX-License-Identifier: Apache-2.0
"""Configurations of the accuracy evaluation, and its item by item comparison."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

EVALS = Path(__file__).resolve().parents[2] / "evals"
CONFIGS = sorted((EVALS / "configs").glob("*.yaml"))
MINIMAL = {
    "model": "target",
    "draft": "draft",
    "tasks": ["task"],
    "engines": {"ar": None, "tree": {"ddtree": True}},
}


@pytest.fixture(scope="module")
def evals():
    sys.path.insert(0, str(EVALS))
    try:
        import run_lm_eval
        from accuracy import compare, config
    finally:
        sys.path.remove(str(EVALS))
    return SimpleNamespace(run_lm_eval=run_lm_eval, compare=compare, config=config)


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
