# SPDX-License-Identifier: Apache-2.0
"""Attention of many blocks over one context, in one call.

Keys are the context of a sequence followed by all its blocks. A query sees the context
before its anchor and every token of its own block, later ones too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from vllm_dflash.errors import option_error

# Tile of flex attention's block masks.
TILE = 128


def dense_mask(
    # [num_seqs, num_blocks]
    anchors: torch.Tensor,
    context_len: int,
    block_size: int,
) -> torch.Tensor:
    """Return which keys each query sees. [num_seqs, 1, Q, context_len + Q], bool"""
    positions = torch.arange(context_len, device=anchors.device)
    sees_context = positions < anchors[..., None]
    sees_context = sees_context.repeat_interleave(block_size, 1)
    block = torch.arange(anchors.shape[1], device=anchors.device)
    block = block.repeat_interleave(block_size)
    own = (block[:, None] == block).expand(anchors.shape[0], -1, -1)
    return torch.cat([sees_context, own], -1)[:, None]


class SdpaAttention:
    """PyTorch's attention with a dense mask: any shape, on any device."""

    def __init__(self, block_size: int):
        self.block_size = block_size

    def prepare(self, anchors: torch.Tensor, context_len: int) -> torch.Tensor:
        """Return the mask of these anchors."""
        return dense_mask(anchors, context_len, self.block_size)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor,
    ) -> torch.Tensor:
        """Attention under a mask of `prepare`."""
        group = query.shape[1] // key.shape[1]
        return F.scaled_dot_product_attention(
            query,
            key.repeat_interleave(group, 1),
            value.repeat_interleave(group, 1),
            attn_mask=mask,
        )


class FlexAttention:
    """Flex attention: tiles that no query sees are skipped.

    Its mask function reads the anchors from one persistent buffer, so that a compiled
    draft is compiled once.
    """

    def __init__(
        self,
        num_seqs: int,
        num_blocks: int,
        context_len: int,
        block_size: int,
        device: torch.device,
    ):
        from torch.nn.attention import flex_attention

        num_queries = num_blocks * block_size
        if context_len % TILE or num_queries % TILE or TILE % block_size:
            raise option_error(
                f"flex attention can't tile training.max_length (got {context_len}) "
                f"and anchors_per_sequence * block_size (got {num_queries})",
                f"Multiples of {TILE} are allowed, anything with sdpa",
                "training.attention: sdpa",
            )
        self._flex = flex_attention
        self.kernel: Callable[..., Any] = flex_attention.flex_attention
        self.context_len, self.num_queries = context_len, num_queries
        self.anchors = torch.zeros(
            num_seqs, num_blocks, dtype=torch.int64, device=device
        )
        anchors_buffer = self.anchors

        def mask_mod(seq, head, query, key):
            is_context = key < context_len
            before = key < anchors_buffer[seq, query // block_size]
            own = (key - context_len) // block_size == query // block_size
            return (is_context & before) | (~is_context & own)

        self.mask_mod = mask_mod

    def prepare(self, anchors: torch.Tensor, context_len: int) -> Any:
        """Set the anchors, ascending in each row; return the block mask."""
        assert context_len == self.context_len, "padded to the length it was made for"
        self.anchors.copy_(anchors)
        num_seqs = anchors.shape[0]
        num_rows = self.num_queries // TILE
        tiled = anchors.view(num_seqs, num_rows, -1)
        lowest, highest = tiled.amin(-1)[..., None], tiled.amax(-1)[..., None]
        starts = torch.arange(0, self.context_len, TILE, device=anchors.device)
        is_full = starts + TILE <= lowest
        is_partial = (starts < highest) & ~is_full
        own = torch.eye(num_rows, dtype=torch.bool, device=anchors.device)
        own = own.expand(num_seqs, -1, -1)
        partial = _tile_list(torch.cat([is_partial, own], -1))
        full = _tile_list(torch.cat([is_full, torch.zeros_like(own)], -1))
        return self._flex.BlockMask.from_kv_blocks(
            *partial,
            *full,
            BLOCK_SIZE=TILE,
            mask_mod=self.mask_mod,
            seq_lengths=(self.num_queries, self.context_len + self.num_queries),
        )

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        block_mask: Any,
    ) -> torch.Tensor:
        """Attention under a block mask of `prepare`."""
        return self.kernel(query, key, value, block_mask=block_mask, enable_gqa=True)


def _tile_list(is_there: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Number of tiles of each row, and their indices first. Heads share them."""
    is_there = is_there[:, None]
    count = is_there.sum(-1, dtype=torch.int32)
    order = torch.argsort(is_there.int(), dim=-1, descending=True, stable=True)
    return count, order.to(torch.int32).contiguous()
