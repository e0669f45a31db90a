# SPDX-License-Identifier: Apache-2.0
"""The buffers of draft trees, as a request that joins leaves them."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vllm_dflash.tree.draft_tree import DraftTreeBuffers


class WatchCopies(TorchDispatchMode):
    """Counts copies and fills."""

    def __init__(self):
        super().__init__()
        self.copies = self.fills = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.copies += func.overloadpacket == torch.ops.aten.copy_
        self.fills += func.overloadpacket == torch.ops.aten.fill_
        return func(*args, **(kwargs or {}))


def test_watch_sees_a_number_put_into_an_element():
    with WatchCopies() as watch:
        torch.zeros(4)[2] = 1
    assert (watch.copies, watch.fills) == (1, 0)


def test_a_joining_request_copies_nothing_from_the_host():
    """On a GPU such a copy makes the host wait for every step under way."""
    trees = DraftTreeBuffers.allocate(4, 17, torch.device("cpu"))
    trees.num_nodes.fill_(17)
    trees.chain_only.fill_(1)
    trees.noise_temperature.fill_(9.0)
    with WatchCopies() as watch:
        trees.reset_slot(2, chain_only=False, noise_temperature=0.75)
        trees.reset_slot(1, chain_only=True, noise_temperature=0.0)
        trees.require_chain(0)
    assert (watch.copies, watch.fills) == (0, 7)
    assert trees.noise_temperature.tolist() == [9.0, 0.0, 0.75, 9.0]
    assert trees.num_nodes.tolist() == [17, 0, 0, 17]
    assert trees.chain_only.tolist() == [1, 1, 0, 1]
    trees.require_chain(2)
    assert trees.chain_only.tolist() == [1, 1, 1, 1]
