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
    found, number = evals.ties.partings(RESULTS, "tree 16")
    assert number == 3
    parting = evals.ties.Parting
    assert found == [parting("a", [1], 2, 8), parting("c", [], 6, 5)]
    assert evals.ties.partings(RESULTS, "no speculation") == ([], 3)
    model = Model()
    prompts = {"a": [100, 101], "c": [102]}
    gaps = list(evals.ties.gaps(model, prompts, found))
    assert model.asked == [[100, 101, 1], [102]]
    # Expected to said: 2 to 8 and 6 to 5, half a unit a token.
    assert [gap.parting for gap in gaps] == [-3.0, 0.5]
    assert [(gap.second, gap.tenth) for gap in gaps] == [(0.5, 4.5)] * 2
    table = evals.ties.markdown({"tree 16": (gaps, 3), "chain 15": ([], 3)})
    assert "| tree 16 | 2 of 3 | 1.750 | 3.000 | 0.500 | 4.500 |" in table
    assert "| chain 15 | 0 of 3 | - | - | - | - |" in table


def test_a_result_without_answers_is_named(evals, tmp_path, monkeypatch):
    path = tmp_path / "small.json"
    path.write_text("{}")
    monkeypatch.setattr(sys, "argv", ["tie_gaps.py", str(path)])
    with pytest.raises(SystemExit, match="has no answers"):
        evals.ties.main()


def test_the_small_form_has_what_tables_need(evals, tmp_path, monkeypatch):
    result = {"output_throughput": 5.0, "median_tpot_ms": 2.0, "itls": [1.0], "x": 1}
    row = {"server": "none", "command": "vllm bench serve", "result": result}
    report = {"kind": "serving", "provenance": {"git": "abc"}, "rows": [row]}
    source, kept = tmp_path / "a.json", tmp_path / "b.json"
    source.write_text(json.dumps(report))
    monkeypatch.setattr(sys, "argv", ["keep_result.py", str(source), str(kept)])
    assert evals.keep.main() == 0
    small = json.loads(kept.read_text())
    assert small["rows"][0]["result"] == {
        "output_throughput": 5.0,
        "median_tpot_ms": 2.0,
    }
    assert small["rows"][0]["command"] == row["command"]
    assert small["provenance"] == report["provenance"]
    acceptance = {"provenance": {}, "summary": {"a": 1}, "results": RESULTS}
    assert evals.keep.keep(acceptance) == {"provenance": {}, "summary": {"a": 1}}


def test_tables_can_be_made_of_the_small_form(evals):
    table = import_evals(table="serving.table").table
    wanted = {*table.METRICS, *table.MIXED_METRICS}
    assert wanted <= evals.keep.SERVING
