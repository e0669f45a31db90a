# SPDX-License-Identifier: Apache-2.0
"""Which implementation of an operation runs."""

from __future__ import annotations

from typing import Literal

import torch

Impl = Literal["auto", "triton", "reference"]


def use_triton(impl: Impl, tensor: torch.Tensor) -> bool:
    """Tell whether the Triton kernel serves a call.

    Args:
        impl: ``"auto"`` takes Triton for CUDA tensors and the reference otherwise.
            ``"triton"`` on CPU tensors needs ``TRITON_INTERPRET=1``, set before
            Triton is first imported.
        tensor: Any tensor argument of the call.
    """
    if impl == "auto":
        return tensor.is_cuda
    if impl not in ("triton", "reference"):
        raise ValueError(
            f"Unknown kernel implementation (got impl={impl!r}). "
            "Allowed: 'auto', 'triton', 'reference'."
        )
    return impl == "triton"


def cdiv(a: int, b: int) -> int:
    """Ceiling division of non-negative host integers."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """Smallest power of two that is at least ``max(n, 1)``."""
    return 1 << max(n - 1, 0).bit_length()
