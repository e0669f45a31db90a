# SPDX-License-Identifier: Apache-2.0
"""A short soak on a GPU: async scheduling, CUDA graphs of many batch sizes, fp32.

`evals/run_soak.py --device gpu` is the long one.
"""

import pytest
from engines import FP32_BACKEND, engine, tree_config
from soak import Soak, rig_to, right_answers
from soak_requests import MAX_MODEL_LEN, make_requests
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


@pytest.mark.parametrize("schedule", ["fixed", [[1, 2, 32], [3, 5, 9], [6, 8, 0]]])
def test_soak(tmp_path, tiny_draft, rig, schedule):
    target = write_target(tmp_path / "target")
    write_tokenizer(target)
    requests = make_requests(300, seed=5)
    with engine(target, **COMMON, num_gpu_blocks_override=512) as llm:
        right = right_answers(llm, requests)
    rig.strict = False
    rig_to(rig, requests, right)
    config = tree_config(tiny_draft, budget=32, budget_per_batch_size=schedule)
    tight = dict(
        enforce_eager=False,
        max_num_seqs=8,
        max_num_batched_tokens=400,
        long_prefill_token_threshold=PIECE,
    )
    with engine(target, config, **COMMON, **tight, num_gpu_blocks_override=40) as llm:
        result = Soak(llm, requests, right, rig, print).run()
    assert result.differences == []
    assert result.leaked_blocks == 0
    assert result.num_preemptions > 10
    assert all(result.aborts[phase] for phase in PHASES), result
    assert result.mean_acceptance_length > 1.3
    assert result.num_branching_paths > 100
