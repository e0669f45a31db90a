# SPDX-License-Identifier: Apache-2.0
"""The caches of one KV cache group, as tensors and as device addresses."""

from __future__ import annotations

import math

import torch


class KVCacheTable:
    """Caches that share a slot mapping, with one geometry.

    ``layer_ptrs`` holds raw addresses: build the table again when a cache is
    reallocated. On a GPU nothing else is kept, so that a table never holds on to a
    cache that the engine gives back; the reference needs the tensors: `keeps_caches`.
    Several views of one allocation (keys and values stored apart, say)
    are several caches.
    """

    def __init__(
        self,
        # each [num_blocks, num_heads, block_size, content], content contiguous,
        # any other strides, any dtype
        caches: list[torch.Tensor],
        # None: on the CPU, where the reference runs
        keeps_caches: bool | None = None,
    ) -> None:
        self.caches: list[torch.Tensor] = []
        self.num_layers = len(caches)
        if not caches:
            return
        first = caches[0]
        for cache in caches:
            if cache.dim() != 4 or cache.stride(3) != 1:
                raise ValueError(
                    "A KV cache must be a view [num_blocks, num_heads, block_size, "
                    "content] with contiguous content (got shape "
                    f"{tuple(cache.shape)}, strides {cache.stride()})."
                )
            if (
                cache.shape[1:] != first.shape[1:]
                or cache.stride() != first.stride()
                or cache.dtype != first.dtype
                or cache.device != first.device
            ):
                raise ValueError(
                    "The KV caches of one table must agree in heads, block size, "
                    "content, strides, dtype and device (got "
                    f"{tuple(cache.shape)} {cache.stride()} {cache.dtype} against "
                    f"{tuple(first.shape)} {first.stride()} {first.dtype}). "
                    "Make one table for each geometry."
                )
        item_bytes = first.element_size()
        if keeps_caches is None:
            keeps_caches = first.device.type == "cpu"
        if keeps_caches:
            self.caches = caches
        self.num_heads, self.block_size, content = first.shape[1:]
        self.content_bytes = content * item_bytes
        block_stride, head_stride, slot_stride, _ = first.stride()
        self.block_stride_bytes = block_stride * item_bytes
        self.head_stride_bytes = head_stride * item_bytes
        self.slot_stride_bytes = slot_stride * item_bytes
        addresses = [cache.data_ptr() for cache in caches]
        # [num_layers], int64
        self.layer_ptrs = torch.tensor(
            addresses, dtype=torch.int64, device=first.device
        )
        # The widest word (1 to 8 bytes) that every entry is a whole number of, at an
        # aligned address.
        self.word_bytes = math.gcd(
            8,
            self.content_bytes,
            self.block_stride_bytes,
            self.head_stride_bytes,
            self.slot_stride_bytes,
            *addresses,
        )
