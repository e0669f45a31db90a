# SPDX-License-Identifier: Apache-2.0
"""Twin of `vllm/v1/worker/gpu/sample/gumbel.py`: the same noise, the same token.

`gumbel_sample` draws `argmax(logits + g)`, `g = -log(-log(1 - u))`, with `u` a 32-bit
(fp64: 53-bit) murmur3 hash of (seed, position, token). The noise is made in NumPy,
which has unsigned integers and the very logarithm of Triton's interpreter.
"""

from __future__ import annotations

import functools

import numpy as np
import torch

_MASK32 = 0xFFFFFFFF
# Offset of the draft's stream in `pos`.
_DRAFT_NOISE_SALT = 1 << 30
_HIGH_DOMAIN = 0x9E3779B9


def gumbel_sample(
    logits: torch.Tensor,  # [num_tokens, vocab_size]
    expanded_idx_mapping: torch.Tensor,  # [num_tokens], -1 = inert row
    temperature: torch.Tensor,  # [max_num_reqs], fp32
    seed: torch.Tensor,  # [max_num_reqs], int64
    pos: torch.Tensor,  # [num_tokens]
    apply_temperature: bool,
    is_drafting: bool,
    logits_cache: torch.Tensor | None = None,  # [max_num_reqs, num_cols, vocab_size]
    logits_cache_col: torch.Tensor | None = None,  # scalar or [num_tokens]
    use_fp64: bool = False,
    logits_cache_source: torch.Tensor | None = None,
) -> torch.Tensor:
    """Draw one token a row; the twin of the launcher of the same name.

    Returns:
        Token ids [num_tokens], int64.
    """
    slots = expanded_idx_mapping.long()
    valid = slots >= 0
    slots = slots.clamp(min=0)
    temps = torch.where(valid, temperature[slots].float(), 0.0)
    if logits_cache is not None:
        source = logits if logits_cache_source is None else logits_cache_source
        columns = logits_cache_col.long().expand(len(slots))
        logits_cache[slots[valid], columns[valid], : logits.shape[1]] = source[valid]
    elif logits_cache_source is not None:
        raise ValueError("logits_cache_source requires logits_cache")

    sampled = torch.empty(len(slots), dtype=torch.int64, device=logits.device)
    greedy = temps == 0
    if greedy.any():
        sampled[greedy] = logits[greedy].float().argmax(-1)
    drawn = (~greedy).nonzero().view(-1)
    seeds = torch.where(valid, seed[slots], 0)
    for row in drawn.tolist():
        scores = logits[row].float()
        if apply_temperature:
            scores = scores / temps[row]
        place = int(pos[row]) + (_DRAFT_NOISE_SALT if is_drafting else 0)
        noise = gumbel_noise(int(seeds[row]), place, len(scores), use_fp64)
        sampled[row] = (scores + noise).argmax()
    return sampled


def gumbel_noise(seed: int, pos: int, size: int, use_fp64: bool) -> torch.Tensor:
    """Return the noise of tokens 0 .. size - 1 at one place of one request's stream.

    Returns:
        [size], fp32 (fp64 if asked for).
    """
    low = murmur3_hash32(seed, pos, size)
    if use_fp64:
        high = murmur3_hash32(seed, pos, size, domain=_HIGH_DOMAIN)
        random53 = (high.astype(np.uint64) << 21) | (low >> 11)
        u = (random53.astype(np.float64) + 0.5) * 1.1102230246251565e-16
        u[u == 1.0] -= 1.1102230246251565e-16
        return torch.from_numpy(-np.log(-np.log(u)))
    # Both halves are exact in fp32, and so is the rounding of their sum.
    u = (low >> 16).astype(np.float32)
    u *= np.float32(1.52587890625e-05)
    low &= 0xFFFF
    tail = low.astype(np.float32)
    tail += np.float32(0.5)
    tail *= np.float32(2.3283064365386963e-10)
    u += tail
    noise = _log1p_neg(u)
    np.negative(noise, out=noise)
    np.log(noise, out=noise)
    return torch.from_numpy(np.negative(noise, out=noise))


def _log1p_neg(value: np.ndarray) -> np.ndarray:
    """`log(1 - value)`, by the kernel's series up to 0.25, in its order."""
    result = np.maximum(np.float32(1.0) - value, np.float32(5.960464477539063e-08))
    np.log(result, out=result)
    near = np.nonzero(value < 0.25)[0]
    small = value[near]
    series = np.full_like(small, 1.0 / 8.0)
    for order in (7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0):
        series *= small
        series += np.float32(1.0 / order)
    series *= -small
    result[near] = series
    return result


def murmur3_hash32(seed: int, pos: int, size: int, domain: int = 0) -> np.ndarray:
    """Hash (seed, pos, token) of tokens 0 .. size - 1.

    Returns:
        [size], uint32.
    """
    prefix = domain
    for key in (seed & _MASK32, (seed >> 32) & _MASK32, pos & _MASK32):
        prefix = _mix(prefix, key)
    h = _token_keys(size) ^ np.uint32(prefix)
    h = (h << 13) | (h >> 19)
    h *= np.uint32(5)
    h += np.uint32(0xE6546B64)
    h ^= np.uint32(16)
    h ^= h >> 16
    h *= np.uint32(0x85EBCA6B)
    h ^= h >> 13
    h *= np.uint32(0xC2B2AE35)
    h ^= h >> 16
    return h


@functools.lru_cache(maxsize=4)
def _token_keys(size: int) -> np.ndarray:
    """The part of the last round that depends on the token only."""
    keys = np.arange(size, dtype=np.uint32)
    keys *= np.uint32(0xCC9E2D51)
    keys = (keys << 15) | (keys >> 17)
    keys *= np.uint32(0x1B873593)
    return keys


def _mix(h: int, key: int) -> int:
    key = (key * 0xCC9E2D51) & _MASK32
    key = ((key << 15) | (key >> 17)) & _MASK32
    key = (key * 0x1B873593) & _MASK32
    h ^= key
    h = ((h << 13) | (h >> 19)) & _MASK32
    return (h * 5 + 0xE6546B64) & _MASK32
