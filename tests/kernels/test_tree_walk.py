# SPDX-License-Identifier: Apache-2.0
"""walk_tree on hand-written trees and against a recursive walk."""

import random

import pytest
import torch

from vllm_dflash_kernels.testing import (
    POISON_INT,
    TreeBuffers,
    poisoned,
    random_tree,
)
from vllm_dflash_kernels.tree_walk import walk_tree

# 0 -> 1 (token 5), 2 (6); 1 -> 3 (5), 5 (7); 3 -> 4 (9); 2 -> 6 (5)
PARENTS = [-1, 0, 0, 1, 3, 1, 2]
TOKENS = [1, 5, 6, 5, 9, 7, 5]


def walk(
    trees, targets, tokens, impl, device, *, max_depth, lengths=None, invalid=None,
    budget=None, slots=None, rank_counts=None,
):  # fmt: skip
    """One request a tree, in slots counting down; returns (sampled, path) lists."""
    num_reqs = len(trees)
    budget = budget or max(len(tree) for tree in trees) - 1
    slots = slots or list(range(num_reqs, 0, -1))
    buffers = TreeBuffers.allocate(num_reqs + 2, budget, device)
    # What a read of slot -1 would find.
    buffers.set_tree(0, trees[0])
    for slot, tree in zip(slots, trees, strict=True):
        if slot >= 0:
            buffers.set_tree(slot + 1, tree)
    lengths = lengths or [len(tree) for tree in trees]
    starts = [0]
    for row in targets:
        starts.append(starts[-1] + len(row))

    def flat(rows, dtype):
        return torch.tensor(sum(rows, []), dtype=dtype, device=device)

    sampled = poisoned(num_reqs + 1, budget + 1, dtype=torch.int64, device=device)
    num_sampled = poisoned(num_reqs + 1, dtype=torch.int32, device=device)
    path = poisoned(num_reqs + 1, max_depth + 1, dtype=torch.int32, device=device)
    walk_tree(
        flat(targets, torch.int64),
        flat(tokens, torch.int32),
        torch.tensor(starts, dtype=torch.int32, device=device),
        torch.tensor(slots, device=device),
        buffers.parents[1:],
        torch.tensor(lengths, dtype=torch.int32, device=device),
        invalid_drafts=None if invalid is None else flat(invalid, torch.bool),
        sampled=sampled,
        num_sampled=num_sampled,
        path=path,
        rank_counts=rank_counts,
        impl=impl,
    )
    for output in (sampled, num_sampled, path):
        assert (output[num_reqs] == POISON_INT).all()
    results = []
    for req, count in enumerate(num_sampled[:num_reqs].tolist()):
        assert (sampled[req, count:] == -1).all() and not path[req, count:].any()
        results.append((sampled[req, :count].tolist(), path[req, :count].tolist()))
    return results


@pytest.mark.parametrize(
    ("targets", "expected_tokens", "expected_path"),
    [
        # the root's token matches no child
        ([8, 5, 5, 5, 5, 5, 5], [8], [0]),
        # first branch to its end
        ([5, 5, 0, 9, 4, 0, 0], [5, 5, 9, 4], [0, 1, 3, 4]),
        # second child of the first child
        ([5, 7, 0, 9, 4, 2, 0], [5, 7, 2], [0, 1, 5]),
        # second child of the root, past nodes of the other branch
        ([6, 5, 5, 9, 9, 7, 3], [6, 5, 3], [0, 2, 6]),
        # a deep node's token equals another branch's only
        ([5, 6, 5, 9, 9, 7, 3], [5, 6], [0, 1]),
    ],
)
def test_walk_by_hand(targets, expected_tokens, expected_path, impl, device):
    [result] = walk([PARENTS], [targets], [TOKENS], impl, device, max_depth=4)
    assert result == (expected_tokens, expected_path)


def test_full_chain_ends_with_the_bonus(impl, device):
    chain = [-1, 0, 1, 2, 3]
    [result] = walk(
        [chain], [[1, 2, 3, 4, 5]], [[0, 1, 2, 3, 4]], impl, device, max_depth=4
    )
    assert result == ([1, 2, 3, 4, 5], [0, 1, 2, 3, 4])


def test_path_stops_at_the_draft_depth(impl, device):
    chain = [-1, 0, 1, 2, 3]
    [result] = walk(
        [chain], [[1, 2, 3, 4, 5]], [[0, 1, 2, 3, 4]], impl, device, max_depth=2
    )
    assert result == ([1, 2, 3], [0, 1, 2])


def test_root_only_tree_emits_one_token(impl, device):
    [result] = walk(
        [[-1]], [[7]], [[3]], impl, device, max_depth=3, budget=4, lengths=[1]
    )
    assert result == ([7], [0])


def test_batch_of_different_trees_and_none(impl, device):
    results = walk(
        trees=[PARENTS, [-1, 0], PARENTS, PARENTS, PARENTS],
        # the third has drafts but no tree, the fourth no slot, the last no logits
        targets=[[6, 0, 5, 0, 0, 0, 1], [4, 2], [5, 5, 0, 9, 4, 0, 0], [5, 5], []],
        tokens=[TOKENS, [0, 4], TOKENS, TOKENS[:2], []],
        lengths=[7, 2, 0, 2, 0],
        slots=[5, 4, 3, -1, 1],
        impl=impl,
        device=device,
        max_depth=4,
    )
    assert results == [
        ([6, 5, 1], [0, 2, 6]),
        ([4, 2], [0, 1]),
        ([5], [0]),
        ([5], [0]),
        ([], []),
    ]


def test_nodes_past_tree_len_are_not_followed(impl, device):
    targets = [5, 5, 0, 9]
    [result] = walk(
        [PARENTS], [targets], [TOKENS[:4]], impl, device, max_depth=4, lengths=[4]
    )
    assert result == ([5, 5, 9], [0, 1, 3])


def test_padded_nodes_are_never_accepted(impl, device):
    # The tree has three nodes, the step six rows; padding carries token 0.
    [result] = walk(
        [[-1, 0, 1]], [[5, 0, 0, 0, 0, 0]], [[1, 5, 6, 0, 0, 0]], impl, device,
        max_depth=5, budget=5, lengths=[6],
    )  # fmt: skip
    assert result == ([5, 0], [0, 1])


def test_invalid_drafts_end_the_path(impl, device):
    invalid = [False, False, False, True, False, False, False]
    [result] = walk(
        [PARENTS], [[5, 5, 0, 9, 4, 0, 0]], [TOKENS], impl, device,
        max_depth=4, invalid=[invalid],
    )  # fmt: skip
    assert result == ([5, 5], [0, 1])


def test_accepted_nodes_are_counted_by_rank(impl, device):
    counts = torch.tensor([100, 0, 7], device=device)
    slots = [3, 2, 1, -1]
    walk(
        # Node 2 is the second child of the root, 5 of node 1, 4 the fourth of a root.
        trees=[PARENTS, PARENTS, [-1, 0, 0, 0, 0], PARENTS],
        targets=[[6, 5, 5, 9, 9, 7, 3], [5, 7, 0, 9, 4, 2, 0], [8, 0, 0, 0, 0], [5]],
        tokens=[TOKENS, TOKENS, [1, 5, 6, 7, 8], TOKENS[:1]],
        slots=slots,
        impl=impl,
        device=device,
        max_depth=4,
        rank_counts=counts,
    )
    # Paths 0-2-6, 0-1-5, and 0-4, whose rank 3 has no counter.
    assert counts.tolist() == [102, 2, 7]


def recursive_walk(parents, tokens, targets, invalid, node, rows_left):
    if rows_left > 1:
        for child, parent in enumerate(parents):
            if parent == node and tokens[child] == targets[node] and not invalid[child]:
                rest = recursive_walk(
                    parents, tokens, targets, invalid, child, rows_left - 1
                )
                return [node, *rest]
    return [node]


def random_case(rng, num_nodes):
    parents = random_tree(num_nodes, rng)
    tokens = [rng.randrange(3)]
    taken = {}
    for node in range(1, num_nodes):
        used = taken.setdefault(parents[node], set())
        # Siblings differ; few tokens, so that matches are common.
        token = rng.choice([t for t in range(len(used) + 2) if t not in used])
        used.add(token)
        tokens.append(token)
    targets = []
    for node in range(num_nodes):
        children = [tokens[c] for c in range(num_nodes) if parents[c] == node]
        targets.append(rng.choice([*children, *children, 99]))
    return parents, tokens, targets


@pytest.mark.parametrize("num_nodes", [2, 7, 33, 65, 201])
def test_random_trees_match_the_recursive_walk(num_nodes, impl, device):
    rng = random.Random(num_nodes)
    cases = [random_case(rng, num_nodes) for _ in range(4)]
    invalid = [[rng.random() < 0.1 for _ in range(num_nodes)] for _ in cases]
    results = walk(
        [case[0] for case in cases],
        [case[2] for case in cases],
        [case[1] for case in cases],
        impl,
        device,
        max_depth=7,
        budget=max(num_nodes - 1, 7),
        invalid=invalid,
    )
    for (parents, tokens, targets), flags, result in zip(
        cases, invalid, results, strict=True
    ):
        nodes = recursive_walk(parents, tokens, targets, flags, 0, 8)
        assert result == ([targets[node] for node in nodes], nodes)
