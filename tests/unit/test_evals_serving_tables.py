# SPDX-License-Identifier: Apache-2.0
"""What the serving benchmark makes of its rows: tables, plots and a page."""

import json
import math
import re
from collections import Counter
from html.parser import HTMLParser

import pytest
from evals_modules import EVALS
from serving_rows import load_evals, row, some_mixed_rows


@pytest.fixture(scope="module")
def evals():
    return load_evals()


@pytest.fixture
def mixed_rows():
    return some_mixed_rows()


@pytest.fixture
def rows():
    return [
        row("none", 10.0),
        row("tree-fixed", 30.0, length=3.0),
        row("chain", 20.0, length=2.0),
        row("tree-fixed", 26.0, length=3.2),
        row("none", 12.0),
        row("tree-fixed", 99.0, length=3.1),
        row("none", 40.0, concurrency=8),
        row("none", 9.0, temperature=1.0),
    ]


def test_medians_ratios_and_spread(evals, rows):
    cells = evals.table.medians(rows)
    assert list(cells) == [
        (0.0, 1, "none"),
        (0.0, 1, "chain"),
        (0.0, 1, "tree-fixed"),
        (0.0, 8, "none"),
        (1.0, 1, "none"),
    ]
    tree = cells[0.0, 1, "tree-fixed"]
    assert tree["output_throughput"] == 30
    assert tree["spec_decode_acceptance_length"] == 3.1
    assert tree["repeats"] == 3
    assert tree["spread"] == pytest.approx(99 / 26)
    cell = (0.0, 1, "tree-fixed")
    ratio = evals.table.ratio
    assert ratio(cells, cell, "chain", "output_throughput") == pytest.approx(1.5)
    assert ratio(cells, (0.0, 8, "none"), "chain", "output_throughput") is None


def test_markdown_has_a_line_for_each_load_and_server(evals, rows):
    lines = evals.table.markdown(rows).splitlines()
    assert len(lines) == 2 + 5
    assert len({line.count("|") for line in lines}) == 1
    assert "| 0 | 1 | tree-fixed | 30.0 | 33.33 |" in lines[4]
    assert "| 3.10 | 2.73 | 1.50 | 3 | 3.81 |" in lines[4]
    assert "| - |" in lines[2]


def test_automatic_trees_are_compared_within_each_repeat(evals, rows):
    assert evals.table.paired_rows(rows) == []
    speeds = {
        # The machine is half as fast in the second repeat.
        "tree-auto": [(0, 8.0), (1, 4.0), (2, 8.0)],
        "chain": [(0, 5.0), (1, 2.5), (2, 5.0)],
        # Ratios 1, 0.5 and 2: the lowest geometric mean.
        "tree-31": [(0, 8.0), (1, 8.0), (2, 4.0)],
        # Not measured in the last one, and once only.
        "tree-15": [(0, 5.0), (1, 2.5)],
        "none": [(1, 100.0)],
    }
    more = [
        row(name, speed, 1.0, 8, repeat=repeat)
        for name, measured in speeds.items()
        for repeat, speed in measured
    ]
    heading, line = evals.table.paired_rows([*rows, *more])
    assert heading[:4] == ["T", "concurrency", "best other", "tree-auto to it"]
    # The logarithms are 0 and -+log 2: standard error log 2 / sqrt 3.
    assert line == ["1", "8", "tree-31", "1.000", f"{math.log(2) / 3**0.5:.3f}", "3"]
    assert "| 1 | 8 | tree-31 | 1.000 | 0.400 | 3 |" in evals.table.markdown(more)


def test_mixed_medians_and_their_ratios(evals, mixed_rows):
    cells = evals.table.mixed_medians(mixed_rows)
    assert list(cells) == [
        (0.0, "ramp 2:128", "none"),
        (0.0, "ramp 2:128", "tree-16"),
        (0.0, "ramp 2:128", "tree-fixed"),
        (0.0, "ramp 2:128", "tree-auto"),
        (1.0, "ramp 2:128", "tree-auto"),
    ]
    tree = cells[0.0, "ramp 2:128", "tree-16"]
    assert (tree["mean_e2el_ms"], tree["output_throughput"]) == (220.0, 100.0)
    assert (tree["repeats"], tree["peak_in_flight"]) == (3, 40)
    assert tree["spread"] == pytest.approx(1.3)
    # The best differs by metric: low latencies are good, high speeds are.
    cell = (0.0, "ramp 2:128", "tree-auto")
    assert evals.table.best_fixed(cells, cell, "mean_e2el_ms") == "tree-16"
    assert evals.table.best_fixed(cells, cell, "output_throughput") == "tree-fixed"
    alone = (1.0, "ramp 2:128", "tree-auto")
    assert evals.table.best_fixed(cells, alone, "mean_e2el_ms") is None
    heading, *lines = evals.table.mixed_table_rows(mixed_rows)
    auto = dict(zip(heading, lines[3], strict=True))
    assert auto == {
        "T": "0",
        "load": "ramp 2:128",
        "server": "tree-auto",
        "E2E ms": "180.0",
        "E2E p99 ms": "540.0",
        "TPOT ms": "1.80",
        "tokens/s": "105.0",
        "most in flight": "40",
        "E2E to none": "0.30",
        "E2E to chain": "-",
        "E2E to best fixed": "0.82",
        "tokens/s to none": "1.17",
        "tokens/s to chain": "-",
        "tokens/s to best fixed": "0.95",
        "repeats": "1",
        "spread": "1.00",
    }
    assert lines[4].count("-") == 6


def test_mixed_loads_have_a_table_of_their_own(evals, rows, mixed_rows):
    table = evals.table
    both = [*mixed_rows, *rows]
    assert table.medians(both) == table.medians(rows)
    assert table.table_rows(both) == table.table_rows(rows)
    assert table.mixed_table_rows(rows) == []
    first, second = table.markdown(both).split("\n\n")
    assert first == table.markdown(rows)
    assert len(second.splitlines()) == 2 + 5
    assert len({line.count("|") for line in second.splitlines()}) == 1


def test_plots_are_written_as_png_and_svg(evals, rows, tmp_path):
    pytest.importorskip("matplotlib")
    paths = evals.plots.save({"run": rows}, tmp_path / "run")
    assert {path.name for path in paths} == {
        f"run_{metric}.{suffix}"
        for metric in (*evals.plots.PLOTS, "speedup")
        for suffix in ("png", "svg")
    }
    for path in paths:
        start = path.read_bytes()[:200]
        assert start.startswith(b"\x89PNG") or b"<?xml" in start


def test_plots_leave_mixed_loads_out(evals, rows, mixed_rows):
    pytest.importorskip("matplotlib")
    assert evals.plots.figures({"run": mixed_rows}) == {}
    made = evals.plots.figures({"run": [*rows, *mixed_rows]})
    labels = {line.get_label() for axis in made["speedup"].axes for line in axis.lines}
    assert labels == {"none", "chain", "tree-fixed"}


class Page(HTMLParser):
    """Tags of a page, its text, and whether what was opened was closed."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.open, self.words, self.links = Counter(), [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags[tag] += 1
        self.links += [v for k, v in attrs if k in {"src", "href", "xlink:href"}]
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.links += [v for k, v in attrs if k in {"src", "href", "xlink:href"}]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


PROVENANCE = {
    "date": "2026-01-01T00:00:00+00:00",
    "argv": ["script.py"],
    "git": "0" * 40,
    "device": "a device",
    "versions": {"vllm": "0.32.0"},
}


def test_page_compares_runs_and_loads_nothing(evals, rows, mixed_rows, tmp_path):
    pytest.importorskip("matplotlib")
    serving = {"kind": "serving", "provenance": PROVENANCE, "settings": {"repeats": 3}}
    difference = {"id": "item-7", "position": 2, "response": "a<b>", "baseline": "a\nc"}
    item = {"filter": "none", "scores": {"accuracy": 0.5}}
    engine = {"items": {"a_task": [item]}, "acceptance_length": 3.5}
    accuracy = {
        "kind": "lm_eval",
        "provenance": PROVENANCE,
        "results": {"ar": {**engine, "acceptance_length": None}, "tree": engine},
        "comparison": {
            "failures": ["tree, a_task: <wrong>"],
            "engines": {
                "tree": {
                    "a_task": {
                        "num_items": 1,
                        "different_responses": [difference],
                        "different_scores": [],
                    }
                }
            },
        },
    }
    # A file from before there were mixed loads, and one with them.
    for folder, found in (("before", rows), ("after", [*rows, *mixed_rows])):
        (tmp_path / folder).mkdir()
        text = json.dumps({**serving, "rows": found})
        (tmp_path / folder / "serving.local.json").write_text(text)
    (tmp_path / "accuracy.json").write_text(json.dumps(accuracy))
    paths = [
        tmp_path / "before/serving.local.json",
        tmp_path / "after/serving.local.json",
        tmp_path / "accuracy.json",
        EVALS / "results/acceptance_embedded_pair.json",
    ]
    names = evals.report.run_names(paths)
    assert names[:3] == ["before/serving", "after/serving", "accuracy"]
    text = evals.report.render(list(map(evals.report.load_run, paths, names)))
    page = Page(text)
    assert not page.open
    assert page.tags["svg"] == len(evals.plots.PLOTS) + 1
    # Provenance, two serving runs, a mixed load, accuracy, its differences, acceptance.
    assert page.tags["table"] == 7
    words = " ".join(page.words)
    for expected in (
        "before/serving",
        "item-7",
        "a<b>",
        "<wrong>",
        "tree 32",
        "ramp 2:128",
    ):
        assert expected in words
    assert all(link.startswith("#") for link in page.links)
    assert not re.search(r"@import|url\((?!#)", text)


def test_page_of_all_kept_results(evals):
    """The command of the docs: ``report.py evals/results/*.json``."""
    pytest.importorskip("matplotlib")
    paths = sorted((EVALS / "results").glob("*.json"))
    names = evals.report.run_names(paths)
    runs = list(map(evals.report.load_run, paths, names))
    kinds = {run.kind for run in runs}
    assert kinds == {"serving", "comparison", "calibration", "lm_eval", "acceptance"}
    comparison = next(run.data for run in runs if run.kind == "comparison")
    calibration = next(run.data for run in runs if run.kind == "calibration")
    page = Page(evals.report.render(runs))
    assert not page.open
    words = " ".join(page.words)
    assert all(name in words for name in names)
    assert comparison["sglang_versions"]["sglang-kernel"] in words
    assert "tokens/s to sglang-dflash" in words
    # One request, no drafts: a token a step.
    ms = {(batch, nodes): ms for batch, nodes, ms in calibration["step_ms"]}
    assert f" {1e3 / ms[1, 0]:.0f} " in words
    figure = evals.plots.figures({"all": comparison["rows"]})["speedup"]
    labels = {text.get_text() for text in figure.axes[0].get_legend().get_texts()}
    assert {"vllm-none", "sglang-dflash", "vllm-tree-auto"} <= labels


def test_page_refuses_other_files(evals, tmp_path):
    path = tmp_path / "other.json"
    path.write_text("[1]")
    with pytest.raises(ValueError, match="no result that this page can show"):
        evals.report.load_run(path, "other")
