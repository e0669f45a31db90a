# SPDX-License-Identifier: Apache-2.0
"""The noise of vLLM's draws (noise_reference.py), inside a kernel."""

from __future__ import annotations

import triton
import triton.language as tl

from .noise_reference import LENGTH, SERIES_END, SMALLEST

_LENGTH = tl.constexpr(LENGTH)
_SMALLEST = tl.constexpr(SMALLEST)
_SERIES = tl.constexpr(SERIES_END)


@triton.jit
def _rotate(x, BITS: tl.constexpr):
    return (x << BITS) | (x >> (32 - BITS))


@triton.jit
def _mix(h, word):
    word = _rotate(word * 0xCC9E2D51, 15) * 0x1B873593
    return _rotate(h ^ word, 13) * 5 + 0xE6546B64


@triton.jit
def noise_state(
    seed,  # scalar, int64
    position,  # scalar, int64
):
    """Hash what all tokens of a draw have in common. scalar, uint32"""
    h = (seed - seed).to(tl.uint32)
    h = _mix(h, (seed & 0xFFFFFFFF).to(tl.uint32))
    h = _mix(h, ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32))
    return _mix(h, (position & 0xFFFFFFFF).to(tl.uint32))


@triton.jit
def draw_noise(
    state,  # of noise_state
    token,  # int32, any shape
):
    """Return the noise of tokens, fp32."""
    h = _mix(state, token.to(tl.uint32)) ^ _LENGTH
    h = (h ^ (h >> 16)) * 0x85EBCA6B
    h = (h ^ (h >> 13)) * 0xC2B2AE35
    h = h ^ (h >> 16)
    # Two halves, since both are exact in fp32.
    high = (h >> 16).to(tl.int32).to(tl.float32)
    low = (h & 0xFFFF).to(tl.int32).to(tl.float32)
    u = high * 1.52587890625e-05 + (low + 0.5) * 2.3283064365386963e-10
    near_zero = u * (1.0 + u * (0.5 + u * (1.0 / 3.0 + u * (0.25 + u * 0.2))))
    exponential = tl.where(
        u < _SERIES, near_zero, -tl.log(tl.maximum(1.0 - u, _SMALLEST))
    )
    return -tl.log(exponential)
