# SPDX-License-Identifier: Apache-2.0
"""Order-preserving integer form of fp32, shared by the kernels that select maxima.

Selections run on int32 because a warp reduces int32 in one instruction on sm_80 and
later, and because equal floats must fall through to a second, integer criterion.
"""

import triton
import triton.language as tl


@triton.jit
def float_to_ordered(x):
    """Map fp32 to int32 with ``a < b  <=>  map(a) < map(b)``; x must not be NaN.

    -0.0 sorts below +0.0: add 0.0 first where both can occur.
    """
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def ordered_to_float(ordered):
    """Inverse of ``float_to_ordered``."""
    bits = ordered ^ ((ordered >> 31) & 0x7FFFFFFF)
    return bits.to(tl.float32, bitcast=True)
