# SPDX-License-Identifier: Apache-2.0
"""The metrics themselves: names, docs, dashboard, counting, the periodic lines."""

import inspect
import json
import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from vllm.v1.spec_decode.metrics import SpecDecodingLogging, SpecDecodingStats

from vllm_dflash.metrics import canary as canary_module
from vllm_dflash.metrics.canary import CANARY_ROUNDS, AcceptanceCanary
from vllm_dflash.metrics.definitions import METRICS, render_markdown
from vllm_dflash.metrics.log_line import TreeSpecDecodingLogging, format_widths
from vllm_dflash.metrics.step_counts import StepCounts, exact_counts

ROOT = Path(__file__).resolve().parents[2]
DASHBOARD = ROOT / "dashboards" / "grafana-vllm-dflash.json"
METRIC = re.compile(r"\bvllm(?:_dflash)?:\w+")
DEPTH = 4


def test_docs_have_the_table_of_the_code():
    assert render_markdown() in (ROOT / "docs/metrics.md").read_text(encoding="utf-8")


def test_docs_name_no_other_metric_of_ours():
    text = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
    known = {name for spec in METRICS for name in (spec.name, *spec.samples)}
    named = set(re.findall(r"vllm_dflash:\w+", text))
    assert named - known == set()


@pytest.mark.parametrize("spec", METRICS, ids=lambda spec: spec.name)
def test_names_are_not_taken_for_vllms(spec):
    # vLLM drops collectors that start with `vllm:`; its benchmark sums lines that do.
    assert re.fullmatch(r"vllm_dflash:[a-z_]+", spec.name)
    assert not spec.name.endswith(("_total", "_count", "_sum", "_bucket"))
    assert spec.unit not in {"seconds"} or spec.name.endswith("_seconds")


def _dashboard_expressions() -> list[str]:
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    queries = [
        target["expr"]
        for panel in dashboard["panels"]
        for target in panel.get("targets", ())
    ]
    queries += [
        variable["definition"]
        for variable in dashboard["templating"]["list"]
        if variable["type"] == "query"
    ]
    return queries


def _names_of_vllm() -> set[str]:
    """Every metric name in vLLM's sources, with the suffixes its type may add."""
    import vllm.v1.metrics.loggers
    import vllm.v1.spec_decode.metrics

    modules = (vllm.v1.metrics.loggers, vllm.v1.spec_decode.metrics)
    bases = set()
    for module in modules:
        bases |= set(re.findall(r'"(vllm:\w+)"', inspect.getsource(module)))
    suffixes = ("", "_total", "_bucket", "_sum", "_count")
    return {base + suffix for base in bases for suffix in suffixes}


def test_dashboard_asks_only_for_metrics_that_exist():
    asked = {name for text in _dashboard_expressions() for name in METRIC.findall(text)}
    ours = {name for spec in METRICS for name in spec.samples}
    assert asked - ours - _names_of_vllm() == set()


def test_dashboard_shows_every_metric_of_ours_and_vllms_speed():
    text = " ".join(_dashboard_expressions())
    missing = [
        spec.name for spec in METRICS if not any(s in text for s in spec.samples)
    ]
    assert not missing
    assert "vllm:request_time_per_output_token_seconds_bucket" in text
    assert "vllm:generation_tokens_total" in text


def test_dashboard_can_be_imported():
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    assert dashboard["id"] is None and dashboard["title"]
    assert dashboard["schemaVersion"] >= 38
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
    variables = {item["name"]: item for item in dashboard["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    assert variables["datasource"]["query"] == "prometheus"
    cells = Counter()
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells.update(
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        )
        for target in panel.get("targets", ()):
            assert target["datasource"]["uid"] == "${datasource}"
            assert target["expr"].count("(") == target["expr"].count(")")
            used = set(re.findall(r"\$(\w+)", target["expr"])) - {"__rate_interval"}
            assert used <= set(variables)
    assert max(cells.values()) == 1, "panels overlap"


@pytest.mark.parametrize(
    ("total", "at_least", "expected"),
    [
        (5, [5, 3, 3, 0], {1: 2, 3: 3}),
        (4, [0, 0], {0: 4}),
        (3, [3, 3], {2: 3}),
        (6, [4, 1], {0: 2, 1: 3, 2: 1}),
        (0, [0], {}),
        (2, [], {0: 2}),
    ],
)
def test_exact_counts(total, at_least, expected):
    assert dict(exact_counts(total, at_least)) == expected


def stats_of(rounds, num_positions):
    """vLLM's statistics of (nodes, accepted) pairs."""
    stats = SpecDecodingStats.new(num_positions)
    for nodes, accepted in rounds:
        stats.observe_draft(nodes, accepted)
    return stats


ROUNDS = [(16, 3), (16, 0), (5, 1), (2, 2), (16, 4)]


def test_step_counts_hold_the_distribution_of_widths_and_lengths():
    counts = StepCounts.of(stats_of(ROUNDS, 16), DEPTH)
    assert counts.rounds == 5 and counts.nodes == 55 and counts.accepted == 10
    assert counts.accepted_by_depth == [4, 3, 2, 1]
    assert counts.lengths == {1: 1, 2: 1, 3: 1, 4: 1, 5: 1}
    assert counts.widths == {17: 3, 6: 1, 3: 1}
    # A tree of two nodes reaches at most depth 2.
    assert counts.depth_slots == 4 + 4 + 4 + 2 + 4


def lines_of(logging_class, stats):
    lines = []
    log = logging_class
    for each in stats:
        log.observe(each)
    log.log(log_fn=lambda text, *args: lines.append(text % args))
    return lines


def test_periodic_line_counts_depths_and_a_line_of_ours_follows():
    stats = [stats_of(ROUNDS[:2], 16), stats_of(ROUNDS[2:], 16)]
    vllms, ours = lines_of(TreeSpecDecodingLogging(DEPTH), stats)
    assert "Mean acceptance length: 3.00," in vllms
    assert "Per-position acceptance rate: 0.800, 0.600, 0.400, 0.200," in vllms
    assert vllms.endswith("Avg Draft acceptance rate: 55.6%")
    assert "Accepted: 10 tokens, Drafted: 18 tokens" in vllms
    assert ours == (
        "DDTree metrics: Mean acceptance length: 3.00, Mean nodes per round: 11.0, "
        "Rounds: 5, Verify width: 17 rows (60%), 3 rows (20%), 6 rows (20%)"
    )


def test_vllms_own_line_would_count_nodes():
    """The day this fails the replacement is not needed as it is."""
    [line] = lines_of(SpecDecodingLogging(), [stats_of(ROUNDS, 16)])
    rates = re.search(r"Per-position acceptance rate: ([\d., ]+), Avg", line)[1]
    assert len(rates.split(",")) == 16
    assert line.endswith("Avg Draft acceptance rate: 18.2%")


def test_a_chain_of_the_depth_gets_vllms_line_unchanged():
    stats = [stats_of([(DEPTH, 2), (DEPTH, 4), (DEPTH, 0)], DEPTH)]
    tree = lines_of(TreeSpecDecodingLogging(DEPTH), stats)[0]
    chain = lines_of(SpecDecodingLogging(), stats)[0]
    drop = re.compile(r"\w+ throughput: [\d.]+ tokens/s, ")
    assert drop.sub("", tree) == drop.sub("", chain)


def test_lines_start_again_after_each_log_and_are_silent_without_rounds():
    log = TreeSpecDecodingLogging(DEPTH)
    assert lines_of(log, []) == []
    lines_of(log, [stats_of(ROUNDS, 16)])
    assert lines_of(log, []) == []
    [_, ours] = lines_of(log, [stats_of([(16, 0)], 16)])
    assert "Rounds: 1, Verify width: 17 rows (100%)" in ours


def test_rare_widths_are_summed_up():
    widths = {48: 90, 32: 4, 16: 3, 8: 2, 4: 1}
    assert format_widths(widths) == (
        "48 rows (90%), 32 rows (4%), 16 rows (3%), 8 rows (2%), others (1%)"
    )


@pytest.fixture
def warnings(monkeypatch):
    seen = []
    monkeypatch.setattr(
        canary_module,
        "logger",
        SimpleNamespace(warning=lambda text, *args: seen.append(text % args)),
    )
    return seen


def test_canary_warns_once_and_says_what_to_do(warnings):
    canary = AcceptanceCanary("some/draft", "some/target")
    for _ in range(CANARY_ROUNDS - 1):
        canary.observe(1, 0)
    assert not warnings
    for _ in range(3 * CANARY_ROUNDS):
        canary.observe(1, 0)
    [text] = warnings
    for words in ("1.00", "some/draft", "some/target", "chat template", "type VLLM_"):
        assert words in text


@pytest.mark.parametrize(
    ("accepted", "warned"), [(0, 1), (19, 1), (20, 0), (40, 0), (600, 0)]
)
def test_canary_draws_the_line_at_a_tenth_of_a_token(warnings, accepted, warned):
    canary = AcceptanceCanary("draft", "target")
    canary.observe(CANARY_ROUNDS // 2, accepted)
    canary.observe(CANARY_ROUNDS - CANARY_ROUNDS // 2, 0)
    # It looked at the start; a bad hour later is not about the pair.
    canary.observe(10 * CANARY_ROUNDS, 0)
    assert len(warnings) == warned


def test_command_named_by_the_canary_exists(warnings):
    from vllm_dflash import envs
    from vllm_dflash.cli import main

    canary = AcceptanceCanary("draft", "target")
    canary.observe(CANARY_ROUNDS, 0)
    [text] = warnings
    variable = re.search(r"type (VLLM_\w+)=", text)[1]
    assert variable in envs.environment_variables
    command = re.search(r"`vllm-dflash ([^`]+)`", text)[1]
    assert main._parse(command.split()).command == "show-tree"
