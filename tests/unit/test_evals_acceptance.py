# SPDX-License-Identifier: Apache-2.0
"""The held-out prompts, and the arithmetic of the acceptance evaluation."""

import importlib.util
import json
from collections import Counter
from pathlib import Path

import pytest

EVALS = Path(__file__).resolve().parents[2] / "evals"
DRAFTS = "vllm:spec_decode_num_drafts_total"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"


@pytest.fixture(scope="module")
def run_acceptance():
    spec = importlib.util.spec_from_file_location(
        "run_acceptance", EVALS / "run_acceptance.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_prompts_are_fifty_chats_of_four_kinds(run_acceptance):
    prompts = run_acceptance.load_prompts(None)
    assert len({prompt["id"] for prompt in prompts}) == 50
    assert len({json.dumps(prompt["messages"]) for prompt in prompts}) == 50
    kinds = Counter(prompt["kind"] for prompt in prompts)
    assert kinds.keys() == {"chat", "code", "arithmetic", "summarise"}
    assert min(kinds.values()) >= 12
    for prompt in prompts:
        roles = [message["role"] for message in prompt["messages"]]
        assert roles[-1] == "user"
        assert set(roles) <= {"system", "user", "assistant"}
        assert all(message["content"].strip() for message in prompt["messages"])


@pytest.mark.parametrize("limit", [1, 4, 7])
def test_limit_takes_the_kinds_in_turn(run_acceptance, limit):
    prompts = run_acceptance.load_prompts(limit)
    assert len(prompts) == limit
    kinds = Counter(prompt["kind"] for prompt in prompts)
    assert max(kinds.values()) - min(kinds.values()) <= 1
    assert len(kinds) == min(limit, 4)


def test_summary_pools_verifies_and_counts_equal_answers(run_acceptance):
    prompts = [{"id": "a", "kind": "chat"}, {"id": "b", "kind": "code"}]
    baseline = {"outputs": {"a": [1, 2], "b": [3, 4]}, "counters": {}}
    result = {
        "outputs": {"a": [1, 2], "b": [3, 5]},
        "counters": {
            "chat": {DRAFTS: 1, ACCEPTED: 1},
            "code": {DRAFTS: 3, ACCEPTED: 9},
        },
        "duration_s": 1.0,
    }
    summary = run_acceptance.summarise(result, baseline, prompts)
    assert summary["acceptance_length"] == {"chat": 2.0, "code": 4.0, "all": 3.5}
    assert summary["num_equal"] == 1


def test_difference_is_located(run_acceptance):
    baseline = {"a": [1, 2, 3], "b": [1, 2, 3], "c": [1, 2, 3]}
    outputs = {"a": [1, 2, 3], "b": [1, 9, 3], "c": [1, 2]}
    assert run_acceptance.differences(outputs, baseline) == [
        "b differs at token 1 of 3",
        "c differs at token 2 of 3",
    ]
