# SPDX-License-Identifier: Apache-2.0
"""Chosen rows of several tensors in one launch, concatenated."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..dispatch import Impl, use_triton
from .reference import gather_rows_reference

__all__ = ["gather_rows"]

_MAX_SOURCES = 8


def gather_rows(
    # each [num_tokens, num_columns], columns contiguous, equal strides and dtype
    sources: Sequence[torch.Tensor],
    # [num_rows], int64, row indices of the sources
    rows: torch.Tensor,
    *,
    impl: Impl = "auto",
) -> torch.Tensor:
    """Return ``cat([source[rows] for source in sources], dim=-1)``.

    The host never waits. More than 8 sources, or sources of unequal layout, are
    gathered by torch, one launch each.
    """
    first = sources[0]
    out = first.new_empty(rows.shape[0], first.shape[1] * len(sources))
    uniform = len(sources) <= _MAX_SOURCES and all(
        source.stride() == first.stride()
        and source.shape[1] == first.shape[1]
        and source.stride(1) == 1
        for source in sources
    )
    if uniform and use_triton(impl, rows):
        from .kernel import gather_rows as launch
    else:
        launch = gather_rows_reference
    if rows.shape[0]:
        launch(sources, rows, out)
    return out
