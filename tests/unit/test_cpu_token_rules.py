# SPDX-License-Identifier: Apache-2.0
"""Twins of the token-rule kernels forbid what the interpreted kernels forbid."""

import importlib

import pytest
import torch
import vllm.v1.worker.cpu.shm  # noqa: F401  (patches torch before the next imports)

from vllm_dflash.cpu import replacements
from vllm_dflash.cpu import token_rules as twins

SAMPLE = "vllm.v1.worker.gpu.sample"
NUM_SLOTS, VOCAB_SIZE = 4, 41
# Slot 3 has three rows: its last token and two drafts.
SLOTS = torch.tensor([0, 1, 2, 3, 3, 3], dtype=torch.int32)
LOCAL = torch.tensor([0, 0, 0, 0, 1, 2], dtype=torch.int32)

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="compares with interpreted kernels"
)


def interpreted(target: str):
    if target in replacements.originals:
        return replacements.originals[target]
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


def random_logits() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(len(SLOTS), VOCAB_SIZE, generator=generator)


def int32(*values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def bias_args(logits, *, restore=False, only_stops=False):
    if only_stops:
        logits[3:, 4:] = -torch.inf
    return (
        logits,
        SLOTS,
        torch.tensor([5, 6, 7, 8, 9, 10]),
        int32(2, 0, 0, 0),
        int32([3, 7, 0, 0], [0] * 4, [0] * 4, [0] * 4),
        int32(1, 2, 0, 0),
        int32([7, 0, 0, 0], [2, 9, 0, 0], [0] * 4, [0] * 4),
        torch.tensor([[1.5, 0, 0, 0], [-2.0, 3.0, 0, 0], [0.0] * 4, [0.0] * 4]),
        # Slot 3 may stop from its third row on.
        int32(0, 7, 9, 11),
        int32(0, 1, 3, 4),
        int32(0, 0, 0, 1 if restore else 0),
        int32([0] * 4, [2, 0, 0, 0], [1, 5, 9, 0], [0, 1, 2, 3]),
        restore,
    )


@pytest.mark.parametrize("restore", [False, True])
@pytest.mark.parametrize("only_stops", [False, True])
def test_apply_logit_bias(restore, only_stops):
    options = dict(restore=restore, only_stops=only_stops)
    expected, actual = random_logits(), random_logits()
    interpreted(f"{SAMPLE}.logit_bias:apply_logit_bias")(
        *bias_args(expected, **options)
    )
    twins.apply_logit_bias(*bias_args(actual, **options))
    assert torch.equal(actual, expected)


def test_minimum_length_forbids_stop_tokens_until_it_is_reached():
    logits = random_logits()
    twins.apply_logit_bias(*bias_args(logits))
    assert torch.isinf(logits[2]).nonzero().view(-1).tolist() == [1, 5, 9]
    assert torch.isinf(logits[4]).sum() == 4
    assert not torch.isinf(logits[5]).any()
    assert torch.isfinite(logits[0]).nonzero().view(-1).tolist() == [3, 7]


def bad_word_args(logits):
    all_tokens = torch.zeros(NUM_SLOTS, 16, dtype=torch.int32)
    # Prompts end with what must not count; outputs follow.
    all_tokens[1, :6] = int32(11, 12, 13, 11, 12, 0)
    all_tokens[3, :6] = int32(11, 12, 1, 1, 11, 0)
    return (
        logits,
        SLOTS,
        # Words: [5]; [11, 12, 20]; [12, 13, 21].
        int32(
            [0] * 8,
            [5, 11, 12, 20, 0, 0, 0, 0],
            [0] * 8,
            [5, 11, 12, 20, 12, 13, 21, 0],
        ),
        int32([0] * 5, [0, 1, 4, 0, 0], [0] * 5, [0, 1, 4, 7, 0]),
        int32(0, 2, 0, 3),
        all_tokens,
        int32(2, 3, 2, 2),
        int32(2, 5, 2, 5),
        # The rows of slot 3: last token 11, drafts 12 and 13.
        int32(1, 12, 1, 11, 12, 13),
        LOCAL,
        3,
    )


def test_apply_bad_words():
    expected, actual = random_logits(), random_logits()
    interpreted(f"{SAMPLE}.bad_words:apply_bad_words")(*bad_word_args(expected))
    twins.apply_bad_words(*bad_word_args(actual))
    assert torch.equal(actual, expected)
    forbidden = [torch.isinf(row).nonzero().view(-1).tolist() for row in actual]
    assert forbidden == [[], [5, 20], [], [5], [5, 20], [5, 21]]


def test_a_word_longer_than_the_output_is_not_begun():
    logits = random_logits()
    args = list(bad_word_args(logits))
    args[7] = int32(2, 4, 2, 3)
    expected = random_logits()
    interpreted(f"{SAMPLE}.bad_words:apply_bad_words")(expected, *args[1:])
    twins.apply_bad_words(*args)
    assert torch.equal(logits, expected)
