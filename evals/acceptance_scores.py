# SPDX-License-Identifier: Apache-2.0
"""Other ways to score a draft's candidates, for experiments in an engine's process.

A rule replaces ``TreeBuilder.collect_candidates``. The tokens that a request's top-k
and top-p would leave of the draft's own distribution are the *survivors* of a row:
their probabilities are divided by the sum of all of them, every other token has
probability zero and gets no node. `docs/sampling.md` has what came of it.
"""

from typing import Any

import torch

# Rule -> whether the draft's distribution is taken at the request's temperature.
RULES = {"survivors at 1": False, "survivors at the temperature": True}
# A row's tokens that are sorted. A nucleus of more of them has a mass of at most one
# token's probability above top-p.
_MAX_SURVIVORS = 1024


def survivor_logprobs(
    # [num_rows, vocab_size]
    logits: torch.Tensor,
    # [num_rows], fp32; 0: greedy, taken at 1
    temperature: torch.Tensor,
    # [num_rows], int
    top_k: torch.Tensor,
    # [num_rows], fp32
    top_p: torch.Tensor,
    num_candidates: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Best tokens of each row and their log-probabilities among the survivors.

    As in vLLM top-k comes first, top-p counts in what it left, and a token survives if
    those before it have less than top-p together. -inf marks a token that does not.
    """
    scale = torch.where(temperature > 0, temperature, 1.0)
    probs = (logits.float() / scale[:, None]).softmax(-1)
    width = min(_MAX_SURVIVORS, probs.shape[-1])
    probs, tokens = probs.topk(width, dim=-1)
    in_top_k = torch.arange(width, device=logits.device) < top_k[:, None]
    mass = torch.where(top_k < width, (probs * in_top_k).sum(-1), 1.0)
    probs = torch.where(in_top_k, probs / mass[:, None], 0.0)
    before = probs.cumsum(-1) - probs
    survives = in_top_k & (before < top_p[:, None])
    mass = (probs * survives).sum(-1)
    # More survivors than were sorted.
    mass = torch.where(survives[:, -1], torch.maximum(mass, top_p), mass)
    logprobs = (probs / mass[:, None]).log()
    logprobs = logprobs.masked_fill(~survives, float("-inf"))
    return tokens[:, :num_candidates], logprobs[:, :num_candidates]


def install(rule: str) -> None:
    """Score candidates by a rule in all engines that this process makes from now on."""
    from vllm_dflash.runner.model_state import DDTreeModelState
    from vllm_dflash.tree.builder import TreeBuilder

    at_temperature = RULES[rule]
    custom_sampler = DDTreeModelState.custom_sampler
    states: Any = None

    def remember_states(self: Any, sampler: Any) -> Any:
        nonlocal states
        states = sampler.sampling_states
        return custom_sampler(self, sampler)

    def collect_candidates(
        self: Any,
        logits: torch.Tensor,
        row_to_slot: torch.Tensor,
        temperature: torch.Tensor,
        *noise: torch.Tensor,
    ) -> torch.Tensor:
        slots = row_to_slot.clamp(min=0)
        scale = temperature[slots]
        tokens, logprobs = survivor_logprobs(
            logits,
            scale if at_temperature else torch.zeros_like(scale),
            states.top_k.gpu[slots],
            states.top_p.gpu[slots],
            self.max_children,
        )
        self.cand_tokens[: len(logits)].copy_(tokens)
        self.cand_logprobs[: len(logits)].copy_(logprobs)
        return tokens[:, 0]

    DDTreeModelState.custom_sampler = remember_states  # type: ignore[method-assign]
    TreeBuilder.collect_candidates = collect_candidates  # type: ignore[method-assign]
