# SPDX-License-Identifier: Apache-2.0
"""What the device offers, and the scratch memory of the key splits."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from .tiles import MAX_WAVES, all_tiles, shared_memory_kb

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
        head_size: int,
        device: torch.device | str,
        *,
        dtype: torch.dtype = torch.bfloat16,
    ) -> TreeAttentionWorkspace:
        """Memory for every batch, width and length of layers with this head size.

        Splits are planned for at most two waves of programs, so the rows of a batch
        are bounded by the machine: 17 MB for heads of 128 on 132 multiprocessors.
        """
        device = torch.device(device)
        _, shared_kb, num_sms = device_limits(device)
        tiles = all_tiles(head_size, shared_kb, dtype == torch.float32)
        rows = max(tile.block_m * tile.ctas_per_sm for tile in tiles)
        return cls.of_rows(MAX_WAVES * num_sms * rows, head_size, device)

    @classmethod
    def of_rows(
        cls, rows: int, head_size: int, device: torch.device
    ) -> TreeAttentionWorkspace:
        """Memory for ``rows`` = requests x splits x query rows x heads."""
        return cls(
            torch.empty(rows * head_size, dtype=torch.float32, device=device),
            torch.empty(rows, dtype=torch.float32, device=device),
        )
