# SPDX-License-Identifier: Apache-2.0
"""What the device offers, and the scratch memory of the key splits."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from .tiles import plan_splits, select_tile, shared_memory_kb

# Compute capability, shared memory (KB) and multiprocessors that the interpreter
# pretends to have.
_CPU_LIMITS = (80, 163, 8)


@functools.cache
def _cuda_limits(index: int | None) -> tuple[int, int, int]:
    properties = torch.cuda.get_device_properties(index)
    capability = properties.major * 10 + properties.minor
    limit = getattr(properties, "shared_memory_per_block_optin", None)
    num_sms = properties.multi_processor_count
    return capability, shared_memory_kb(capability, limit), num_sms


def device_limits(device: torch.device) -> tuple[int, int, int]:
    """Compute capability, shared memory class (KB) and multiprocessors of a device."""
    return _cuda_limits(device.index) if device.type == "cuda" else _CPU_LIMITS


@dataclass
class TreeAttentionWorkspace:
    """Scratch for the partial results of split keys; calls on one stream share it.

    Needs no initial value. All layers of a model use the same one.
    """

    partial: torch.Tensor  # [rows * head_size], fp32
    lse: torch.Tensor  # [rows], fp32, base 2

    @classmethod
    def allocate(
        cls,
        max_num_reqs: int,
        max_query_len: int,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        max_seq_len: int,
        device: torch.device | str,
        *,
        dtype: torch.dtype = torch.bfloat16,
    ) -> TreeAttentionWorkspace:
        """Memory for every batch of up to ``max_num_reqs`` requests.

        The number of splits falls as the batch grows, so the largest need lies at a
        small batch: 26 MB for 32 heads of 128 and width 49 on 132 multiprocessors.
        """
        device = torch.device(device)
        _, shared_kb, num_sms = device_limits(device)
        group_rows = max_query_len * (num_heads // num_kv_heads)
        full_precision = dtype == torch.float32
        tile = select_tile(
            group_rows, head_size, shared_kb, full_precision=full_precision
        )
        rows = 0
        for num_reqs in range(1, max_num_reqs + 1):
            plan = plan_splits(
                num_reqs, num_kv_heads, group_rows, tile, max_seq_len, num_sms
            )
            if plan.num_splits > 1:
                rows = max(rows, num_reqs * plan.num_splits)
        return cls.of_rows(rows * max_query_len * num_heads, head_size, device)

    @classmethod
    def of_rows(
        cls, rows: int, head_size: int, device: torch.device
    ) -> TreeAttentionWorkspace:
        """Memory for ``rows`` = requests x splits x query rows x heads."""
        return cls(
            torch.empty(rows * head_size, dtype=torch.float32, device=device),
            torch.empty(rows, dtype=torch.float32, device=device),
        )
