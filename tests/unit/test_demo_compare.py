# SPDX-License-Identifier: Apache-2.0
"""The demo's table: acceptance, equality and rates are what they say."""

import pytest

from vllm_dflash.demo.client import parse_counters
from vllm_dflash.demo.compare import (
    Measurement,
    acceptance_length,
    format_table,
    tokens_equal,
)

METRICS = """\
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="a b"} 10.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="a b"} 4.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="a b"} 1.7e+09
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="a b"} 35.0
process_open_fds 12.0
"""


def _row(label: str, outputs: list[list[int]], length: float | None = None):
    return Measurement(label, outputs, duration_s=2.0, acceptance_length=length)


def test_counters_are_summed_over_engines_and_not_over_names():
    counters = parse_counters(METRICS)
    assert counters["vllm:spec_decode_num_drafts_total"] == 14
    assert counters["vllm:spec_decode_num_accepted_tokens_total"] == 35
    assert counters["process_open_fds"] == 12


def test_acceptance_length_counts_the_bonus_token_and_only_the_difference():
    before = {
        "vllm:spec_decode_num_drafts_total": 4.0,
        "vllm:spec_decode_num_accepted_tokens_total": 15.0,
    }
    assert acceptance_length(before, parse_counters(METRICS)) == pytest.approx(3.0)


def test_no_verify_has_no_acceptance_length():
    assert acceptance_length({}, {}) is None
    assert acceptance_length({}, {"vllm:spec_decode_num_drafts_total": 0.0}) is None


def test_one_different_token_is_not_equal():
    baseline = _row("none", [[1, 2, 3], [4, 5]])
    assert tokens_equal(_row("tree", [[1, 2, 3], [4, 5]]), baseline) == "yes"
    different = _row("tree", [[1, 2, 3], [4, 6]])
    assert tokens_equal(different, baseline) == "no (1 of 2 answers)"
    shorter = _row("tree", [[1, 2], [4, 5]])
    assert tokens_equal(shorter, baseline) == "no (1 of 2 answers)"


def test_missing_answer_is_an_error():
    with pytest.raises(ValueError, match="shorter|longer"):
        tokens_equal(_row("tree", [[1]]), _row("none", [[1], [2]]))


def test_table_has_a_row_for_each_measurement():
    baseline = _row("none", [[1, 2, 3], [4]])
    tree = _row("tree", [[1, 2, 3], [4]], length=3.456)
    lines = format_table([baseline, tree], baseline).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:]] == [
        ["none", "2.0", "-", "-"],
        ["tree", "2.0", "3.46", "yes"],
    ]
