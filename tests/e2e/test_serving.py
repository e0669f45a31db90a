# SPDX-License-Identifier: Apache-2.0
"""Trees beside a second turn, preemption, stops and budgets that follow the load."""

import pytest
from engines import (
    acceptance_counts,
    chain_config,
    engine,
    generate,
    params,
    random_prompts,
    token_ids,
    tree_config,
)
from schedule_log import ScheduleLog

pytestmark = pytest.mark.e2e


def compare(target, draft, rig, prompts, options, **kwargs):
    """Reference tokens, tree tokens."""
    with engine(target, **kwargs) as llm:
        expected = token_ids(generate(llm, prompts, options))
    rig.add_references(prompts, expected)
    with engine(target, tree_config(draft), **kwargs) as llm:
        got = token_ids(generate(llm, prompts, options))
    return expected, got


def test_preempted_requests_resume_exactly(tiny_target, tiny_draft, rig, monkeypatch):
    log = ScheduleLog()
    log.install(monkeypatch)
    prompts = random_prompts((35, 64, 60, 70), seed=2)
    expected, got = compare(
        tiny_target,
        tiny_draft,
        rig,
        prompts,
        params(max_tokens=50),
        num_gpu_blocks_override=14,
    )
    assert got == expected
    assert log.preempted, "the pool was large enough: nothing was tested"


def test_stop_token_inside_an_accepted_path(
    tiny_target, tiny_draft, rig, prompts, greedy_reference
):
    stops = [tokens[9] for tokens in greedy_reference]
    options = [params(stop_token_ids=[stop]) for stop in stops]
    rig.add_references(prompts, greedy_reference)
    with engine(tiny_target, tree_config(tiny_draft)) as llm:
        outputs = generate(llm, prompts, options)
    for output, tokens, stop in zip(outputs, greedy_reference, stops, strict=True):
        assert list(output.outputs[0].token_ids) == tokens[: tokens.index(stop) + 1]
        assert output.outputs[0].finish_reason == "stop"


def test_second_turn_reuses_compacted_blocks(tiny_target, tiny_draft, rig):
    """Blocks filled through trees serve other requests by their hash."""
    prompts = random_prompts((35, 64, 60, 70), seed=4)
    # vLLM drops the last matching block of a DFlash request: two must be generated.
    options = params(max_tokens=100)
    with engine(tiny_target, max_model_len=320) as llm:
        first = token_ids(generate(llm, prompts, options))
        second_prompts = [p + t for p, t in zip(prompts, first, strict=True)]
        llm.reset_prefix_cache()
        second = token_ids(generate(llm, second_prompts, options))
    rig.add_references(prompts + second_prompts, first + second)
    with engine(tiny_target, tree_config(tiny_draft), max_model_len=320) as llm:
        assert token_ids(generate(llm, prompts, options)) == first
        outputs = generate(llm, second_prompts, options)
    assert token_ids(outputs) == second
    # Whole blocks of 32 over prompt and generated tokens were found in the cache.
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.num_cached_tokens > len(prompt)
    assert rig.num_branching_paths > 20


@pytest.mark.gpu
def test_chunked_prefill_with_async_scheduling(tiny_target, tiny_draft, rig):
    """vLLM switches async scheduling off on the CPU (test_serving_limits.py)."""
    prompts = random_prompts((35, 150, 60, 180, 20, 170), seed=5)
    expected, got = compare(
        tiny_target,
        tiny_draft,
        rig,
        prompts,
        params(max_tokens=24),
        max_num_batched_tokens=136,
        async_scheduling=True,
    )
    assert got == expected


def test_one_candidate_per_depth_accepts_what_the_native_chain_accepts(
    tiny_target, tiny_draft, prompts, greedy_reference
):
    with engine(tiny_target, chain_config(tiny_draft)) as llm:
        assert token_ids(generate(llm, prompts, params())) == greedy_reference
        native = acceptance_counts(llm)
    config = tree_config(tiny_draft, budget=7, max_children=1)
    with engine(tiny_target, config) as llm:
        assert token_ids(generate(llm, prompts, params())) == greedy_reference
        tree = acceptance_counts(llm)
    assert tree == native


def test_budget_follows_the_number_of_running_requests(tiny_target, tiny_draft, rig):
    """Fewer nodes than the depth, no drafts at all, and drafts again."""
    prompts = random_prompts((35, 20, 60, 5, 17, 90), seed=6)
    # Requests end one after another, so every range is visited on the way down.
    options = [params(max_tokens=n) for n in (16, 24, 32, 40, 56, 64)]
    schedule = [[1, 1, 16], [2, 2, 5], [3, 3, 0], [4, 4, 3]]
    with engine(tiny_target) as llm:
        expected = token_ids(generate(llm, prompts, options))
    rig.add_references(prompts, expected)
    config = tree_config(tiny_draft, budget_per_batch_size=schedule)
    with engine(tiny_target, config) as llm:
        got = token_ids(generate(llm, prompts, options))
    assert got == expected
    assert {4, 6, 17} <= set(rig.tree_lens)
    assert rig.num_branching_paths > 5
