# SPDX-License-Identifier: Apache-2.0
"""The embedded pair: a trained draft, so acceptance means something."""

from dataclasses import dataclass
from typing import Any

import pytest
from engines import (
    acceptance_counts,
    chain_config,
    engine,
    generate,
    params,
    token_ids,
    tree_config,
)

from vllm_dflash.demo.compare import QUESTIONS, user_turn
from vllm_dflash.demo.convert import ConversionError
from vllm_dflash.demo.fetch import FetchError
from vllm_dflash.demo.pair import DEFAULT_DEPTH, ModelPair, embedded_pair

pytestmark = pytest.mark.e2e

MAX_TOKENS = 48
# Tokens per verify of the tree, the bonus included, as recorded on a CPU in fp32. Other
# CPUs round differently, and a near tie may cost a few of the 50 verifies.
RECORDED_ACCEPTANCE_LENGTH = 3.96
ACCEPTANCE_FLOOR = 0.95 * RECORDED_ACCEPTANCE_LENGTH


@dataclass
class Run:
    outputs: list[list[int]]
    num_drafts: int
    num_accepted: int

    @property
    def acceptance_length(self) -> float:
        return 1 + self.num_accepted / self.num_drafts


@pytest.fixture(scope="module")
def pair() -> ModelPair:
    try:
        return embedded_pair(print)
    except (FetchError, ConversionError) as error:
        pytest.skip(f"the embedded pair's target can't be had: {error}")


@pytest.fixture(scope="module")
def questions(pair) -> list[list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(pair.target)
    return [
        tokenizer.apply_chat_template(
            user_turn(question), add_generation_prompt=True, return_dict=False
        )
        for question in QUESTIONS
    ]


def answer(
    pair: ModelPair, questions: list[list[int]], config: dict[str, Any] | None
) -> Run:
    options = dict(max_model_len=320, max_num_batched_tokens=512)
    with engine(pair.target, config, **options) as llm:
        outputs = token_ids(generate(llm, questions, params(MAX_TOKENS)))
        return Run(outputs, *acceptance_counts(llm))


@pytest.fixture(scope="module")
def plain(pair, questions) -> Run:
    return answer(pair, questions, None)


@pytest.fixture(scope="module")
def chain(pair, questions) -> Run:
    return answer(pair, questions, chain_config(pair.draft, DEFAULT_DEPTH))


def test_tree_keeps_the_tokens_and_accepts_more_than_the_chain(
    pair, questions, plain, chain
):
    tree = answer(pair, questions, tree_config(pair.draft))
    assert chain.outputs == plain.outputs
    assert tree.outputs == plain.outputs
    assert tree.acceptance_length >= ACCEPTANCE_FLOOR
    assert tree.acceptance_length >= chain.acceptance_length


def test_chain_shaped_tree_accepts_what_the_native_chain_accepts(
    pair, questions, plain, chain
):
    config = tree_config(pair.draft, budget=DEFAULT_DEPTH, max_children=1)
    tree = answer(pair, questions, config)
    assert tree.outputs == plain.outputs
    assert (tree.num_drafts, tree.num_accepted) == (
        chain.num_drafts,
        chain.num_accepted,
    )
