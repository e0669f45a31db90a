# SPDX-License-Identifier: Apache-2.0
"""Trees of every draft layout that vLLM loads, built from vLLM's own candidates."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from draft_records import record_drafts
from engines import (
    chain_config,
    engine,
    generate,
    model_runner,
    params,
    token_ids,
    tree_config,
)
from safetensors.torch import load_file
from tiny_models import (
    BLOCK_SIZE,
    DRAFT_VOCAB_SIZE,
    MASK_TOKEN,
    TARGET_LAYER_IDS,
    write_draft,
    write_speculators_draft,
)

from vllm_dflash.runner.speculator import DDTreeSpeculator

pytestmark = pytest.mark.e2e

MAX_TOKENS = 20
DEPTH = BLOCK_SIZE - 1
WINDOW = 12
# The two engines sum in another order; a wrong mask or context moves logits by more
# than 1.
LOGITS_ATOL = 5e-4


def dflash(**options: Any) -> dict[str, Any]:
    return dict(mask_token_id=MASK_TOKEN, target_layer_ids=TARGET_LAYER_IDS, **options)


@dataclass
class Layout:
    """Config of a draft, and what vLLM makes of it for each of its two layers."""

    windows: list[int]
    causal: list[bool]
    config: dict[str, Any] = field(default_factory=dict)


SLIDING = dict(use_sliding_window=True, sliding_window=WINDOW)
LAYOUTS = {
    "full": Layout([-1, -1], [False, False]),
    "causal": Layout([-1, -1], [True, True], dict(dflash_config=dflash(causal=True))),
    "sliding": Layout(
        [WINDOW, WINDOW],
        [True, True],
        dict(layer_types=["sliding_attention"] * 2, **SLIDING),
    ),
    "non-causal windows with sinks and a value scale": Layout(
        [WINDOW, WINDOW],
        [False, False],
        dict(
            dflash_config=dflash(
                use_swa=True,
                swa_window_size=WINDOW,
                attention_sink_bias=True,
                attention_value_scale=0.7,
            )
        ),
    ),
    "mixed": Layout(
        [WINDOW, -1],
        [True, False],
        dict(layer_types=["sliding_attention", "full_attention"], **SLIDING),
    ),
    "mixed and non-causal": Layout(
        [-1, WINDOW],
        [False, False],
        dict(
            layer_types=["full_attention", "sliding_attention"],
            dflash_config=dflash(causal=False),
            **SLIDING,
        ),
    ),
}


def check_layout(llm: Any, layout: Layout) -> None:
    """The loader took the options of the config, so that they are really tested."""
    draft = model_runner(llm).speculator.model
    assert draft.get_draft_attn_causal() == layout.causal
    attention = [layer.self_attn.attn.impl for layer in draft.model.layers]
    assert [impl.sliding_window for impl in attention] == layout.windows


def check_drafts(target, draft, rig, prompts, reference, layout) -> None:
    """The tree's output is the reference's, its candidates are the native chain's.

    The rig replaces the candidates after they were recorded, so the contexts compared
    follow accepted paths off the first branch.
    """
    options = params(MAX_TOKENS)
    expected = [tokens[:MAX_TOKENS] for tokens in reference]
    with engine(target, chain_config(draft, DEPTH), max_num_seqs=6) as llm:
        check_layout(llm, layout)
        native = record_drafts(llm)
        assert token_ids(generate(llm, prompts, options)) == expected
    for prompt, tokens in zip(prompts, reference, strict=True):
        rig.add_reference(prompt, tokens)
    config = {**tree_config(draft), "num_speculative_tokens": DEPTH}
    with engine(target, config, max_num_seqs=6) as llm:
        check_layout(llm, layout)
        tree = record_drafts(llm)
        assert token_ids(generate(llm, prompts, options)) == expected
    assert rig.num_branching_paths > 10

    shared = native.keys() & tree.keys()
    assert len(shared) > 25
    for context in shared:
        ours, theirs = tree[context], native[context].logits
        torch.testing.assert_close(ours.logits, theirs, rtol=0, atol=LOGITS_ATOL)
        # A near tie may be ranked either way; the chain's choice is never far behind.
        best = ours.cand_tokens[:, :1].long()
        gaps = theirs.max(dim=-1).values - theirs.gather(1, best)[:, 0]
        assert gaps.max() < LOGITS_ATOL
        num_candidates = ours.cand_tokens.shape[1]
        expected_logprobs = theirs.log_softmax(-1).topk(num_candidates).values
        torch.testing.assert_close(
            ours.cand_logprobs, expected_logprobs, rtol=0, atol=LOGITS_ATOL
        )
    # The draft reads its context: it does not repeat one block.
    blocks = {tuple(tree[context].cand_tokens[:, 0].tolist()) for context in shared}
    assert len(blocks) > len(shared) // 2


@pytest.mark.parametrize("name", LAYOUTS)
def test_candidates_are_the_native_chains(
    tiny_target, prompts, greedy_reference, rig, tmp_path, name
):
    layout = LAYOUTS[name]
    draft = write_draft(tmp_path / "draft", **layout.config)
    check_drafts(tiny_target, draft, rig, prompts, greedy_reference, layout)


class TestSpeculatorsLayout:
    """An lm_head of its own over a part of the target's vocabulary."""

    def test_candidates_are_the_native_chains(
        self, tiny_target, prompts, greedy_reference, rig, tmp_path
    ):
        draft = write_speculators_draft(tmp_path / "draft", target=tiny_target)
        layout = Layout([-1, -1], [False, False])
        check_drafts(tiny_target, draft, rig, prompts, greedy_reference, layout)

    def test_nodes_are_target_ids_down_to_the_depth_that_it_names(
        self, tiny_target, prompts, tmp_path
    ):
        draft = write_speculators_draft(tmp_path / "draft", target=tiny_target)
        offsets = load_file(f"{draft}/model.safetensors")["d2t"]
        target_ids = set((torch.arange(DRAFT_VOCAB_SIZE) + offsets).tolist())
        with engine(tiny_target, tree_config(draft)) as llm:
            assert model_runner(llm).speculator.config.depth == DEPTH
            records = record_drafts(llm)
            generate(llm, prompts[:2], params(6))
        seen = {
            token
            for record in records.values()
            for token in record.built_tokens.flatten().tolist()
        }
        assert seen <= target_ids
        assert any(token >= DRAFT_VOCAB_SIZE for token in seen)

    def test_named_as_the_model_it_brings_its_target_and_depth(
        self, tiny_target, prompts, greedy_reference, tmp_path
    ):
        draft = write_speculators_draft(tmp_path / "draft", target=tiny_target)
        with engine(draft) as llm:
            speculator = model_runner(llm).speculator
            assert isinstance(speculator, DDTreeSpeculator)
            assert speculator.config.depth == DEPTH
            got = token_ids(generate(llm, prompts, params(8)))
        assert got == [tokens[:8] for tokens in greedy_reference]
