# SPDX-License-Identifier: Apache-2.0
"""Blocks of a training sequence: the same positions that serving drafts from.

A block hangs on an anchor, the last committed token (serving: the bonus token), at
position p. Its context are the target's features of positions 0 .. p - 1: the anchor
has not been through the target when the draft runs. The block holds the anchor at p
and mask tokens at p + 1 .. p + K; the output at mask k is the draft of token p + k.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a tensor of the host; to a GPU without waiting for what it does."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        # From pageable memory a copy may wait for the steps under way.
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


@dataclass(frozen=True)
class Batch:
    """Sequences of prompt and response, padded on the right."""

    # [num_seqs, length], int64
    tokens: torch.Tensor
    # [num_seqs], int64
    prompt_lens: torch.Tensor
    # [num_seqs], int64, prompt and response
    lens: torch.Tensor

    def to(self, device: torch.device) -> Batch:
        """Return the batch on another device."""
        return Batch(
            to_device(self.tokens, device),
            to_device(self.prompt_lens, device),
            to_device(self.lens, device),
        )


@dataclass(frozen=True)
class Blocks:
    """Anchors of a batch and what is to be predicted from them."""

    # [num_seqs, num_blocks], int64, ascending in a row
    anchors: torch.Tensor
    # [num_seqs, num_blocks, depth], int64
    labels: torch.Tensor
    # [num_seqs, num_blocks, depth], bool; False after the end, and of unused blocks
    is_valid: torch.Tensor

    def to(self, device: torch.device) -> Blocks:
        """Return the blocks on another device."""
        return Blocks(
            to_device(self.anchors, device),
            to_device(self.labels, device),
            to_device(self.is_valid, device),
        )

    def rows(self) -> torch.Tensor:
        """Return which of the flat (block, depth) count. Waits for a GPU's blocks."""
        return self.is_valid.flatten().nonzero()[:, 0]


def draw_anchors(
    batch: Batch, num_blocks: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw anchors of the responses without replacement, on the CPU.

    The first anchor that serving knows is the first token of the response, and the
    last that has something to predict is the token before the end.

    Returns:
        Anchors [num_seqs, num_blocks] in ascending order, and whether each is used: a
        short response has fewer.
    """
    num_seqs, length = batch.tokens.shape
    order = torch.rand(num_seqs, max(length, num_blocks), generator=generator)
    positions = torch.arange(order.shape[1])[None]
    is_anchor = positions >= batch.prompt_lens[:, None]
    is_anchor &= positions < batch.lens[:, None] - 1
    values, anchors = order.masked_fill_(~is_anchor, -1.0).topk(num_blocks, 1)
    is_used = values >= 0
    # Unused blocks repeat the first anchor of the response and are never counted.
    first = torch.minimum(batch.prompt_lens, batch.lens - 1)[:, None]
    anchors = torch.where(is_used, anchors, first)
    anchors, sorting = anchors.sort(dim=1, stable=True)
    return anchors, is_used.gather(1, sorting)


def make_blocks(
    batch: Batch, anchors: torch.Tensor, is_used: torch.Tensor, depth: int
) -> Blocks:
    """Look up what each depth of each block should predict."""
    positions = anchors[..., None] + torch.arange(1, depth + 1, device=anchors.device)
    is_valid = (positions < batch.lens[:, None, None]) & is_used[..., None]
    inside = positions.clamp(max=batch.tokens.shape[1] - 1)
    labels = batch.tokens.gather(1, inside.flatten(1)).view(positions.shape)
    return Blocks(anchors, labels, is_valid)


def block_tokens(
    batch: Batch, anchors: torch.Tensor, block_size: int, mask_token_id: int
) -> torch.Tensor:
    """Return anchor and mask tokens. [num_seqs, num_blocks, block_size]"""
    tokens = anchors.new_full((*anchors.shape, block_size), mask_token_id)
    tokens[..., 0] = batch.tokens.gather(1, anchors)
    return tokens
