# SPDX-License-Identifier: Apache-2.0
"""Where a request may end, and what a step may hold, at every node of a tree."""

import pytest
from engine_pair import engine_pair
from engines import TREE_BUDGET, params, random_prompts
from schedule_log import ScheduleLog
from tiny_models import BLOCK_SIZE

pytestmark = pytest.mark.e2e

MAX_MODEL_LEN = 96
# The least tokens of a step that vLLM takes for this budget.
LEAST_TOKENS = TREE_BUDGET + 1 + (BLOCK_SIZE - 1)


@pytest.fixture
def log(monkeypatch) -> ScheduleLog:
    log = ScheduleLog()
    log.install(monkeypatch)
    return log


def test_model_length_at_every_node(tiny_target, tiny_draft):
    """The last trees of a request have any number of nodes that still fit."""
    room = range(1, TREE_BUDGET + 12)
    prompts = random_prompts(tuple(MAX_MODEL_LEN - n for n in room), seed=31)
    with engine_pair(tiny_target, tiny_draft, max_model_len=MAX_MODEL_LEN) as pair:
        for hit_rate in (0.85, 1.0):
            pair.rig.hit_rate = hit_rate
            comparison = pair.compare(prompts, params(max_tokens=500))
            comparison.assert_equal()
            for output, count in zip(comparison.got, room, strict=True):
                assert len(output.outputs[0].token_ids) == count
                assert output.outputs[0].finish_reason == "length"
            assert set(pair.rig.tree_lens) == set(range(2, TREE_BUDGET + 2))
            assert pair.verified_trees


def test_max_tokens_at_every_node(tiny_target, tiny_draft):
    counts = range(1, TREE_BUDGET + 12)
    prompts = random_prompts(tuple(20 + n for n in counts), seed=32)
    with engine_pair(tiny_target, tiny_draft) as pair:
        for hit_rate in (0.85, 1.0):
            pair.rig.hit_rate = hit_rate
            comparison = pair.compare(prompts, [params(max_tokens=n) for n in counts])
            comparison.assert_equal()
            assert pair.verified_trees
            for output, count in zip(comparison.got, counts, strict=True):
                assert len(output.outputs[0].token_ids) == count


@pytest.mark.parametrize("tokens_a_step", [LEAST_TOKENS, 70, 90, 200])
def test_prompts_in_pieces_beside_trees(tiny_target, tiny_draft, log, tokens_a_step):
    """One token more or less to share out, prompts are cut and trees are trimmed."""
    prompts = random_prompts((35, 150, 60, 180, 1, 170, 33), seed=33)
    # Short and long answers, so that prompts are run beside trees all the time.
    options = [params(max_tokens=n) for n in (60, 9, 40, 17, 60, 30, 12)]
    with engine_pair(
        tiny_target, tiny_draft, max_num_batched_tokens=tokens_a_step
    ) as pair:
        for _ in range(2):
            # The second time much of the prompts is found in the cache.
            log.clear()
            pair.compare(prompts, options).assert_equal()
            assert pair.verified_trees
        # The least holds one tree and the draft's rows, and no prompt beside it.
        is_mixed = any(step.is_mixed for step in log.steps)
        assert is_mixed == (tokens_a_step > LEAST_TOKENS)
        assert all(sum(s.num_tokens.values()) <= tokens_a_step for s in log.steps)
        for llm in (pair.plain, pair.tree):
            assert llm.reset_prefix_cache()
        log.clear()
        pair.compare(prompts, options).assert_equal()
        assert max(log.num_pieces.values()) > 1
        if tokens_a_step == 90:
            trimmed = {n for s in log.steps for n in s.num_drafts.values()}
            assert min(trimmed) < TREE_BUDGET


def test_the_draft_reserves_its_depth_not_the_nodes(tiny_target, tiny_draft, log):
    """Four requests of 17 rows and 7 mask tokens fit a step of 100 tokens."""
    prompts = random_prompts((9, 9, 9, 9), seed=35)
    with engine_pair(
        tiny_target, tiny_draft, max_num_batched_tokens=4 * LEAST_TOKENS + 4
    ) as pair:
        log.clear()
        pair.compare(prompts, params(max_tokens=20)).assert_equal()
    verified = [step for step in log.steps if step.num_drafts]
    assert max(len(step.num_drafts) for step in verified) == 4
    assert max(sum(step.num_tokens.values()) for step in verified) == 4 * 17
