# SPDX-License-Identifier: Apache-2.0
"""Where answers part, by how much, and what of a result is kept."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch
from evals_modules import import_evals


@pytest.fixture(scope="module")
def evals():
    return import_evals(ties="tie_gaps", keep="keep_result")


RESULTS = {
    "no speculation": {
        "waves": {
            "0/chat": {"outputs": {"a": [1, 2, 3], "b": [4, 5]}},
            "0/code": {"outputs": {"c": [6, 7]}},
            # Drawn answers are another matter.
            "1/chat": {"outputs": {"a": [9]}},
        }
    },
    "tree 16": {
        "waves": {
            "0/chat": {"outputs": {"a": [1, 8, 3], "b": [4, 5]}},
            "0/code": {"outputs": {"c": [5, 7]}},
            "1/chat": {"outputs": {"a": [8]}},
        }
    },
}


class Model:
    """Scores tokens of a vocabulary of 12 by the length of what it is asked."""

    def __init__(self):
        self.asked: list[list[int]] = []

    def __call__(self, tokens, logits_to_keep):
        assert logits_to_keep == 1
        self.asked.append(tokens[0].tolist())
        logits = torch.arange(12.0) * 0.5
        return SimpleNamespace(logits=logits[None, None])


def test_partings_and_their_gaps(evals):
    prompts = {"a": [100, 101], "b": [103], "c": [102]}
    found = evals.ties.of_acceptance(RESULTS, prompts)
    parting = evals.ties.Parting
    partings = [parting([100, 101, 1], 2, 8), parting([102], 6, 5)]
    assert found == {"tree 16": evals.ties.Comparison(partings, 3, 0)}
    model = Model()
    gaps = list(evals.ties.gaps(model, partings))
    assert model.asked == [[100, 101, 1], [102]]
    # Expected to said: 2 to 8 and 6 to 5, half a unit a token.
    assert [gap.parting for gap in gaps] == [-3.0, 0.5]
    assert [(gap.second, gap.tenth) for gap in gaps] == [(0.5, 4.5)] * 2
    rows = {
        "tree 16": (gaps, evals.ties.Comparison(partings, 4, 1)),
        "chain 15": ([], evals.ties.Comparison([], 3)),
    }
    table = evals.ties.markdown(rows)
    assert "| tree 16 | 3 of 4 | 1 | 1 of 2 | 1.750 | 3.000 | 0.500 | 4.500 |" in table
    assert "| chain 15 | 0 of 3 | 0 | - | - | - | - | - |" in table


def test_servers_beside_their_references(evals):
    def answer(tokens):
        return {"prompt_ids": [100], "token_ids": tokens}

    answers = {
        "vllm-none": [answer([1, 2]), answer([3, 4]), answer([5])],
        "sglang-none": [answer([1, 2]), answer([3]), answer([6])],
        "sglang-dflash": [answer([1, 7]), answer([3]), answer([6])],
    }
    pairs = [("sglang-none", "vllm-none"), ("sglang-dflash", "sglang-none")]
    agreement = [{"server": s, "reference": r} for s, r in pairs]
    found = evals.ties.of_servers({"answers": answers, "agreement": agreement})
    parting = evals.ties.Parting
    assert found == {
        # The second answer of one ends where the other goes on.
        "sglang-none to vllm-none": evals.ties.Comparison([parting([100], 5, 6)], 3, 1),
        "sglang-dflash to sglang-none": evals.ties.Comparison(
            [parting([100, 1], 2, 7)], 3, 0
        ),
    }


def test_a_result_without_answers_is_named(evals, tmp_path, monkeypatch):
    path = tmp_path / "small.json"
    path.write_text("{}")
    monkeypatch.setattr(sys, "argv", ["tie_gaps.py", str(path)])
    with pytest.raises(SystemExit, match="has no answers"):
        evals.ties.main()


def test_answers_of_another_target_are_refused(evals, tmp_path, monkeypatch):
    path = tmp_path / "sglang.json"
    answers = {"vllm-none": [{"prompt_ids": [1], "token_ids": [2]}]}
    report = {"answers": answers, "settings": {"model": "/models/Other-8B"}}
    path.write_text(json.dumps(report))
    monkeypatch.setattr(sys, "argv", ["tie_gaps.py", str(path)])
    pair = SimpleNamespace(served_name="SmolLM2", target="/nowhere")
    monkeypatch.setattr(evals.ties, "embedded_pair", lambda log: pair)
    with pytest.raises(SystemExit, match="of /models/Other-8B; type --model"):
        evals.ties.main()


def test_the_small_form_has_what_tables_need(evals, tmp_path, monkeypatch):
    result = {"output_throughput": 5.0, "median_tpot_ms": 2.0, "itls": [1.0], "x": 1}
    command = "vllm bench serve --endpoint /v1/x --model /root/.cache/a/SmolLM2 --y z"
    row = {"server": "none", "command": command, "result": result}
    report = {"kind": "serving", "provenance": {"git": "abc"}, "rows": [row]}
    # Those of `compare_sglang.py`.
    report["answers"] = {"vllm-none": [{"token_ids": [1]}]}
    source, kept = tmp_path / "a.json", tmp_path / "b.json"
    source.write_text(json.dumps(report))
    monkeypatch.setattr(sys, "argv", ["keep_result.py", str(source), str(kept)])
    assert evals.keep.main() == 0
    small = json.loads(kept.read_text())
    assert small["rows"][0]["result"] == {
        "output_throughput": 5.0,
        "median_tpot_ms": 2.0,
    }
    # Without the folders of the machine.
    kept_command = "vllm bench serve --endpoint /v1/x --model SmolLM2 --y z"
    assert small["rows"][0]["command"] == kept_command
    assert small["provenance"] == report["provenance"]
    assert "answers" not in small
    acceptance = {"provenance": {}, "summary": {"a": 1}, "results": RESULTS}
    assert evals.keep.keep(acceptance) == {"provenance": {}, "summary": {"a": 1}}


def test_the_small_form_of_accuracy_has_means_and_names(evals):
    def items(*values):
        return [{"filter": "none", "scores": {"accuracy": v}} for v in values]

    differs = [{"id": "b", "position": 3, "response": "x", "baseline": "y"}]
    found = {"num_items": 2, "different_responses": differs, "different_scores": []}
    report = {
        "kind": "lm_eval",
        "results": {
            "ar": {"items": {"task": items(1.0, 0.0)}, "acceptance_length": None},
            "tree": {"items": {"task": items(1.0, 1.0)}, "acceptance_length": 4.5},
        },
        "comparison": {"engines": {"tree": {"task": found}}, "failures": ["one"]},
    }
    small = evals.keep.keep(report)
    assert "results" not in small and evals.keep.keep(small) == small
    assert small["means"] == {
        "ar": {"tokens_per_step": None, "scores": {"task": {"accuracy": 0.5}}},
        "tree": {"tokens_per_step": 4.5, "scores": {"task": {"accuracy": 1.0}}},
    }
    kept = {"num_items": 2, "different_responses": ["b"], "different_scores": []}
    assert small["comparison"] == {
        "engines": {"tree": {"task": kept}},
        "failures": ["one"],
    }


def test_tables_can_be_made_of_the_small_form(evals):
    table = import_evals(table="serving.table").table
    wanted = {*table.METRICS, *table.MIXED_METRICS}
    assert wanted <= evals.keep.SERVING
