# SPDX-License-Identifier: Apache-2.0
"""build_tree against the enumeration of every prefix, and hand-written trees."""

import itertools
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from vllm_dflash_kernels.testing import (
    POISON_INT,
    TreeBuffers,
    ancestor_matrix,
    pack_bits,
    poisoned,
    random_candidates,
)
from vllm_dflash_kernels.tree_build import build_tree

INF = float("inf")


@dataclass
class Trees:
    buffers: TreeBuffers
    draft_tokens: torch.Tensor

    def nodes(self, req: int, slot: int) -> list[tuple[int, int, int]]:
        """(parent, depth, token) of the drafted nodes."""
        used = int(self.buffers.num_nodes[slot])
        return list(
            zip(
                self.buffers.parents[slot, 1:used].tolist(),
                self.buffers.depths[slot, 1:used].tolist(),
                self.draft_tokens[req, : used - 1].tolist(),
                strict=True,
            )
        )


def build(
    tokens, logprobs, *, depth, budget, impl, slots=None, num_slots=None, chain=()
):
    num_reqs = tokens.shape[0] // depth
    slots = list(range(num_reqs)) if slots is None else slots
    num_slots = num_slots or num_reqs
    device = tokens.device
    buffers = TreeBuffers.allocate(num_slots, budget, device)
    draft_tokens = poisoned(num_reqs, budget, dtype=torch.int64, device=device)
    chain_only = torch.zeros(num_slots, dtype=torch.uint8, device=device)
    chain_only[list(chain)] = 1
    row_to_slot = torch.tensor(slots, device=device).repeat_interleave(depth)
    build_tree(
        tokens,
        logprobs,
        row_to_slot,
        num_reqs=num_reqs,
        depth=depth,
        **vars(buffers),
        chain_only=chain_only,
        draft_tokens=draft_tokens,
        impl=impl,
    )
    return Trees(buffers, draft_tokens)


def enumerate_best(tokens, logprobs, budget):
    """The best prefixes of one request, from a sort of all that exist."""
    depth, num_ranks = len(logprobs), len(logprobs[0])
    logprobs = np.asarray(logprobs, dtype=np.float32)
    prefixes = []
    for length in range(1, depth + 1):
        for ranks in itertools.product(range(num_ranks), repeat=length):
            score, order, key = np.float32(0), [], ()
            for d, rank in enumerate(ranks):
                score = np.float32(score + logprobs[d, rank])
                key = (-score, d + 1, rank, key)
                order.append(score)
            if all(s > -INF for s in order):
                prefixes.append((key, ranks))
    prefixes.sort(key=lambda prefix: prefix[0])
    chosen = [ranks for _, ranks in prefixes[:budget]]
    index = {(): 0} | {ranks: i for i, ranks in enumerate(chosen, 1)}
    return [
        (index[ranks[:-1]], len(ranks), tokens[len(ranks) - 1][ranks[-1]])
        for ranks in chosen
    ]


def check_padding_and_bits(trees, req, slot):
    """What must hold beyond the used nodes, and the ancestors of all."""
    buffers = trees.buffers
    used = int(buffers.num_nodes[slot])
    parents = buffers.parents[slot].tolist()
    assert parents[0] == -1 and buffers.depths[slot, 0] == 0
    assert set(parents[used:]) <= {-2}
    assert not buffers.depths[slot, used:].any()
    assert not trees.draft_tokens[req, used - 1 :].any()
    assert torch.equal(
        buffers.ancestors[slot].cpu(), pack_bits(ancestor_matrix(parents))
    )


def check_against_enumeration(tokens, logprobs, depth, budget, impl):
    trees = build(tokens, logprobs, depth=depth, budget=budget, impl=impl)
    for req in range(tokens.shape[0] // depth):
        rows = slice(req * depth, (req + 1) * depth)
        expected = enumerate_best(
            tokens[rows].tolist(), logprobs[rows].tolist(), budget
        )
        assert trees.nodes(req, req) == expected
        check_padding_and_bits(trees, req, req)


@pytest.mark.parametrize(
    ("vocab_size", "depth", "budget"),
    [
        (3, 4, 1),
        (3, 4, 7),
        (4, 3, 20),
        (5, 2, 17),
        (2, 5, 62),  # all nodes that exist
        (3, 3, 60),  # more than exist
        (1, 4, 6),
        (4, 1, 3),
    ],
)
def test_emits_the_best_of_all_prefixes(vocab_size, depth, budget, impl, device):
    generator = torch.Generator().manual_seed(budget)
    tokens, logprobs = random_candidates(
        2 * depth, vocab_size, vocab_size, generator, device
    )
    check_against_enumeration(tokens, logprobs, depth, budget, impl)


@pytest.mark.parametrize("budget", [5, 13, 40])
def test_ties_follow_the_documented_order(budget, impl, device):
    generator = torch.Generator().manual_seed(budget)
    logprobs = -torch.randint(0, 3, (12, 3), generator=generator).float()
    logprobs = logprobs.sort(-1, descending=True).values.to(device)
    tokens = torch.arange(36, dtype=torch.int32, device=device).view(12, 3)
    check_against_enumeration(tokens, logprobs, 4, budget, impl)


def test_equal_logits_fill_the_tree_in_breadth(impl, device):
    tokens = torch.tensor([[10, 11], [20, 21], [30, 31]], device=device).int()
    logprobs = torch.full((3, 2), -0.5, device=device)
    trees = build(tokens, logprobs, depth=3, budget=8, impl=impl)
    # Equal depth means equal score: by rank, then by parent.
    assert trees.nodes(0, 0) == [
        (0, 1, 10),
        (0, 1, 11),
        (1, 2, 20),
        (2, 2, 20),
        (1, 2, 21),
        (2, 2, 21),
        (3, 3, 30),
        (4, 3, 30),
    ]


def test_certain_tokens_come_before_their_equals(impl, device):
    tokens = torch.tensor([[1, 2], [3, 4]], device=device).int()
    logprobs = torch.tensor([[0.0, -0.0], [0.0, -1.0]], device=device)
    trees = build(tokens, logprobs, depth=2, budget=6, impl=impl)
    assert trees.nodes(0, 0) == [
        (0, 1, 1),
        (0, 1, 2),
        (1, 2, 3),
        (2, 2, 3),
        (1, 2, 4),
        (2, 2, 4),
    ]


def test_impossible_prefixes_are_never_emitted(impl, device):
    tokens = torch.arange(18, dtype=torch.int32, device=device).view(6, 3)
    logprobs = torch.tensor(
        [
            [-0.5, -1.0, -INF],
            [-0.1, -INF, -INF],
            [-INF, -INF, -INF],
            [-INF, -INF, -INF],
            [-0.1, -0.2, -0.3],
            [-0.1, -0.2, -0.3],
        ],
        device=device,
    )
    logprobs[2, 0] = torch.nan
    trees = build(tokens, logprobs, depth=3, budget=20, impl=impl)
    assert trees.nodes(0, 0) == [(0, 1, 0), (1, 2, 3), (0, 1, 1), (3, 2, 3)]
    assert trees.buffers.num_nodes.tolist() == [5, 1]
    check_padding_and_bits(trees, 0, 0)
    check_padding_and_bits(trees, 1, 1)


def test_sums_that_overflow_are_impossible(impl, device):
    tokens = torch.ones(3, 1, dtype=torch.int32, device=device)
    logprobs = torch.full((3, 1), -3e38, device=device)
    trees = build(tokens, logprobs, depth=3, budget=4, impl=impl)
    assert trees.nodes(0, 0) == [(0, 1, 1)]


def test_prefix_of_the_nodes_is_the_smaller_tree(impl, device):
    generator = torch.Generator().manual_seed(4)
    tokens, logprobs = random_candidates(6, 4, 50, generator, device)
    logprobs = (logprobs * 2).round() / 2  # some ties
    largest = build(tokens, logprobs, depth=6, budget=24, impl=impl).nodes(0, 0)
    assert len(largest) == 24
    for budget in (1, 2, 3, 8, 15, 16, 17, 23):
        smaller = build(tokens, logprobs, depth=6, budget=budget, impl=impl)
        assert smaller.nodes(0, 0) == largest[:budget]


@pytest.mark.parametrize(("budget", "expected_nodes"), [(3, 3), (5, 5), (9, 5)])
def test_chain_has_one_branch_of_best_candidates(budget, expected_nodes, impl, device):
    tokens = torch.arange(12, dtype=torch.int32, device=device).view(6, 2)
    logprobs = torch.full((6, 2), -0.1, device=device)
    logprobs[5] = -INF
    trees = build(tokens, logprobs, depth=6, budget=budget, impl=impl, chain=[0])
    assert trees.nodes(0, 0) == [(i, i + 1, 2 * i) for i in range(expected_nodes)]
    check_padding_and_bits(trees, 0, 0)


def test_only_the_slots_of_the_batch_are_written(impl, device):
    generator = torch.Generator().manual_seed(5)
    tokens, logprobs = random_candidates(9, 3, 20, generator, device)
    trees = build(
        tokens,
        logprobs,
        depth=3,
        budget=6,
        impl=impl,
        slots=[4, -1, 1],
        num_slots=6,
        chain=[1],
    )
    assert not trees.draft_tokens[1].any()
    for req, slot in ((0, 4), (2, 1)):
        check_padding_and_bits(trees, req, slot)
    alone = build(tokens[:3], logprobs[:3], depth=3, budget=6, impl=impl)
    assert trees.nodes(0, 4) == alone.nodes(0, 0)
    assert trees.nodes(2, 1) == [(i, i + 1, int(tokens[6 + i, 0])) for i in range(3)]
    for buffer in vars(trees.buffers).values():
        assert (buffer[[0, 2, 3, 5]] == POISON_INT).all()


def test_draft_rows_may_be_wider_than_the_tree(impl, device):
    tokens = torch.tensor([[7], [8]], device=device).int()
    logprobs = torch.zeros(2, 1, device=device)
    buffers = TreeBuffers.allocate(1, 3, device)
    storage = poisoned(2, 10, dtype=torch.int64, device=device)
    build_tree(
        tokens,
        logprobs,
        torch.zeros(2, dtype=torch.int64, device=device),
        num_reqs=1,
        depth=2,
        **vars(buffers),
        chain_only=torch.zeros(1, dtype=torch.uint8, device=device),
        draft_tokens=storage[:, :3],
        impl=impl,
    )
    assert storage[0, :3].tolist() == [7, 8, 0]
    assert (storage[0, 3:] == POISON_INT).all() and (storage[1] == POISON_INT).all()


@pytest.mark.parametrize("budget", [63, 64, 127, 200])
def test_ancestor_bits_fill_several_words(budget, impl, device):
    generator = torch.Generator().manual_seed(budget)
    tokens, logprobs = random_candidates(30, 8, 100, generator, device)
    trees = build(tokens, logprobs, depth=15, budget=budget, impl=impl)
    for req in range(2):
        assert trees.buffers.num_nodes[req] == budget + 1
        check_padding_and_bits(trees, req, req)
    assert not torch.equal(trees.buffers.parents[0], trees.buffers.parents[1])


def test_large_tied_trees_equal_the_reference(device):
    generator = torch.Generator().manual_seed(6)
    tokens, logprobs = random_candidates(15, 8, 100, generator, device)
    logprobs = logprobs.round()
    trees = [
        build(tokens, logprobs, depth=15, budget=150, impl=impl)
        for impl in ("reference", "triton")
    ]
    assert torch.equal(trees[0].draft_tokens, trees[1].draft_tokens)
    for name, buffer in vars(trees[0].buffers).items():
        assert torch.equal(buffer, getattr(trees[1].buffers, name)), name


def test_smaller_batch_leaves_nothing_of_the_larger(impl, device):
    generator = torch.Generator().manual_seed(7)
    tokens, logprobs = random_candidates(12, 4, 30, generator, device)
    buffers = TreeBuffers.allocate(3, 12, device)
    draft_tokens = poisoned(3, 12, dtype=torch.int64, device=device)
    slots = torch.tensor([2, 0, 1], device=device).repeat_interleave(4)

    def run(num_reqs, logprobs):
        build_tree(
            tokens,
            logprobs,
            slots,
            num_reqs=num_reqs,
            depth=4,
            **vars(buffers),
            chain_only=torch.zeros(3, dtype=torch.uint8, device=device),
            draft_tokens=draft_tokens,
            impl=impl,
        )

    run(3, logprobs)
    kept = [buffer[:2].clone() for buffer in vars(buffers).values()]
    few = logprobs.clone()
    few[:, 1:] = -INF
    run(1, few)
    trees = Trees(buffers, draft_tokens)
    assert trees.nodes(0, 2) == [(i, i + 1, int(tokens[i, 0])) for i in range(4)]
    check_padding_and_bits(trees, 0, 2)
    for before, buffer in zip(kept, vars(buffers).values(), strict=True):
        assert torch.equal(before, buffer[:2])


def test_largest_tree_fits_the_packing(impl, device):
    # Depth 255 and parent 254 in a chain, rank 31 in a bush.
    tokens = torch.arange(255, dtype=torch.int32, device=device).view(255, 1)
    logprobs = torch.zeros(255, 1, device=device)
    chain = build(tokens, logprobs, depth=255, budget=255, impl=impl)
    assert chain.nodes(0, 0) == [(i, i + 1, i) for i in range(255)]
    check_padding_and_bits(chain, 0, 0)
    tokens = torch.arange(32, dtype=torch.int32, device=device).view(1, 32)
    logprobs = -torch.arange(32.0, device=device).view(1, 32)
    bush = build(tokens, logprobs, depth=1, budget=40, impl=impl)
    assert bush.nodes(0, 0) == [(0, 1, i) for i in range(32)]


def test_sizes_past_the_packing_are_refused(device):
    tokens = torch.zeros(1, 1, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="at most 255 nodes"):
        build(tokens, tokens.float(), depth=1, budget=256, impl="auto")
