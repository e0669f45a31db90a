# SPDX-License-Identifier: Apache-2.0
"""`vllm/v1/sample/ops/topk_topp_triton.py`: one top-p for any number of rows."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from vllm_dflash.patches import resolve_target

_MODULE = "vllm.v1.sample.ops.topk_topp_triton"
# Rows of one call. vLLM's scratch memory is 15 kB a row.
MAX_ROWS = 1024


def wrap_apply_top_k_top_p(
    original: Callable[..., torch.Tensor],
) -> Callable[..., torch.Tensor]:
    """Return `apply_top_k_top_p_triton` with the split kernels for every batch."""
    module: Any = None
    for name in ("_SPLIT_MAX_BATCH", "_TRITON_SPLIT_CACHE"):
        module, _ = resolve_target(f"{_MODULE}:{name}")

    @functools.wraps(original)
    def apply_top_k_top_p_triton(
        # [num_rows, vocab_size], float32
        logits: torch.Tensor,
        # [num_rows], int32
        k: torch.Tensor | None,
        # [num_rows], float32
        p: torch.Tensor | None,
        mask_value: float = float("-inf"),
    ) -> torch.Tensor:
        if module._SPLIT_MAX_BATCH != MAX_ROWS:
            module._SPLIT_MAX_BATCH = MAX_ROWS
            # Scratch of the former size, if an engine of this process has sampled.
            module._TRITON_SPLIT_CACHE.clear()
        num_rows = logits.shape[0]
        if p is None or num_rows <= MAX_ROWS:
            return original(logits, k, p, mask_value)
        # Rows are masked in place, which a copy of theirs would not show.
        if logits.stride(1) != 1:
            logits = logits.contiguous()
        for start in range(0, num_rows, MAX_ROWS):
            rows = slice(start, start + MAX_ROWS)
            part = k[rows] if k is not None else None
            original(logits[rows], part, p[rows], mask_value)
        return logits

    return apply_top_k_top_p_triton
