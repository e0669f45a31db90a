# SPDX-License-Identifier: Apache-2.0
"""The losses have the values and gradients that they say."""

import math

import pytest
import torch
import torch.nn.functional as F
import training_runs  # noqa: F401, puts training/ on the path

from vllm_dflash_training.config import LossOptions
from vllm_dflash_training.losses import (
    ChunkedLoss,
    Teacher,
    depth_weights,
    loss_rows,
    losses_and_gradient,
    make_teacher,
    mixture,
    row_weights,
)

ROWS, VOCAB, HIDDEN = 13, 37, 8
KINDS = ("ce", "ce_decay", "ce_reach", "ce_smooth", "distill")


def problem(seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(ROWS, VOCAB, generator=generator) * 3
    labels = torch.randint(VOCAB, (ROWS,), generator=generator)
    target = torch.randn(ROWS, VOCAB, generator=generator) * 3
    return logits, labels, target


def plain_loss(logits, labels, target, options):
    """The same losses with PyTorch's own, differentiable."""
    if options.kind == "ce_smooth":
        smoothing = options.smoothing
        return F.cross_entropy(
            logits, labels, label_smoothing=smoothing, reduction="none"
        )
    loss = F.cross_entropy(logits, labels, reduction="none")
    if options.kind != "distill":
        return loss
    values, tokens = target.topk(options.top_k)
    teacher = (values / options.teacher_temperature).softmax(-1)
    logprobs = logits.log_softmax(-1).gather(1, tokens)
    divergence = F.kl_div(logprobs, teacher, reduction="none").sum(-1)
    return (1 - options.distill_share) * loss + options.distill_share * divergence


@pytest.mark.parametrize("kind", KINDS)
def test_value_and_gradient_are_those_of_pytorch(kind):
    options = LossOptions(kind=kind, top_k=5, teacher_temperature=0.7)
    logits, labels, target = problem()
    teacher = make_teacher(target, options) if kind == "distill" else None
    loss, gradient = losses_and_gradient(logits, labels, teacher, mixture(options))
    logits.requires_grad_()
    expected = plain_loss(logits, labels, target, options)
    expected.sum().backward()
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(gradient, logits.grad)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk", [1, 5, 100])
def test_chunks_give_the_gradient_of_the_whole(kind, chunk):
    options = LossOptions(kind=kind, top_k=5)
    _, labels, target = problem()
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(ROWS, HIDDEN, generator=generator, requires_grad=True)
    output = torch.randn(VOCAB, HIDDEN, generator=generator)
    weights = torch.rand(ROWS, generator=generator)
    teacher = make_teacher(target, options) if kind == "distill" else None
    loss = ChunkedLoss.apply(
        hidden,
        output,
        labels,
        lambda losses: weights,
        teacher,
        mixture(options),
        chunk,
        loss_rows,
    )
    (3 * loss).backward()
    got = hidden.grad.clone()
    hidden.grad = None
    expected = plain_loss(hidden @ output.t(), labels, target, options) @ weights
    (3 * expected).backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(got, hidden.grad)


def test_values_worked_by_hand():
    logits = torch.log(torch.tensor([[0.5, 0.25, 0.25]]))
    labels = torch.tensor([1])
    options = LossOptions(kind="ce")
    loss, gradient = losses_and_gradient(logits, labels, None, mixture(options))
    assert loss.item() == pytest.approx(math.log(4))
    assert gradient[0].tolist() == pytest.approx([0.5, -0.75, 0.25])
    # Smoothing 0.3 of three tokens: q is 0.1, 0.8, 0.1.
    options = LossOptions(kind="ce_smooth", smoothing=0.3)
    loss, _ = losses_and_gradient(logits, labels, None, mixture(options))
    assert loss.item() == pytest.approx(0.1 * math.log(2) + 0.9 * math.log(4))


def test_distillation_is_zero_for_a_draft_that_equals_the_teacher():
    options = LossOptions(kind="distill", distill_share=1.0, top_k=VOCAB)
    logits, labels, _ = problem()
    teacher = make_teacher(logits, options)
    loss, gradient = losses_and_gradient(logits, labels, teacher, mixture(options))
    torch.testing.assert_close(loss, torch.zeros(ROWS), atol=1e-5, rtol=0)
    torch.testing.assert_close(gradient, torch.zeros_like(logits), atol=1e-6, rtol=0)


def test_teacher_with_a_certain_token_is_cross_entropy():
    logits, labels, _ = problem()
    tokens = torch.stack([labels, (labels + 1) % VOCAB], 1)
    teacher = Teacher(tokens, torch.tensor([[1.0, 0.0]]).expand(ROWS, -1))
    parts = mixture(LossOptions(kind="distill", distill_share=1.0))
    got = losses_and_gradient(logits, labels, teacher, parts)
    plain = losses_and_gradient(logits, labels, None, mixture(LossOptions(kind="ce")))
    for a, b in zip(got, plain, strict=True):
        torch.testing.assert_close(a, b)


def test_weights_fall_with_the_depth():
    assert depth_weights(LossOptions(kind="ce"), 3).tolist() == [1, 1, 1]
    got = depth_weights(LossOptions(kind="ce_decay", gamma=7.0), 15)
    assert got[0] == 1
    assert got[7].item() == pytest.approx(math.exp(-1))
    assert got[14].item() == pytest.approx(math.exp(-2))


# Two blocks of three depths; the second one ends after two.
BLOCK_ROWS = torch.tensor([0, 1, 2, 3, 4])


def test_reach_follows_the_path_of_each_block():
    # p(label): 0.25, 0.5, anything; 1.0, 0.09.
    losses = -torch.log(torch.tensor([0.25, 0.5, 0.7, 1.0, 0.09]))
    options = LossOptions(kind="ce_reach", reach_power=0.5)
    by_depth = depth_weights(options, 3)
    got = row_weights(losses, BLOCK_ROWS, by_depth, 2, options)
    # The roots of what comes before: 1, 0.25, 0.125; 1, 1.
    expected = torch.tensor([1, 0.5, math.sqrt(0.125), 1, 1])
    torch.testing.assert_close(got, expected / expected.sum())


def test_reach_of_power_one_is_what_a_drawn_chain_accepts():
    p = torch.tensor([0.6, 0.3, 0.8])
    options = LossOptions(kind="ce_reach", reach_power=1.0)
    by_depth = depth_weights(options, 3)
    got = row_weights(-p.log(), torch.arange(3), by_depth, 1, options)
    chances = torch.tensor([1.0, 0.6, 0.18])
    torch.testing.assert_close(got, chances / chances.sum())


@pytest.mark.parametrize(
    "options", [LossOptions(kind="ce"), LossOptions(kind="ce_reach", reach_power=0.0)]
)
def test_all_depths_may_count_alike(options):
    by_depth = depth_weights(options, 3)
    got = row_weights(torch.rand(5), BLOCK_ROWS, by_depth, 2, options)
    torch.testing.assert_close(got, torch.full((5,), 0.2))


def test_decay_weighs_by_depth_alone():
    options = LossOptions(kind="ce_decay", gamma=1.0)
    by_depth = depth_weights(options, 3)
    got = row_weights(torch.rand(5), BLOCK_ROWS, by_depth, 2, options)
    expected = torch.exp(-torch.tensor([0.0, 1.0, 2.0, 0.0, 1.0]))
    torch.testing.assert_close(got, expected / expected.sum())
