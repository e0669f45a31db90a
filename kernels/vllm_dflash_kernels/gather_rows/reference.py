# SPDX-License-Identifier: Apache-2.0
"""Torch reference of the row gather."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def gather_rows_reference(
    sources: Sequence[torch.Tensor], rows: torch.Tensor, out: torch.Tensor
) -> None:
    torch.cat([source[rows] for source in sources], dim=-1, out=out)
