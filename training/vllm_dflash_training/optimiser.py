# SPDX-License-Identifier: Apache-2.0
"""Optimisers of PyTorch, the learning rate, and the averaged weights."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn as nn

from vllm_dflash_training.config import TrainingOptions


class Optimiser:
    """AdamW, or Muon for the matrices and AdamW for the norms."""

    def __init__(self, draft: nn.Module, options: TrainingOptions):
        self.options = options
        matrices = [p for p in draft.parameters() if p.dim() == 2]
        vectors = [p for p in draft.parameters() if p.dim() != 2]
        rate, decay = options.learning_rate, options.weight_decay
        groups = [{"params": vectors, "weight_decay": 0.0}]
        self.parts: list[torch.optim.Optimizer] = []
        if options.optimizer == "muon":
            # Steps of AdamW's size, so that one learning rate serves both.
            muon = torch.optim.Muon(
                matrices, lr=rate, weight_decay=decay, adjust_lr_fn="match_rms_adamw"
            )
            self.parts.append(muon)
        else:
            groups.append({"params": matrices, "weight_decay": decay})
        self.parts.append(torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95)))
        self.parameters = [*draft.parameters()]

    def step(self, rate: float) -> torch.Tensor:
        """Clip, step, and forget the gradients; return their norm before."""
        norm = nn.utils.clip_grad_norm_(self.parameters, self.options.clip_norm)
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = rate
            part.step()
            part.zero_grad(set_to_none=True)
        return norm

    def state(self) -> list[dict[str, Any]]:
        """What `load` goes on from."""
        return [part.state_dict() for part in self.parts]

    def load(self, states: list[dict[str, Any]]) -> None:
        """Go on from a state."""
        for part, state in zip(self.parts, states, strict=True):
            part.load_state_dict(state)


def learning_rate(progress: float, options: TrainingOptions) -> float:
    """Linear warm-up, then half a cosine down to `final_rate` of the peak.

    Args:
        progress: Part of the training that is done, 0 to 1.
        options: Of the training.
    """
    if progress < options.warmup:
        return options.learning_rate * max(progress / options.warmup, 1e-3)
    rest = (progress - options.warmup) / max(1 - options.warmup, 1e-9)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, rest)))
    floor = options.final_rate
    return options.learning_rate * (floor + (1 - floor) * cosine)


class Average:
    """Exponential average of the weights; with no decay, the weights themselves."""

    def __init__(self, draft: nn.Module, decay: float | None):
        self.draft, self.decay = draft, decay
        self.weights = [p.detach().clone() for p in draft.parameters()] if decay else []
        self.steps = 0

    def update(self) -> None:
        """Follow the weights; faster at first, so that the start is soon forgotten."""
        if not self.decay:
            return
        self.steps += 1
        decay = min(self.decay, (1 + self.steps) / (10 + self.steps))
        current = [p.detach() for p in self.draft.parameters()]
        torch._foreach_lerp_(self.weights, current, 1 - decay)

    def named(self) -> dict[str, torch.Tensor]:
        """Return what is exported."""
        named = dict(self.draft.named_parameters())
        if self.decay:
            return dict(zip(named, self.weights, strict=True))
        return {name: p.detach() for name, p in named.items()}

    def swap(self) -> None:
        """Exchange weights and average, for an evaluation and back."""
        with torch.no_grad():
            for average, weight in zip(
                self.weights, self.draft.parameters(), strict=False
            ):
                kept = weight.clone()
                weight.copy_(average)
                average.copy_(kept)
