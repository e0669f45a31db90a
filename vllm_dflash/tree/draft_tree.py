# SPDX-License-Identifier: Apache-2.0
"""The draft tree of every request, as persistent device buffers.

A draft tree holds the root (the last accepted token, whose KV is not yet in the
target's cache) and up to ``tree_budget`` nodes. With the tokens of depth 1 and 2
being ``a b`` and ``c d``, five nodes may be::

    index  token  parent  depth      root            rows attend to (ancestor mask)
      0    root    -1      0         /  \\            0: 0
      1    a        0      1        a    b           1: 0 1
      2    c        1      2       / \\    \\          2: 0 1 2
      3    b        0      1      c   d    c         3: 0     3
      4    d        1      2                         4: 0 1     4
      5    c        3      2                         5: 0     3   5

Nodes are numbered in the order in which best-first search pops them, so a parent
precedes its children, the depth of a node never exceeds its index, and *every prefix
of the node list is the best tree of that size*. The ancestor mask is a subset of the
causal mask over node indices.
"""

from dataclasses import dataclass

import torch

BITS_PER_WORD = 64


def num_words(width: int) -> int:
    """Number of int64 words that hold one ancestor row of ``width`` nodes."""
    return -(-width // BITS_PER_WORD)


@dataclass
class DraftTreeBuffers:
    """Trees of all request state slots; written by the build, read by the verify.

    ``S`` is the number of request state slots, ``W`` the tree width (budget + 1).
    A slot's row is valid from the step that drafted it until the next step that
    schedules the request; ``num_nodes == 0`` marks a slot without a tree.
    """

    # [S, W], int32. Root -1, unused nodes -2.
    parents: torch.Tensor
    # [S, W], int32. Root 0, unused nodes 0.
    depths: torch.Tensor
    # [S, W, num_words], int64. Bit j of row i: node j is node i or its ancestor.
    ancestors: torch.Tensor
    # [S], int32. Used nodes, root included.
    num_nodes: torch.Tensor
    # [S], uint8. 1: this request's block is laid out as a chain.
    chain_only: torch.Tensor
    # [S], float32. Factor of the noise of the draws that the candidates know; 0: none.
    noise_temperature: torch.Tensor

    @classmethod
    def allocate(
        cls, num_slots: int, width: int, device: torch.device
    ) -> "DraftTreeBuffers":
        """Allocate empty trees for ``num_slots`` request state slots."""

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        return cls(
            parents=zeros(num_slots, width),
            depths=zeros(num_slots, width),
            ancestors=zeros(num_slots, width, num_words(width), dtype=torch.int64),
            num_nodes=zeros(num_slots),
            chain_only=zeros(num_slots, dtype=torch.uint8),
            noise_temperature=zeros(num_slots, dtype=torch.float32),
        )

    @property
    def width(self) -> int:
        return self.parents.shape[1]

    def reset_slot(self, slot: int, chain_only: bool, noise_temperature: float) -> None:
        """Forget the tree of a slot that a new request takes over."""
        # Slices: a number put into one element of a CUDA tensor is a copy that waits
        # for the device, one put into a slice is a fill that does not.
        self.num_nodes[slot : slot + 1] = 0
        self.chain_only[slot : slot + 1] = int(chain_only)
        self.noise_temperature[slot : slot + 1] = noise_temperature

    def require_chain(self, slot: int) -> None:
        """Lay out the trees of the slot's request as chains from now on."""
        self.chain_only[slot : slot + 1] = 1
