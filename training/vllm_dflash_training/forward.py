# SPDX-License-Identifier: Apache-2.0
"""From a batch of sequences to the draft's hidden rows: training and evaluation."""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F

from vllm_dflash_training.attention import FlexAttention, SdpaAttention
from vllm_dflash_training.blocks import Batch, block_tokens
from vllm_dflash_training.config import TrainingOptions
from vllm_dflash_training.draft import DFlashDraft
from vllm_dflash_training.target import Target


class BlockForward:
    """Runs target and draft over the blocks of a batch.

    With flex attention every batch has the shape of the config, so that the compiled
    draft is compiled once: fewer sequences are filled up and longer contexts refused.
    """

    def __init__(self, target: Target, draft: DFlashDraft, options: TrainingOptions):
        self.target, self.draft, self.shape = target, draft, draft.shape
        self.device = target.device
        is_cuda = self.device.type == "cuda"
        kind = options.attention
        if kind == "auto":
            kind = "flex" if is_cuda else "sdpa"
        self.num_seqs = options.sequences_per_batch
        self.num_blocks = options.anchors_per_sequence
        self.max_length = options.max_length
        self.flex: FlexAttention | None = None
        self.attention: FlexAttention | SdpaAttention
        if kind == "flex":
            self.flex = self.attention = FlexAttention(
                self.num_seqs,
                self.num_blocks,
                self.max_length,
                self.shape.block_size,
                self.device,
            )
        else:
            self.attention = SdpaAttention(self.shape.block_size)
        precision = options.precision
        if precision == "auto":
            precision = "bfloat16" if is_cuda else "float32"
        self.autocast_dtype = torch.bfloat16 if precision == "bfloat16" else None
        self.is_compiled = is_cuda if options.compile is None else options.compile
        # What runs the draft: itself, compiled, or DDP around either.
        self.module: nn.Module = draft
        if self.is_compiled:
            self.module = torch.compile(draft, dynamic=False)

    def read(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the target; return its features and final hidden states."""
        return self.target.features(batch.tokens, self.shape.target_layer_ids)

    def hidden(
        self,
        batch: Batch,
        # [num_seqs, num_blocks], ascending
        anchors: torch.Tensor,
        read: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the draft's rows and the target's final hidden states.

        Args:
            batch: The sequences.
            anchors: Of the blocks.
            read: What `read` returned for the batch, if it is used more than once.

        Returns:
            [num_seqs, num_blocks, depth, hidden_size], normed, the rows of the masks;
            and [num_seqs, length, hidden_size].
        """
        shape = self.shape
        features, final = read or self.read(batch)
        tokens = block_tokens(batch, anchors, shape.block_size, shape.mask_token_id)
        embeddings = self.target.embed(tokens.flatten(1))
        num_seqs = anchors.shape[0]
        if self.flex is not None:
            missing = self.num_seqs - num_seqs
            length = self.max_length - features.shape[1]
            features = F.pad(features, (0, 0, 0, length, 0, missing))
            embeddings = F.pad(embeddings, (0, 0, 0, 0, 0, missing))
            anchors = F.pad(anchors, (0, 0, 0, missing))
        mask = self.attention.prepare(anchors, features.shape[1])
        with torch.autocast(
            self.device.type,
            dtype=self.autocast_dtype or torch.bfloat16,
            enabled=self.autocast_dtype is not None,
        ):
            dtype = self.autocast_dtype or torch.float32
            hidden = self.module(
                features.to(dtype),
                embeddings.to(dtype),
                anchors,
                self.attention.attend,
                mask,
            )
        return hidden[:num_seqs, :, 1:], final

    def logits(
        self,
        # [..., hidden_size]
        hidden: torch.Tensor,
    ) -> torch.Tensor:
        """The draft's logits: its rows under the target's output matrix."""
        return F.linear(hidden.to(self.target.output.dtype), self.target.output)
