# SPDX-License-Identifier: Apache-2.0
"""The noise of vLLM's draws (noise_reference.py), inside a kernel.

The time of the scan is its instructions, so each is the cheapest that is exact enough:
the noise differs from the reference's by less than 1e-5 wherever 1 - u > 0.003, a noise
above -1.75. Below, fp32 leaves 1 - u too few digits, here and in vLLM alike.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

from .noise_reference import LENGTH

_LENGTH = tl.constexpr(LENGTH)
# Not quite 2^-32, so that 1 - u is at least 2^-24 for every hash without a maximum.
_UNIT = tl.constexpr(2.0**-32 * (1 - 2.0**-24))
_HALF_UNIT = tl.constexpr(2.0**-33)
# For small u log2(1 - u) is u times the cubic of the least relative error on
# [0, 1/8], 5e-7; further up this cubic is too near to zero. One hardware logarithm has
# an absolute error of 2^-22: raised by half as much again, it is the lower one only
# where that error is small beside the value. So the lower one is off by 4e-6 of itself.
_SERIES_0 = tl.constexpr(-1.4426943063735962)
_SERIES_1 = tl.constexpr(-0.7215244770050049)
_SERIES_2 = tl.constexpr(-0.47398698329925537)
_SERIES_3 = tl.constexpr(-0.44489261507987976)
_RAISED = tl.constexpr(1 + 2.0**-22)


@triton.jit
def _rotate(x, BITS: tl.constexpr):
    return (x << BITS) | (x >> (32 - BITS))


@triton.jit
def _mix(h, word):
    word = _rotate(word * 0xCC9E2D51, 15) * 0x1B873593
    return _rotate(h ^ word, 13) * 5 + 0xE6546B64


_IS_INTERPRETED = tl.constexpr(not isinstance(_mix, triton.JITFunction))


@triton.jit
def _log2(x):
    # tl.log2 is a dozen instructions, this is one; the interpreter has no libdevice.
    if _IS_INTERPRETED:
        return tl.log2(x)
    else:
        return libdevice.fast_log2f(x)


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
def noise_weight(temperature):
    """What log2_exponential is multiplied with to give T * noise, but for a constant.

    noise = -ln(-ln(1 - u)) = -ln(2) * log2(-log2(1 - u)) - ln(ln(2)): the last term is
    that of every token of the row, so it changes no order and no probability.
    """
    return temperature * -0.6931471805599453


@triton.jit
def log2_exponential(
    state,  # of noise_state
    token,  # int32, any shape
):
    """Return log2(-log2(1 - u)) of tokens, fp32."""
    h = _mix(state, token.to(tl.uint32)) ^ _LENGTH
    h = (h ^ (h >> 16)) * 0x85EBCA6B
    h = (h ^ (h >> 13)) * 0xC2B2AE35
    h = h ^ (h >> 16)
    u = tl.fma(h.to(tl.float32), _UNIT, _HALF_UNIT)
    series = tl.fma(u, _SERIES_3, _SERIES_2)
    series = tl.fma(u, series, _SERIES_1)
    series = u * tl.fma(u, series, _SERIES_0)
    logarithm = _log2(tl.fma(u, -_RAISED, _RAISED))
    # Both are negative; a minus is an instruction, the absolute value is none.
    return _log2(tl.abs(tl.minimum(series, logarithm)))
