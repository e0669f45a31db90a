# SPDX-License-Identifier: Apache-2.0
"""Tree output equals the output without speculation, token for token (fp32)."""

import pytest
from engines import engine, generate, params, token_ids, tree_config

from vllm_dflash.kv_cache.compaction import KVCompactor
from vllm_dflash.sample import tree_sampler
from vllm_dflash.tree import verify_step

pytestmark = pytest.mark.e2e


def test_greedy_tree_equals_no_speculation(
    tiny_target, tiny_draft, prompts, greedy_reference, rig
):
    rig.add_references(prompts, greedy_reference)
    with engine(tiny_target, tree_config(tiny_draft)) as llm:
        got = token_ids(generate(llm, prompts, params()))
    assert got == greedy_reference
    assert rig.mean_tokens > 2
    assert rig.num_branching_paths > 20


def test_unrigged_random_draft_equals_no_speculation(
    tiny_target, tiny_draft, prompts, greedy_reference
):
    with engine(tiny_target, tree_config(tiny_draft)) as llm:
        got = token_ids(generate(llm, prompts, params()))
    assert got == greedy_reference


def test_logits_in_chunks_give_the_same_tokens(
    tiny_target, tiny_draft, prompts, greedy_reference, rig, monkeypatch
):
    # A request of 17 rows and little else a chunk, as with a large vocabulary.
    monkeypatch.setattr(tree_sampler, "get_max_chunk_logits", lambda vocab_size: 20)
    chunks, counts = tree_sampler.TreeRejectionSampler._request_chunks, []

    def counting(*args):
        found = list(chunks(*args))
        counts.append(len(found))
        return found

    monkeypatch.setattr(
        tree_sampler.TreeRejectionSampler, "_request_chunks", staticmethod(counting)
    )
    rig.add_references(prompts, greedy_reference)
    with engine(tiny_target, tree_config(tiny_draft)) as llm:
        got = token_ids(generate(llm, prompts, params()))
    assert got == greedy_reference
    assert rig.mean_tokens > 2
    assert max(counts) > 1


SAMPLING = [
    dict(temperature=1.0, seed=11),
    dict(temperature=0.7, seed=12, top_k=20),
    dict(temperature=1.3, seed=13, top_p=0.8),
    dict(temperature=0.0),
    dict(temperature=1.0, seed=14, top_k=50, top_p=0.9),
    dict(temperature=1.0, seed=15, allowed_token_ids=list(range(10, 200))),
]


def test_seeded_sampling_equals_no_speculation(tiny_target, tiny_draft, prompts, rig):
    options = [params(**kwargs) for kwargs in SAMPLING]
    with engine(tiny_target) as llm:
        expected = token_ids(generate(llm, prompts, options))
    rig.add_references(prompts, expected)
    with engine(tiny_target, tree_config(tiny_draft)) as llm:
        got = token_ids(generate(llm, prompts, options))
    assert got == expected
    assert rig.mean_tokens > 2
    assert rig.num_branching_paths > 20


LINEAR_HISTORY = [
    dict(repetition_penalty=1.3),
    dict(frequency_penalty=0.7, presence_penalty=0.3),
    dict(bad_words=None, temperature=1.0, seed=3, presence_penalty=0.9),
    dict(),
    dict(temperature=1.0, seed=4),
    dict(min_tokens=10, stop_token_ids=[17, 18, 19]),
]


def test_requests_with_penalties_share_a_batch_with_trees(
    tiny_target, tiny_draft, prompts, rig
):
    options = [params(**kwargs) for kwargs in LINEAR_HISTORY]
    with engine(tiny_target) as llm:
        expected = token_ids(generate(llm, prompts, options))
    rig.add_references(prompts, expected)
    with engine(tiny_target, tree_config(tiny_draft)) as llm:
        got = token_ids(generate(llm, prompts, options))
    assert got == expected
    assert rig.num_branching_paths > 5


def test_logprobs_follow_the_accepted_path(
    tiny_target, tiny_draft, prompts, greedy_reference, rig
):
    options = params(logprobs=3, prompt_logprobs=1)
    with engine(tiny_target) as llm:
        expected = generate(llm, prompts, options)
    rig.add_references(prompts, greedy_reference)
    with engine(tiny_target, tree_config(tiny_draft)) as llm:
        got = generate(llm, prompts, options)
    assert token_ids(got) == token_ids(expected)
    assert rig.num_branching_paths > 20
    for a, b in zip(got, expected, strict=True):
        pairs = zip(a.outputs[0].logprobs, b.outputs[0].logprobs, strict=True)
        for ours, theirs in pairs:
            assert ours.keys() == theirs.keys()
            for token, value in theirs.items():
                assert abs(ours[token].logprob - value.logprob) < 1e-3
                assert ours[token].rank == value.rank


class TestNegativeControls:
    """Each part of the design is needed: without it the output diverges."""

    def diverges(self, tiny_target, tiny_draft, prompts, greedy_reference, rig) -> bool:
        rig.add_references(prompts, greedy_reference)
        with engine(tiny_target, tree_config(tiny_draft)) as llm:
            try:
                got = token_ids(generate(llm, prompts, params()))
            except Exception as error:
                # The rig notices first, inside the engine.
                assert "diverged" in repr(error)
                return True
        return got != greedy_reference

    def test_without_compaction(
        self, tiny_target, tiny_draft, prompts, greedy_reference, rig, monkeypatch
    ):
        monkeypatch.setattr(KVCompactor, "compact", lambda *args, **kwargs: None)
        assert self.diverges(tiny_target, tiny_draft, prompts, greedy_reference, rig)

    def test_without_ancestor_mask(
        self, tiny_target, tiny_draft, prompts, greedy_reference, rig, monkeypatch
    ):
        from vllm_dflash.attention import cpu_mask

        def causal(words, num_nodes):
            import torch

            return torch.ones(num_nodes, num_nodes, dtype=torch.bool).tril()

        monkeypatch.setattr(cpu_mask, "unpack_ancestors", causal)
        assert self.diverges(tiny_target, tiny_draft, prompts, greedy_reference, rig)

    def test_with_index_positions(
        self, tiny_target, tiny_draft, prompts, greedy_reference, rig, monkeypatch
    ):
        prepare = verify_step.prepare_tree_step

        def keep_positions(*args, positions, **kwargs):
            return prepare(*args, positions=positions.clone(), **kwargs)

        monkeypatch.setattr(verify_step, "prepare_tree_step", keep_positions)
        assert self.diverges(tiny_target, tiny_draft, prompts, greedy_reference, rig)
