# SPDX-License-Identifier: Apache-2.0
"""What the draft is trained on, one loss for each (block, depth).

All losses are cross-entropies of the draft's p with some distribution q, so one
gradient serves them: softmax - q with respect to the logits.

| kind | q | weight of depth k |
|---|---|---|
| ce | the label | 1 |
| ce_decay | the label | exp(-(k - 1) / gamma) |
| ce_reach | the label | product of p(label)^power over the depths before k |
| ce_smooth | (1 - s) label + s / V | exp(-(k - 1) / gamma) |
| distill | (1 - a) label + a teacher | exp(-(k - 1) / gamma) |

A token at depth k matters only where the path before it is accepted. `ce_decay` says
so by depth alone; `ce_reach` by block: where the draft is wrong early, what comes later
hardly counts. With power 1 the weight is the chance that a chain drawn from the draft
gets to k. A tree also holds tokens that are not likely, so it gets further: a smaller
power. Weights are constants for the gradient, so every depth is trained towards its
label and none to hide the others.

The teacher is the target's distribution over its top k tokens, renormalised. Its part
counts as forward KL(teacher || p): the entropy of the teacher is subtracted, so that
the loss is 0 where the draft equals it. Logarithms are natural.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from vllm_dflash_training.config import LossOptions


@dataclass(frozen=True)
class Teacher:
    """The target's most likely tokens for each row, and their probabilities."""

    # [num_rows, k], int64
    tokens: torch.Tensor
    # [num_rows, k], float32, rows sum to 1
    probs: torch.Tensor

    def rows(self, rows: slice) -> Teacher:
        """Return a part of the rows."""
        return Teacher(self.tokens[rows], self.probs[rows])


@dataclass(frozen=True)
class Mixture:
    """The weights of the parts of q."""

    smoothing: float = 0.0
    teacher_share: float = 0.0


def mixture(options: LossOptions) -> Mixture:
    """Return the parts of q of a kind of loss."""
    if options.kind == "ce_smooth":
        return Mixture(smoothing=options.smoothing)
    if options.kind == "distill":
        return Mixture(teacher_share=options.distill_share)
    return Mixture()


def depth_weights(options: LossOptions, depth: int) -> torch.Tensor:
    """Return the weight of each depth, 1 for the first. [depth], float32"""
    if options.kind in ("ce", "ce_reach"):
        return torch.ones(depth)
    return torch.exp(-torch.arange(depth, dtype=torch.float32) / options.gamma)


def row_weights(
    # [num_rows], float32; of `ce_reach` each is -log p(label)
    losses: torch.Tensor,
    # [num_rows], int64, ascending: which (block, depth) each row is
    rows: torch.Tensor,
    # [depth], float32
    by_depth: torch.Tensor,
    num_blocks: int,
    options: LossOptions,
) -> torch.Tensor:
    """Return the weight of each row; together they are 1."""
    depth = len(by_depth)
    weights = by_depth.expand(num_blocks, -1)
    if options.kind == "ce_reach":
        grid = losses.new_zeros(num_blocks * depth)
        grid[rows] = losses
        grid = grid.view(num_blocks, depth)
        weights = weights * torch.exp(options.reach_power * (grid - grid.cumsum(1)))
    weights = weights.flatten()[rows]
    return weights / weights.sum()


def make_teacher(
    # [num_rows, vocab_size]
    logits: torch.Tensor,
    options: LossOptions,
) -> Teacher:
    """Keep the target's most likely tokens."""
    top = min(options.top_k, logits.shape[-1])
    values, tokens = logits.float().topk(top, dim=-1)
    return Teacher(tokens, (values / options.teacher_temperature).softmax(-1))


def losses_and_gradient(
    # [num_rows, vocab_size]
    logits: torch.Tensor,
    # [num_rows], int64
    labels: torch.Tensor,
    teacher: Teacher | None,
    parts: Mixture,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss of each row, and its gradient with respect to the logits."""
    logits = logits.float()
    share = parts.teacher_share if teacher is not None else 0.0
    label_share = 1.0 - share
    lse = torch.logsumexp(logits, -1, keepdim=True)
    picked = logits.gather(1, labels[:, None])
    loss = label_share * (lse - (1.0 - parts.smoothing) * picked)
    gradient = torch.exp(logits - lse)
    if parts.smoothing:
        loss = loss - label_share * parts.smoothing * logits.mean(-1, keepdim=True)
        gradient = gradient - label_share * parts.smoothing / logits.shape[1]
    on_label = label_share * (1.0 - parts.smoothing)
    # A comparison is compiled into the pass over the logits, a scatter is not.
    columns = torch.arange(logits.shape[1], device=logits.device)
    gradient = gradient - on_label * (columns == labels[:, None])
    if share:
        assert teacher is not None
        logprobs = logits.gather(1, teacher.tokens) - lse
        divergence = teacher.probs * (teacher.probs.clamp(min=1e-30).log() - logprobs)
        loss = loss + share * divergence.sum(-1, keepdim=True)
        gradient = gradient.scatter_add(1, teacher.tokens, -share * teacher.probs)
    return loss[:, 0], gradient


def loss_rows(
    # [num_rows, vocab_size]
    logits: torch.Tensor,
    # [num_rows], int64
    labels: torch.Tensor,
    teacher: Teacher | None,
    parts: Mixture,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the losses, float32, and their gradient in the logits' dtype."""
    loss, gradient = losses_and_gradient(logits, labels, teacher, parts)
    return loss, gradient.to(logits.dtype)


class ChunkedLoss(torch.autograd.Function):
    """Weighted sum of the losses of hidden rows under a frozen output matrix.

    The logits of a batch don't fit into memory at once: each chunk makes its logits,
    loss and gradient, and only the gradient of its hidden rows is kept. Rows are
    weighted at the end, by what `weigh` makes of the losses of all: the gradient of a
    hidden row is linear in its weight.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx,
        # [num_rows, hidden_size]
        hidden: torch.Tensor,
        # [vocab_size, hidden_size]
        output: torch.Tensor,
        # [num_rows]
        labels: torch.Tensor,
        # [num_rows], float32 -> the same of weights
        weigh: Callable[[torch.Tensor], torch.Tensor],
        teacher: Teacher | None,
        parts: Mixture,
        chunk: int,
        # `loss_rows`, or that compiled
        kernel: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    ) -> torch.Tensor:
        gradient = torch.empty_like(hidden)
        losses = hidden.new_empty(hidden.shape[0], dtype=torch.float32)
        for start in range(0, hidden.shape[0], chunk):
            rows = slice(start, start + chunk)
            logits = hidden[rows].to(output.dtype) @ output.t()
            part = teacher.rows(rows) if teacher is not None else None
            losses[rows], dlogits = kernel(logits, labels[rows], part, parts)
            gradient[rows] = (dlogits @ output).to(gradient.dtype)
        weights = weigh(losses)
        # In place: it is as large as the hidden rows.
        ctx.save_for_backward(gradient.mul_(weights[:, None]))
        return losses @ weights

    @staticmethod
    def backward(ctx, upstream):  # type: ignore[override]
        (gradient,) = ctx.saved_tensors
        return (gradient * upstream, *(None,) * 7)
