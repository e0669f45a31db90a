# SPDX-License-Identifier: Apache-2.0
"""Random traffic on one engine with trees: every answer is that of no speculation.

`evals/run_soak.py` runs the same soak for as long as one likes, on a GPU too.
"""

from pathlib import Path
from typing import Any

import pytest
from engines import engine, tree_config
from rigged_draft import RiggedDraft
from soak import Soak, SoakResult, rig_to, right_answers
from soak_requests import MAX_MODEL_LEN, SoakRequest, make_requests
from stepper import PHASES
from tiny_models import write_target
from tiny_tokenizer import write_tokenizer

from vllm_dflash.kv_cache.compaction import KVCompactor

pytestmark = pytest.mark.e2e

COMMON = dict(skip_tokenizer_init=False, max_model_len=MAX_MODEL_LEN)
ROOMY = dict(COMMON, max_num_seqs=16, num_gpu_blocks_override=400)
# Eight requests want twice as many blocks as there are, and prompts are run in pieces.
TIGHT = dict(
    COMMON, max_num_seqs=8, num_gpu_blocks_override=20, max_num_batched_tokens=200
)


def spoken_target(path: Path, **config: Any) -> str:
    target = write_target(path, **config)
    write_tokenizer(target)
    return target


def soak(
    target: str,
    draft: str,
    rig: RiggedDraft,
    requests: list[SoakRequest],
    num_blocks: int = 20,
    **ddtree: Any,
) -> SoakResult:
    with engine(target, **ROOMY) as llm:
        right = right_answers(llm, requests)
    rig.strict = False
    rig_to(rig, requests, right)
    options = dict(TIGHT, num_gpu_blocks_override=num_blocks)
    with engine(target, tree_config(draft, **ddtree), **options) as llm:
        result = Soak(llm, requests, right, rig, print).run()
    print(result, dict(result.finish_reasons))
    return result


def test_soak(tmp_path, tiny_draft, rig):
    requests = make_requests(200, seed=1)
    result = soak(spoken_target(tmp_path), tiny_draft, rig, requests)
    assert result.differences == []
    assert result.leaked_blocks == 0
    assert result.num_requests == 200
    assert result.num_preemptions > 20
    assert all(result.aborts[phase] for phase in PHASES)
    assert result.num_cached_tokens > 1000
    assert result.mean_acceptance_length > 1.3
    assert result.num_branching_paths > 100
    # Trees were trimmed to what a step or the model's length had room for.
    assert min(rig.tree_lens) < max(rig.tree_lens)


def test_soak_of_cache_groups_and_budgets(tmp_path, tiny_draft, rig):
    """Window and full layers in turn; fewer nodes, or none, for more requests."""
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    target = spoken_target(tmp_path, layer_types=kinds, sliding_window=40)
    schedule = [[1, 2, 16], [3, 4, 9], [5, 6, 0], [7, 8, 3]]
    requests = make_requests(80, seed=2)
    result = soak(target, tiny_draft, rig, requests, 40, budget_per_batch_size=schedule)
    assert result.differences == []
    assert result.leaked_blocks == 0
    assert result.num_preemptions > 3
    assert {4, 10, 17} <= set(rig.tree_lens)
    assert result.mean_acceptance_length > 1.3
    assert result.num_branching_paths > 50


def test_soak_notices_a_cache_without_compaction(
    tmp_path, tiny_draft, rig, monkeypatch
):
    monkeypatch.setattr(KVCompactor, "compact", lambda *args, **kwargs: None)
    requests = make_requests(20, seed=2)
    assert soak(spoken_target(tmp_path), tiny_draft, rig, requests).differences
