# SPDX-License-Identifier: Apache-2.0
"""Best-first tree with a heap on the host: the meaning, and the CPU path."""

from __future__ import annotations

import ctypes
import heapq
import math

import torch


def _add_fp32(a: float, b: float) -> float:
    # Two fp32 values added in fp64 and rounded once are the fp32 sum.
    return ctypes.c_float(a + b).value


def build_tree_reference(
    cand_tokens: torch.Tensor,
    cand_logprobs: torch.Tensor,
    slots: torch.Tensor,
    num_reqs: int,
    depth: int,
    parents: torch.Tensor,
    depths: torch.Tensor,
    ancestors: torch.Tensor,
    num_nodes: torch.Tensor,
    chain_only: torch.Tensor,
    draft_tokens: torch.Tensor,
) -> None:
    num_rows = num_reqs * depth
    budget = parents.shape[1] - 1
    all_tokens = cand_tokens[:num_rows].tolist()
    all_logprobs = cand_logprobs[:num_rows].tolist()
    is_chain = chain_only.tolist()
    draft_tokens[:num_reqs] = 0
    for req, slot in enumerate(slots[:num_rows:depth].tolist()):
        if slot < 0:
            continue
        rows = slice(req * depth, (req + 1) * depth)
        nodes = best_first(all_logprobs[rows], budget, bool(is_chain[slot]))
        tokens = all_tokens[rows]
        _write_tree(nodes, slot, parents, depths, ancestors)
        num_nodes[slot] = len(nodes) + 1
        if nodes:
            draft_tokens[req, : len(nodes)] = draft_tokens.new_tensor(
                [tokens[node_depth - 1][rank] for _, node_depth, rank in nodes]
            )


def best_first(
    logprobs: list[list[float]], budget: int, chain_only: bool
) -> list[tuple[int, int, int]]:
    """Return (parent, depth, rank) of up to ``budget`` nodes, best first."""
    num_depths, num_ranks = len(logprobs), 1 if chain_only else len(logprobs[0])
    # Heap entries are (-score, depth, rank, parent, parent's score).
    frontier: list[tuple[float, int, int, int, float]] = []

    def push(depth: int, rank: int, parent: int, parent_score: float) -> None:
        if depth > num_depths or rank >= num_ranks:
            return
        score = _add_fp32(parent_score, logprobs[depth - 1][rank])
        if score > -math.inf:
            heapq.heappush(frontier, (-score, depth, rank, parent, parent_score))

    nodes: list[tuple[int, int, int]] = []
    push(1, 0, 0, 0.0)
    while frontier and len(nodes) < budget:
        negative, depth, rank, parent, parent_score = heapq.heappop(frontier)
        nodes.append((parent, depth, rank))
        # A prefix is pushed once: after its lower-rank sibling, or after its parent.
        push(depth, rank + 1, parent, parent_score)
        push(depth + 1, 0, len(nodes), -negative)
    return nodes


def _write_tree(
    nodes: list[tuple[int, int, int]],
    slot: int,
    parents: torch.Tensor,
    depths: torch.Tensor,
    ancestors: torch.Tensor,
) -> None:
    width, words = ancestors.shape[1:]
    num_unused = width - 1 - len(nodes)
    bits = [1]
    for index, (parent, _, _) in enumerate(nodes, 1):
        bits.append(bits[parent] | 1 << index)
    bits.extend(1 << index for index in range(len(nodes) + 1, width))
    parents[slot] = parents.new_tensor(
        [-1, *(node[0] for node in nodes), *[-2] * num_unused]
    )
    depths[slot] = depths.new_tensor(
        [0, *(node[1] for node in nodes), *[0] * num_unused]
    )
    ancestors[slot] = ancestors.new_tensor(
        [[_signed_word(row >> 64 * word) for word in range(words)] for row in bits]
    )


def _signed_word(bits: int) -> int:
    word = bits & (1 << 64) - 1
    return word - (1 << 64) if word >> 63 else word
