# SPDX-License-Identifier: Apache-2.0
"""Answers drawn as vLLM draws them, and what a draft proposes at each token."""

import dataclasses
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch

from vllm_dflash_kernels.topk_logprobs.noise_reference import draw_noise_reference
from vllm_dflash_training.acceptance import evaluate, ranks_of_response
from vllm_dflash_training.config import EvaluationOptions
from vllm_dflash_training.data import Responses
from vllm_dflash_training.forward import BlockForward
from vllm_dflash_training.target import Target

# A node's score must be below that of its parent.
_HIGHEST = -1e-6
# Rows of the whole vocabulary that are in memory at a time.
_ROWS = 256


@dataclass(frozen=True)
class Sampling:
    """Options of a request, as in vLLM's SamplingParams; 0 is no top-k."""

    temperature: float
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        if self.temperature <= 0:
            raise ValueError(
                f"greedy requests draw nothing (got temperature {self.temperature}). "
                'A temperature above 0 is allowed. Type "temperature": 0.7'
            )


@dataclass
class Candidates:
    """What trees are built of at the anchors of one answer.

    Attributes:
        logprobs: Best first. [num_anchors, depth, num_candidates]
        ranks: Of the answer's token, -1: not among them. [num_anchors, depth]
    """

    logprobs: np.ndarray
    ranks: np.ndarray


@torch.no_grad()
def draw_answers(
    target: Target,
    prompts: list[list[int]],
    sampling: Sampling,
    max_tokens: int,
    ends: Collection[int],
) -> list[list[int]]:
    """Return an answer to each prompt, all at once; seeds are 1 and on.

    The token after position p is ``argmax(filtered(logits / T) + noise(seed, p))``.
    """
    number, longest = len(prompts), max(map(len, prompts))
    tokens = torch.zeros(number, longest, dtype=torch.long)
    mask = torch.zeros_like(tokens)
    for row, prompt in enumerate(prompts):
        tokens[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    seeds, cache = torch.arange(1, number + 1), None
    answers: list[list[int]] = [[] for _ in prompts]
    for _ in range(max_tokens):
        result = target.model(
            input_ids=tokens,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        cache, last = result.past_key_values, positions[:, -1]
        logits = filtered(result.logits[:, -1].float() / sampling.temperature, sampling)
        noise = draw_noise_reference(seeds, last, logits.shape[1])
        drawn = (logits + noise).argmax(-1)
        for answer, token in zip(answers, drawn.tolist(), strict=True):
            if not answer or answer[-1] not in ends:
                answer.append(token)
        if all(answer[-1] in ends for answer in answers):
            break
        tokens, positions = drawn[:, None], last[:, None] + 1
        mask = torch.cat([mask, torch.ones_like(tokens)], 1)
    return answers


def filtered(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Mask what the filters leave out of [num_rows, vocab_size], in vLLM's order."""
    if sampling.min_p:
        lowest = logits.amax(-1, keepdim=True) + math.log(sampling.min_p)
        logits = logits.masked_fill(logits < lowest, -torch.inf)
    rows = len(logits)
    k = torch.full((rows,), sampling.top_k) if sampling.top_k else None
    p = torch.full((rows,), sampling.top_p) if sampling.top_p < 1 else None
    return apply_top_k_top_p_pytorch(logits, k, p, allow_cpu_sync=True)


class NoiseRecorder(BlockForward):
    """Keeps the candidates of every row whose logits are asked for, by weight."""

    def __init__(self, *args: Any, weights: Sequence[float], num_candidates: int):
        super().__init__(*args)
        self.weights = tuple(weights)
        self.num_candidates = num_candidates
        self._temperature, self._seed, self._anchor = 0.0, 0, 0
        self._found: list[tuple[torch.Tensor, torch.Tensor]] = []

    def record(
        self,
        prompt: list[int],
        answer: list[int],
        seed: int,
        temperature: float,
        options: EvaluationOptions,
    ) -> dict[float, Candidates]:
        """Run the draft at each token of an answer but the last.

        Returns:
            By weight: log-probabilities of ``logits + weight * T * noise``.
        """
        assert self.num_seqs == 1, "anchors are met in their order"
        self._temperature, self._seed = temperature, seed
        # Position of the first token of the answer, which the prompt gives.
        self._anchor, self._found = len(prompt), []
        # A node is enough: its trees are not looked at.
        options = dataclasses.replace(options, budget=1)
        evaluate(self, Responses([(prompt, answer)]), options)
        tokens, logprobs = (
            torch.cat(rows).numpy() for rows in zip(*self._found, strict=True)
        )
        ranks = ranks_of_response(tokens, answer)
        return {
            weight: Candidates(logprobs[:, :, place], ranks[:, :, place])
            for place, weight in enumerate(self.weights)
        }

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the draft's logits. [num_anchors, depth, vocab_size]"""
        logits = super().logits(hidden).float()
        number, depth, vocab_size = logits.shape
        # What a draft at anchor a proposes for a + 1 + d is drawn after position a + d.
        anchors = torch.arange(self._anchor, self._anchor + number)
        positions = (anchors[:, None] + torch.arange(depth)).flatten()
        self._anchor += number
        parts = zip(
            logits.view(-1, vocab_size).split(_ROWS),
            positions.split(_ROWS),
            strict=True,
        )
        tokens, logprobs = zip(*(self._best(*part) for part in parts), strict=True)
        shape = (number, depth, len(self.weights), self.num_candidates)
        self._found.append(
            (torch.cat(tokens).view(shape), torch.cat(logprobs).view(shape))
        )
        return logits

    def _best(
        self, logits: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens, log-probabilities; each [num_rows, num_weights, num_candidates]."""
        seeds = torch.full_like(positions, self._seed)
        noise = draw_noise_reference(seeds, positions, logits.shape[1])
        tokens, logprobs = [], []
        for weight in self.weights:
            sums = logits + weight * self._temperature * noise
            best, found = sums.topk(self.num_candidates, -1)
            total = sums.logsumexp(-1, keepdim=True)
            tokens.append(found)
            logprobs.append((best - total).clamp(max=_HIGHEST))
        return torch.stack(tokens, 1), torch.stack(logprobs, 1)
