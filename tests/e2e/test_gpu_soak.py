# SPDX-License-Identifier: Apache-2.0
"""A short soak on a GPU: async scheduling, CUDA graphs of many batch sizes, fp32.

Every graph that a batch of verifies can use is replayed, and its answers are compared.
`evals/run_soak.py --device gpu` is the long one.
"""

import pytest
from engines import FP32_BACKEND, engine, tree_config
from soak import Soak, rig_to, right_answers
from soak_requests import (
    MAX_MODEL_LEN,
    STEPS_OF_A_WAVE,
    make_requests,
    make_waves,
)
from stepper import PHASES
from tiny_models import write_target
from tiny_tokenizer import write_tokenizer

pytestmark = [pytest.mark.e2e, pytest.mark.gpu]

COMMON = dict(
    skip_tokenizer_init=False,
    max_model_len=MAX_MODEL_LEN,
    attention_backend=FP32_BACKEND,
    block_size=16,
)
# Prompts are run in pieces even where a step has room for the whole of them, so that
# clients also leave in the middle of one. A tree of the budget fits into a piece.
PIECE = 40


@pytest.mark.parametrize(
    ("max_num_seqs", "budget", "num_blocks", "schedule"),
    [
        (8, 32, 50, "fixed"),
        (8, 32, 50, [[1, 2, 32], [3, 5, 9], [6, 8, 0]]),
        # Captured sizes further apart: some batches are padded to the next.
        (24, 16, 100, "fixed"),
    ],
    ids=["fixed", "schedule", "many"],
)
def test_soak(tmp_path, tiny_draft, rig, max_num_seqs, budget, num_blocks, schedule):
    target = write_target(tmp_path / "target")
    write_tokenizer(target)
    waves = make_waves(max_num_seqs, seed=5)
    start = waves[-1].arrival + STEPS_OF_A_WAVE
    requests = [*waves, *make_requests(300, seed=5, start=start)]
    with engine(target, **COMMON, num_gpu_blocks_override=512) as llm:
        right = right_answers(llm, requests)
    rig.strict = False
    rig_to(rig, requests, right)
    config = tree_config(tiny_draft, budget=budget, budget_per_batch_size=schedule)
    tight = dict(
        enforce_eager=False,
        max_num_seqs=max_num_seqs,
        # A step has room for all their trees and drafts.
        max_num_batched_tokens=50 * max_num_seqs,
        long_prefill_token_threshold=PIECE,
        num_gpu_blocks_override=num_blocks,
    )
    with engine(target, config, **COMMON, **tight) as llm:
        result = Soak(llm, requests, right, rig, print).run()
    print(result, result.graphs, sep="\n")
    assert result.differences == []
    assert result.leaked_blocks == 0
    assert result.num_preemptions > 10
    assert all(result.aborts[phase] for phase in PHASES), result
    assert result.mean_acceptance_length > 1.3
    assert result.num_branching_paths > 100
    graphs = result.graphs
    assert graphs.due and graphs.missing == [], graphs
    assert graphs.draft_due and graphs.missing_drafts == [], graphs
