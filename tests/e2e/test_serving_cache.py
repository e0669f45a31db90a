# SPDX-License-Identifier: Apache-2.0
"""Prefix caching beside trees: what is found, and that it is never written."""

from dataclasses import dataclass
from typing import Any

import pytest
from engines import (
    chain_config,
    engine,
    generate,
    params,
    random_prompts,
    token_ids,
    tree_config,
)
from paged_kv import PagedKV
from stepper import DECODING, Stepper, scheduler

pytestmark = pytest.mark.e2e

BLOCK = 32
SHARED, *ENDS = random_prompts((3 * BLOCK + 5, 1, 20, 40, 27), seed=21)


WHOLE_BLOCKS = SHARED[: 3 * BLOCK]
# Sent one after another, with prefixes in common.
PROMPTS = [
    SHARED,
    SHARED,
    *(SHARED + end for end in ENDS),
    # The last block is found as a whole, or one token short.
    WHOLE_BLOCKS,
    WHOLE_BLOCKS + ENDS[0],
    WHOLE_BLOCKS[:-1],
    SHARED[:BLOCK],
    SHARED[: BLOCK + 1],
    ENDS[-1],
]


@dataclass
class Hits:
    """What an engine found in its prefix cache, prompts sent one after another."""

    answers: list[list[int]]
    # Of each prompt, and of each prompt with its answer.
    of_prompts: list[int]
    of_answers: list[int]
    # vllm:prefix_cache_queries and vllm:prefix_cache_hits over the prompts.
    metrics: tuple[int, int]


def hits(llm: Any) -> Hits:
    def send(prompt: list[int], max_tokens: int) -> tuple[list[int], int]:
        (output,) = generate(llm, [prompt], params(max_tokens))
        return list(output.outputs[0].token_ids), output.num_cached_tokens

    answers, of_prompts = map(list, zip(*(send(p, 40) for p in PROMPTS), strict=True))
    values = {m.name: getattr(m, "value", 0) for m in llm.get_metrics()}
    names = ("vllm:prefix_cache_queries", "vllm:prefix_cache_hits")
    turns = zip(PROMPTS, answers, strict=True)
    of_answers = [send(prompt + answer, 1)[1] for prompt, answer in turns]
    return Hits(answers, of_prompts, of_answers, tuple(values[n] for n in names))


def test_hits(tiny_target, tiny_draft, rig):
    """As many as in vLLM's chain: its last block is looked up and computed again.

    vLLM does so for every DFlash draft, whose keys depend on the block before.
    """
    with engine(tiny_target) as llm:
        plain = hits(llm)
    rig.add_references(PROMPTS, plain.answers)
    with engine(tiny_target, chain_config(tiny_draft)) as llm:
        chain = hits(llm)
    with engine(tiny_target, tree_config(tiny_draft)) as llm:
        tree = hits(llm)
    assert tree.answers == plain.answers
    assert rig.num_branching_paths > 20
    assert max(plain.of_prompts) == 3 * BLOCK
    assert tree.of_prompts == [max(0, n - BLOCK) for n in plain.of_prompts]
    assert tree.of_prompts == chain.of_prompts
    assert tree.metrics == chain.metrics
    assert tree.metrics == (plain.metrics[0], sum(tree.of_prompts))
    # A block that is filled by the very last step of a request is not remembered, and
    # with drafts the last step fills more.
    for ours, theirs in zip(tree.of_answers, plain.of_answers, strict=True):
        assert theirs - 2 * BLOCK <= ours <= max(0, theirs - BLOCK)
    assert sum(tree.of_answers) > sum(tree.of_prompts) + 3 * BLOCK


def test_cached_blocks_are_never_written(tiny_target, tiny_draft, rig):
    prompts = [SHARED + end for end in ENDS]
    with engine(tiny_target) as llm:
        expected = token_ids(generate(llm, prompts, params(48)))
    rig.add_references(prompts, expected)
    num_shared = 0
    with engine(tiny_target, tree_config(tiny_draft), max_num_seqs=4) as llm:
        stepper, kv = Stepper(llm), PagedKV(llm)
        pool = scheduler(llm).kv_cache_manager.block_pool

        def step() -> None:
            nonlocal num_shared
            before = kv.snapshot()
            cached = {b.block_id: b.block_hash for b in pool.blocks if b.block_hash}
            if any(stepper.phases(name) == {DECODING} for name in names):
                num_shared += sum(b.ref_cnt > 1 for b in pool.blocks if b.block_hash)
            stepper.step()
            kept = {
                i for i, value in cached.items() if pool.blocks[i].block_hash == value
            }
            for layer in kv.caches:
                changed = {block for block, _ in kv.changed(before, layer)}
                assert not changed & kept, layer

        names = []
        for i, prompt in enumerate(prompts):
            # The first is verifying when the others find its blocks.
            names.append(f"r{i}")
            stepper.add(names[-1], prompt, params(48))
            for _ in range(3):
                step()
        while llm.llm_engine.has_unfinished_requests():
            step()
    assert [stepper.tokens[name] for name in names] == expected
    assert num_shared > 20
    assert rig.num_branching_paths > 20
