# SPDX-License-Identifier: Apache-2.0
"""`vllm/model_executor/models/qwen3_dflash.py`: context keys on the CPU."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def make_normalize_context_k(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `_normalize_context_k` with one normalisation a layer on the CPU."""

    @functools.wraps(original)
    def _normalize_context_k(
        self: Any,
        # [num_layers, num_ctx, num_kv_heads, head_dim], contiguous
        all_k: torch.Tensor,
    ) -> torch.Tensor:
        if all_k.device.type != "cpu":
            return original(self, all_k)

        import torch
        from vllm import _custom_ops as ops

        normed = torch.empty_like(all_k)
        for layer, weight in enumerate(self._k_norm_weights):
            ops.rms_norm(normed[layer], all_k[layer], weight, self._rms_norm_eps)
        return normed

    return _normalize_context_k
