# SPDX-License-Identifier: Apache-2.0
"""How the vocabulary is split, and the scratch memory that follows from it."""

from __future__ import annotations

import torch

from ..dispatch import cdiv, next_power_of_2

BLOCK = 256
"""Columns that one program (one warp, 8 columns a lane) loads at a time."""

# One program scans `steps` blocks. Fewer programs than this leave an H200 idle;
# more only lengthen the merge.
_MAX_PROGRAMS = 2112
_MIN_STEPS, _MAX_STEPS = 16, 32


def split_vocab(num_rows: int, vocab_size: int) -> tuple[int, int]:
    """Return (blocks per split, number of splits), from host shapes alone."""
    num_blocks = cdiv(vocab_size, BLOCK)
    steps = _MIN_STEPS
    while steps < _MAX_STEPS and num_rows * cdiv(num_blocks, steps) > _MAX_PROGRAMS:
        steps *= 2
    steps = min(steps, next_power_of_2(num_blocks))
    return steps, cdiv(num_blocks, steps)


def topk_workspace(
    max_num_rows: int,
    vocab_size: int,
    num_candidates: int,
    device: torch.device | str,
) -> torch.Tensor:
    """Allocate scratch for ``topk_logprobs`` calls of up to ``max_num_rows`` rows.

    Holds, per row and split, ``num_candidates`` (rounded up to a power of two) pairs
    of int32 and two fp32: 1.3 MB for 480 rows of 151936 with 8 candidates. Needs no
    initial value; calls on one stream may share it.
    """
    num_blocks = cdiv(vocab_size, BLOCK)
    max_pairs = max(
        min(_MAX_PROGRAMS, max_num_rows * cdiv(num_blocks, _MIN_STEPS)),
        max_num_rows * cdiv(num_blocks, _MAX_STEPS),
    )
    planes = 2 * next_power_of_2(num_candidates) + 2
    return torch.empty(max_pairs * planes, dtype=torch.int32, device=device)
