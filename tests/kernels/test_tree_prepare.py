# SPDX-License-Identifier: Apache-2.0
"""prepare_tree_step on hand-written and random batches."""

import random

import pytest
import torch

from vllm_dflash_kernels.testing import (
    POISON_INT,
    TreeBuffers,
    ancestor_matrix,
    pack_bits,
    poisoned,
    random_tree,
)
from vllm_dflash_kernels.tree_prepare import prepare_tree_step


def prepare(buffers, slots, query_lens, num_logits, impl, *, padded=None, first=100):
    """Run on positions counting up within each request from `first`."""
    device = buffers.parents.device
    num_reqs, width = len(slots), buffers.parents.shape[1]
    padded = padded or num_reqs
    starts = [0]
    for length in query_lens:
        starts.append(starts[-1] + length)
    cu_num_logits = [0]
    for count in num_logits:
        cu_num_logits.append(cu_num_logits[-1] + count)
    positions = torch.cat(
        [first * (i + 1) + torch.arange(n) for i, n in enumerate(query_lens)]
        + [torch.full((5,), POISON_INT)]
    ).to(device)
    words = buffers.ancestors.shape[2]
    batch_ancestors = poisoned(padded, width, words, dtype=torch.int64, device=device)
    tree_len = poisoned(padded + 1, dtype=torch.int32, device=device)
    prefix_len = poisoned(padded + 1, dtype=torch.int32, device=device)
    first_positions = positions[torch.tensor(starts[:-1], device=device)].tolist()

    def ints(values):
        return torch.tensor(values, dtype=torch.int32, device=device)

    prepare_tree_step(
        torch.tensor(slots, device=device),
        ints(starts + [starts[-1]] * (padded - num_reqs)),
        ints(cu_num_logits),
        num_reqs=num_reqs,
        num_reqs_padded=padded,
        depths=buffers.depths,
        ancestors=buffers.ancestors,
        num_nodes=buffers.num_nodes,
        positions=positions,
        batch_ancestors=batch_ancestors,
        tree_len=tree_len,
        prefix_len=prefix_len,
        impl=impl,
    )
    assert tree_len[padded] == prefix_len[padded] == POISON_INT
    assert prefix_len[:padded].tolist() == first_positions + [0] * (padded - num_reqs)
    assert (positions[-5:] == POISON_INT).all()
    return positions[:-5].tolist(), tree_len[:padded].tolist(), batch_ancestors


def test_mixed_batch_by_hand(impl, device):
    buffers = TreeBuffers.allocate(5, 5, device)
    buffers.set_tree(3, [-1, 0, 0, 1, 3, 2])  # depths 0 1 1 2 3 2
    buffers.set_tree(1, [-1, 0, 1])  # depths 0 1 2
    buffers.num_nodes[0] = 0
    positions, tree_len, batch_ancestors = prepare(
        buffers,
        slots=[3, 0, 1, 3, 1, -1],
        # tree; prefill; tree smaller than its draft rows; one row of a tree slot;
        # truncated tree behind two rows of its own; inert
        query_lens=[6, 4, 5, 1, 4, 2],
        num_logits=[6, 1, 5, 1, 2, 2],
        impl=impl,
        padded=8,
    )
    assert tree_len == [6, 0, 5, 0, 2, 0, 0, 0]
    assert positions[:6] == [100, 101, 101, 102, 103, 102]
    assert positions[6:10] == [200, 201, 202, 203]
    assert positions[10:15] == [300, 301, 302, 300, 300]
    assert positions[15:16] == [400]
    assert positions[16:20] == [500, 501, 502, 503]
    assert positions[20:22] == [600, 601]
    assert batch_ancestors[0, :, 0].tolist() == [1, 3, 5, 11, 27, 37]
    assert batch_ancestors[2, :, 0].tolist() == [1, 3, 7, 8, 16, 32]
    assert torch.equal(batch_ancestors[4], batch_ancestors[2])
    for req in (1, 3, 5, 6, 7):
        assert (batch_ancestors[req] == POISON_INT).all()


def test_draft_rows_of_a_slot_without_tree_stay_causal(impl, device):
    buffers = TreeBuffers.allocate(1, 3, device)
    buffers.num_nodes[0] = 0
    positions, tree_len, _ = prepare(buffers, [0], [4], [4], impl)
    assert tree_len == [0] and positions == [100, 101, 102, 103]


@pytest.mark.parametrize("budget", [1, 6, 63, 64, 200])
def test_every_request_gets_its_own_tree(budget, impl, device):
    rng = random.Random(budget)
    buffers = TreeBuffers.allocate(4, budget, device)
    trees = {slot: random_tree(budget + 1, rng) for slot in (0, 2, 3)}
    for slot, parents in trees.items():
        buffers.set_tree(slot, parents)
    slots = [3, 0, 2]
    lengths = [budget + 1, max(2, budget // 2), budget + 1]
    positions, tree_len, batch_ancestors = prepare(
        buffers, slots, lengths, lengths, impl, first=10**6
    )
    assert tree_len == lengths
    start = 0
    for req, slot in enumerate(slots):
        matrix = ancestor_matrix(trees[slot])
        assert positions[start : start + lengths[req]] == [
            10**6 * (req + 1) + sum(row) - 1 for row in matrix[: lengths[req]]
        ]
        assert torch.equal(batch_ancestors[req].cpu(), pack_bits(matrix))
        start += lengths[req]
