# SPDX-License-Identifier: Apache-2.0
"""What a draft would reach in serving, from its logits on known responses.

The responses are the target's greedy ones, so a drafted token is accepted where it
equals the response. Trees are those of the product: its candidates and its best-first
reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from vllm_dflash_kernels.topk_logprobs import topk_logprobs
from vllm_dflash_kernels.tree_build.reference import best_first
from vllm_dflash_training.blocks import make_blocks
from vllm_dflash_training.config import EvaluationOptions
from vllm_dflash_training.data import Responses
from vllm_dflash_training.forward import BlockForward


@dataclass
class Acceptance:
    """Acceptance of single blocks, the bonus token not counted."""

    # [num_blocks, depth], bool: the greedy draft is right, whatever came before it
    is_match: torch.Tensor
    # [num_blocks, depth], bool: the label is among the candidates
    is_recalled: torch.Tensor
    # [num_blocks], accepted by a chain
    chain: torch.Tensor
    # [num_blocks], accepted by a tree
    tree: torch.Tensor


@dataclass
class Totals:
    """Sums over blocks, as the progress bar and the log show them."""

    blocks: int = 0
    chain: float = 0.0
    tree: float = 0.0
    matches: torch.Tensor = field(default_factory=lambda: torch.zeros(0))
    recalls: torch.Tensor = field(default_factory=lambda: torch.zeros(0))
    valid: torch.Tensor = field(default_factory=lambda: torch.zeros(0))

    def add(self, acceptance: Acceptance, is_valid: torch.Tensor) -> None:
        """Add blocks. is_valid: [num_blocks, depth]"""
        if not self.blocks:
            depth = is_valid.shape[1]
            self.matches, self.recalls, self.valid = torch.zeros(3, depth)
        self.blocks += len(acceptance.chain)
        self.chain += float(acceptance.chain.sum())
        self.tree += float(acceptance.tree.sum())
        self.matches += (acceptance.is_match & is_valid).sum(0)
        self.recalls += (acceptance.is_recalled & is_valid).sum(0)
        self.valid += is_valid.sum(0)

    def summary(self) -> dict[str, object]:
        """Rates by depth; tokens of a round of chain and tree, the bonus included."""
        valid = self.valid.clamp(min=1)
        return {
            "match_by_depth": [round(x, 4) for x in (self.matches / valid).tolist()],
            "recall_by_depth": [round(x, 4) for x in (self.recalls / valid).tolist()],
            "chain": round(1 + self.chain / max(1, self.blocks), 4),
            "tree": round(1 + self.tree / max(1, self.blocks), 4),
        }


def block_acceptance(
    # [num_blocks, depth, vocab_size]
    logits: torch.Tensor,
    # [num_blocks, depth]
    labels: torch.Tensor,
    # [num_blocks, depth], bool
    is_valid: torch.Tensor,
    budget: int,
    max_children: int,
) -> Acceptance:
    """Count what chain and tree accept of each block.

    Tokens after the end of a response are never accepted: serving stops there.
    """
    num_blocks, depth, vocab_size = logits.shape
    tokens, logprobs = topk_logprobs(logits.reshape(-1, vocab_size), max_children)
    tokens = tokens.view(num_blocks, depth, -1).cpu()
    logprobs = logprobs.view(num_blocks, depth, -1).cpu()
    labels, is_valid = labels.cpu(), is_valid.cpu()
    is_hit = (tokens == labels[..., None]) & is_valid[..., None]
    is_match = is_hit[..., 0]
    chain = is_match.long().cumprod(1).sum(1)
    rank = torch.where(is_hit.any(-1), is_hit.long().argmax(-1), -1)
    tree = accepted_by_trees(logprobs.tolist(), rank.tolist(), budget)
    return Acceptance(is_match, is_hit.any(-1), chain, torch.tensor(tree))


def accepted_by_trees(
    # [num_blocks][depth][num_candidates], best first
    logprobs: list[list[list[float]]],
    # [num_blocks][depth], of the right tokens; -1: not among the candidates
    ranks: list[list[int]],
    budget: int,
) -> list[int]:
    """Count what the tree of each block accepts."""
    return [
        accepted_by_tree(best_first(rows, budget, False), right)
        for rows, right in zip(logprobs, ranks, strict=True)
    ]


def ranks_of_response(
    # [num_anchors, depth, ..., num_candidates]
    tokens: np.ndarray,
    # [num_anchors + 1], its anchors are all tokens but the last
    response: Sequence[int] | np.ndarray,
) -> np.ndarray:
    """Return each right token's place among the candidates, -1 if it is not one.

    Returns:
        [num_anchors, depth, ...]. Past the end of the response nothing is right.
    """
    right = np.full(tokens.shape[:2], -1)
    assert len(right) == len(response) - 1
    for anchor in range(len(right)):
        rest = response[anchor + 1 :][: right.shape[1]]
        right[anchor, : len(rest)] = rest
    hits = tokens == right.reshape(*right.shape, *[1] * (tokens.ndim - 2))
    return np.where(hits.any(-1), hits.argmax(-1), -1)


def accepted_by_tree(nodes: list[tuple[int, int, int]], ranks: list[int]) -> int:
    """Walk a tree along the ranks of the right tokens."""
    current, accepted = 0, 0
    for index, (parent, depth, rank) in enumerate(nodes, 1):
        # Parents come before their children, so one pass finds the whole path.
        if parent == current and rank == ranks[depth - 1]:
            current, accepted = index, depth
    return accepted


@torch.no_grad()
def evaluate(
    forward: BlockForward, responses: Responses, options: EvaluationOptions
) -> dict[str, object]:
    """Walk held-out responses as the engine would, and count tokens a round.

    The acceptance at every anchor of a response is known, so the walk of chain and
    tree are exact: a round at anchor j commits what is accepted and the bonus.
    """
    totals, rounds = Totals(), np.zeros((2, 2))
    order = np.argsort(responses.lens, kind="stable")
    for start in range(0, len(order), forward.num_seqs):
        indices = order[start : start + forward.num_seqs]
        batch = responses.batch(indices, 64)
        anchors_of = [
            range(int(p), int(n) - 1)
            for p, n in zip(batch.prompt_lens, batch.lens, strict=True)
        ]
        batch = batch.to(forward.device)
        longest, read = max(map(len, anchors_of)), forward.read(batch)
        accepted = [[] for _ in anchors_of]
        for first in range(0, longest, forward.num_blocks):
            anchors = batch.prompt_lens[:, None] + first
            anchors = anchors + torch.arange(forward.num_blocks, device=forward.device)
            is_used = anchors < batch.lens[:, None] - 1
            anchors = torch.minimum(anchors, batch.lens[:, None] - 1)
            blocks = make_blocks(batch, anchors, is_used, forward.shape.depth)
            # A compiled draft has a graph for training, and would make another one.
            with torch.set_grad_enabled(forward.is_compiled):
                hidden = forward.hidden(batch, anchors, read)[0].detach()
            for row in range(len(indices)):
                used = blocks.is_valid[row, :, 0]
                if not used.any():
                    continue
                found = block_acceptance(
                    forward.logits(hidden[row][used]),
                    blocks.labels[row][used],
                    blocks.is_valid[row][used],
                    options.budget,
                    options.max_children,
                )
                totals.add(found, blocks.is_valid[row][used].cpu())
                accepted[row] += zip(
                    found.chain.tolist(), found.tree.tolist(), strict=True
                )
        for row in accepted:
            for kind in (0, 1):
                rounds[kind] += walk([step[kind] for step in row])
    summary = totals.summary()
    # Over all anchors, against over those that a walk meets.
    for kind, name in enumerate(("chain", "tree")):
        tokens, steps = rounds[kind]
        summary[f"{name}_walk"] = round(float(tokens / max(1, steps)), 4)
    return summary


def walk(accepted: list[int]) -> tuple[int, int]:
    """Return committed tokens and rounds of one response."""
    position = rounds = 0
    while position < len(accepted):
        position += accepted[position] + 1
        rounds += 1
    return len(accepted), rounds
