# SPDX-License-Identifier: Apache-2.0
"""Helpers that tests and benchmarks of the kernels share."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from dataclasses import dataclass

import torch

POISON_INT = -(2**30) - 7
"""What poisoned int32 and int64 memory holds."""

_EXACT_FINITE = "non-finite values must be equal in kind and place"


def assert_close(
    name: str, expected: torch.Tensor, actual: torch.Tensor, ratio: float
) -> None:
    """Require ``RMS(actual - expected) <= ratio * RMS(expected)``, in fp64.

    Infinities must agree exactly and NaN is never accepted.
    """
    assert expected.shape == actual.shape, (
        f"{name}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    )
    expected, actual = expected.detach().double(), actual.detach().double()
    actual = actual.to(expected.device)
    is_finite = torch.isfinite(expected)
    assert torch.equal(is_finite, torch.isfinite(actual)), f"{name}: {_EXACT_FINITE}"
    assert torch.equal(expected[~is_finite], actual[~is_finite]), (
        f"{name}: {_EXACT_FINITE}"
    )
    if not is_finite.any():
        return
    expected, actual = expected[is_finite], actual[is_finite]
    error = (actual - expected).square().mean().sqrt().item()
    scale = expected.square().mean().sqrt().item()
    assert error <= ratio * scale, (
        f"{name}: RMS error {error:.3e} is {error / max(scale, 1e-300):.3e} of "
        f"RMS {scale:.3e}, allowed {ratio:.1e}"
    )


def poison_(tensor: torch.Tensor) -> torch.Tensor:
    """Overwrite with NaN, ``POISON_INT`` (another pattern in narrower integers) or
    True, so that unwritten results show."""
    if tensor.dtype == torch.bool:
        return tensor.fill_(True)
    if tensor.is_floating_point():
        return tensor.fill_(torch.nan)
    if tensor.element_size() < 4:
        return tensor.fill_(0xA5 if tensor.dtype == torch.uint8 else 0x25)
    return tensor.fill_(POISON_INT)


def poisoned(
    *shape: int, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """Allocate a poisoned tensor."""
    return poison_(torch.empty(shape, dtype=dtype, device=device))


@contextlib.contextmanager
def poisoned_empty() -> Iterator[None]:
    """Make ``torch.empty`` and ``torch.empty_like`` return poisoned memory."""
    empty, empty_like = torch.empty, torch.empty_like

    def poisoned_call(function):
        def call(*args, **kwargs):
            result = function(*args, **kwargs)
            return result if result.is_meta else poison_(result)

        return call

    torch.empty, torch.empty_like = poisoned_call(empty), poisoned_call(empty_like)
    try:
        yield
    finally:
        torch.empty, torch.empty_like = empty, empty_like


@dataclass
class TreeBuffers:
    """The per-slot buffers of draft trees, with W = N + 1 columns."""

    parents: torch.Tensor  # [num_slots, W], int32, root -1, unused -2
    depths: torch.Tensor  # [num_slots, W], int32
    ancestors: torch.Tensor  # [num_slots, W, words], int64
    num_nodes: torch.Tensor  # [num_slots], int32, root included, 0 = no tree

    @classmethod
    def allocate(
        cls, num_slots: int, budget: int, device: torch.device | str = "cpu"
    ) -> TreeBuffers:
        """Poisoned buffers for ``budget`` nodes besides the root."""
        width = budget + 1
        words = -(-width // 64)
        return cls(
            poisoned(num_slots, width, dtype=torch.int32, device=device),
            poisoned(num_slots, width, dtype=torch.int32, device=device),
            poisoned(num_slots, width, words, dtype=torch.int64, device=device),
            poisoned(num_slots, dtype=torch.int32, device=device),
        )

    def set_tree(self, slot: int, parents: list[int]) -> None:
        """Write a tree given by its nodes' parents, root (-1) first."""
        width = self.parents.shape[1]
        unused = width - len(parents)
        mask = ancestor_matrix([*parents, *[-2] * unused])
        depths = [sum(row) - 1 for row in mask[: len(parents)]]
        self.parents[slot] = self.parents.new_tensor([*parents, *[-2] * unused])
        self.depths[slot] = self.depths.new_tensor([*depths, *[0] * unused])
        self.ancestors[slot] = pack_bits(mask).to(self.ancestors.device)
        self.num_nodes[slot] = len(parents)


def ancestor_matrix(parents: list[int]) -> list[list[bool]]:
    """``[i][j]``: node j is node i or one of its ancestors."""
    matrix = []
    for node in range(len(parents)):
        row = [False] * len(parents)
        current = node
        while current >= 0:
            row[current] = True
            current = parents[current]
        matrix.append(row)
    return matrix


def pack_bits(mask: list[list[bool]]) -> torch.Tensor:
    """Pack a square boolean matrix into rows of 64-bit words. [W, words], int64"""
    words = -(-len(mask) // 64)
    packed = torch.zeros(len(mask), words, dtype=torch.int64)
    for row, bits in enumerate(mask):
        for column, bit in enumerate(bits):
            if bit:
                value = 1 << (column % 64)
                packed[row, column // 64] |= value - (1 << 64 if value >> 63 else 0)
    return packed


def random_tree(num_nodes: int, rng: random.Random, max_depth: int = 15) -> list[int]:
    """Parents of a random tree, root (-1) first, parent < child, depth bounded."""
    parents, depths = [-1], [0]
    while len(parents) < num_nodes:
        # Favour recent nodes, so that deep branches occur.
        pool = range(len(parents)) if rng.random() < 0.5 else range(len(parents))[-3:]
        parent = rng.choice([n for n in pool if depths[n] < max_depth] or [0])
        parents.append(parent)
        depths.append(depths[parent] + 1)
    return parents


def random_candidates(
    num_rows: int,
    num_candidates: int,
    vocab_size: int,
    generator: torch.Generator,
    device: torch.device | str = "cpu",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Distinct tokens and descending log-probabilities, as topk_logprobs gives."""
    logits = torch.randn(num_rows, vocab_size, generator=generator) * 2
    logprobs, tokens = logits.log_softmax(-1).topk(num_candidates)
    return tokens.int().to(device), logprobs.to(device)
