# SPDX-License-Identifier: Apache-2.0
"""The walk in Python, one request at a time."""

from __future__ import annotations

import torch


def walk_tree_reference(
    target_tokens: torch.Tensor,
    node_tokens: torch.Tensor,
    cu_num_logits: torch.Tensor,
    slots: torch.Tensor,
    parents: torch.Tensor,
    tree_len: torch.Tensor,
    num_reqs: int,
    invalid_drafts: torch.Tensor | None,
    sampled: torch.Tensor,
    num_sampled: torch.Tensor,
    path: torch.Tensor,
    rank_counts: torch.Tensor | None,
) -> None:
    starts = cu_num_logits[: num_reqs + 1].tolist()
    lengths = tree_len[:num_reqs].tolist()
    max_rows = path.shape[1]
    sampled[:num_reqs] = -1
    path[:num_reqs] = 0
    counts = [0] * num_reqs
    for req, slot in enumerate(slots[:num_reqs].tolist()):
        start, end = starts[req], starts[req + 1]
        if start == end:
            continue
        length = lengths[req] if slot >= 0 else 0
        targets = target_tokens[start:end].tolist()
        nodes = [0]
        if length > 0:
            drafts = node_tokens[start : start + length].tolist()
            node_parents = parents[slot, :length].tolist()
            if invalid_drafts is None:
                is_invalid = [False] * length
            else:
                is_invalid = invalid_drafts[start : start + length].tolist()
            while len(nodes) < max_rows:
                current = nodes[-1]
                child = next(
                    (
                        node
                        for node in range(current + 1, length)
                        if node_parents[node] == current
                        and drafts[node] == targets[current]
                        and not is_invalid[node]
                    ),
                    None,
                )
                if child is None:
                    break
                rank = node_parents[1:child].count(current)
                if rank_counts is not None and rank < rank_counts.shape[0]:
                    rank_counts[rank] += 1
                nodes.append(child)
        counts[req] = len(nodes)
        tokens = [targets[node] for node in nodes]
        sampled[req, : len(nodes)] = sampled.new_tensor(tokens)
        path[req, : len(nodes)] = path.new_tensor(nodes)
    num_sampled[:num_reqs] = num_sampled.new_tensor(counts)
