# SPDX-License-Identifier: Apache-2.0
"""The noise that vLLM draws with, known before the draw.

vLLM's Model Runner V2 samples a token as ``argmax(logits / T + g)`` with

    g = -log(-log(1 - u)),   u = (h + 1/2) / 2^32,   h = murmur3(seed, position, token)

so whoever knows the seed of a request knows the noise of every token at every later
position. ``position`` is that of the token before the drawn one. The hash is
MurmurHash3 (x86, 32 bits, seed 0) of four words: low and high half of the seed, the
position and the token. tests/compat/test_draw_noise.py compares with vLLM's.
"""

from __future__ import annotations

import torch

_MASK = 0xFFFFFFFF
LENGTH = 16
"""Bytes hashed, part of the last step."""
SMALLEST = 2.0**-24
"""The smallest 1 - u in fp32."""
SERIES_END = 0.03125
"""Below it log(1 - u) is taken from its series: fp32 has no room beside 1."""


def draw_noise_reference(
    seed: torch.Tensor,  # [num_rows], int64
    position: torch.Tensor,  # [num_rows], int64
    vocab_size: int,
) -> torch.Tensor:
    """Return the noise of every token of each row. [num_rows, vocab_size], fp32"""
    state = torch.zeros_like(seed)
    for word in (seed & _MASK, (seed >> 32) & _MASK, position & _MASK):
        state = _mix_int64(state, word)
    token = torch.arange(vocab_size, device=seed.device)
    h = _mix_int64(state[:, None], token[None]) ^ LENGTH
    h = ((h ^ (h >> 16)) * 0x85EBCA6B) & _MASK
    h = ((h ^ (h >> 13)) * 0xC2B2AE35) & _MASK
    h = h ^ (h >> 16)
    u = (h >> 16).float() * 2.0**-16 + ((h & 0xFFFF).float() + 0.5) * 2.0**-32
    exponential = torch.where(
        u < SERIES_END, -torch.log1p(-u), -torch.log((1.0 - u).clamp(min=SMALLEST))
    )
    return -torch.log(exponential)


def _mix_int64(h: torch.Tensor, word: torch.Tensor) -> torch.Tensor:
    """Work on the low 32 bits of int64, which wraps as unsigned integers do."""
    word = (word * 0xCC9E2D51) & _MASK
    word = ((word << 15) | (word >> 17)) & _MASK
    h = h ^ ((word * 0x1B873593) & _MASK)
    h = ((h << 13) | (h >> 19)) & _MASK
    return (h * 5 + 0xE6546B64) & _MASK
