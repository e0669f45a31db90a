# SPDX-License-Identifier: Apache-2.0
"""The DFlash draft as a trainable module, with the tensor names of its checkpoints.

It owns neither embedding nor output matrix: both are the target's and stay frozen.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F

from vllm_dflash_training.draft_shape import DraftShape


class Norm(nn.Module):
    """RMS norm, computed in float32."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size = self.weight.shape
        return F.rms_norm(x.float(), size, self.weight.float(), self.eps).to(x.dtype)


class Rotary:
    """Cosines and sines of positions, one half of the head beside the other."""

    def __init__(self, positions: torch.Tensor, head_dim: int, theta: float):
        # [..., 1, head_dim]: the same for each head
        exponents = torch.arange(0, head_dim, 2, device=positions.device).float()
        frequencies = theta ** (-exponents / head_dim)
        angles = positions[..., None].float() * frequencies
        angles = torch.cat([angles, angles], -1)[..., None, :]
        self.cos, self.sin = angles.cos(), angles.sin()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        left, right = x.chunk(2, -1)
        rotated = torch.cat([-right, left], -1)
        return (x * self.cos + rotated * self.sin).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, shape: DraftShape):
        super().__init__()
        hidden, dim = shape.hidden_size, shape.head_dim
        self.head_dim = dim
        self.q_proj = nn.Linear(hidden, shape.num_heads * dim, bias=False)
        self.k_proj = nn.Linear(hidden, shape.num_kv_heads * dim, bias=False)
        self.v_proj = nn.Linear(hidden, shape.num_kv_heads * dim, bias=False)
        self.o_proj = nn.Linear(shape.num_heads * dim, hidden, bias=False)
        self.q_norm = Norm(dim, shape.eps)
        self.k_norm = Norm(dim, shape.eps)

    def forward(
        self,
        # [num_seqs, Q, hidden_size]
        x: torch.Tensor,
        # [num_seqs, C, hidden_size]
        context: torch.Tensor,
        rotary: Rotary,
        context_rotary: Rotary,
        attend: Callable[..., torch.Tensor],
        mask: Any,
    ) -> torch.Tensor:
        query = rotary(self.q_norm(self._heads(self.q_proj(x))))
        key = rotary(self.k_norm(self._heads(self.k_proj(x))))
        # As in serving, the context enters every layer through the layer's own K and
        # V projections, and through nothing else.
        context_key = self.k_norm(self._heads(self.k_proj(context)))
        key = torch.cat([context_rotary(context_key), key], 1)
        value = torch.cat([self.v_proj(context), self.v_proj(x)], 1)
        out = attend(
            query.transpose(1, 2),
            key.transpose(1, 2),
            self._heads(value).transpose(1, 2),
            mask,
        )
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (-1, self.head_dim))


class MLP(nn.Module):
    def __init__(self, shape: DraftShape):
        super().__init__()
        hidden, inner = shape.hidden_size, shape.intermediate_size
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, shape: DraftShape):
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = MLP(shape)
        self.input_layernorm = Norm(shape.hidden_size, shape.eps)
        self.post_attention_layernorm = Norm(shape.hidden_size, shape.eps)

    def forward(self, x: torch.Tensor, *attention: Any) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), *attention)
        return x + self.mlp(self.post_attention_layernorm(x))


class DFlashDraft(nn.Module):
    """The draft of `DFlashDraftModel` checkpoints."""

    def __init__(self, shape: DraftShape):
        super().__init__()
        self.shape = shape
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_layers))
        num_features = len(shape.target_layer_ids) * shape.hidden_size
        self.fc = nn.Linear(num_features, shape.hidden_size, bias=False)
        self.hidden_norm = Norm(shape.hidden_size, shape.eps)
        self.norm = Norm(shape.hidden_size, shape.eps)

    def initialise(self, seed: int, final_norm: torch.Tensor | None = None) -> None:
        """Draw new weights; what is added to the residual stream starts smaller.

        Args:
            seed: Of the draw.
            final_norm: The target's, since its output matrix expects that scale.
        """
        generator = torch.Generator().manual_seed(seed)
        small = 0.02 / math.sqrt(2 * self.shape.num_layers)
        with torch.no_grad():
            for name, weight in self.named_parameters():
                if weight.dim() == 2:
                    is_added = name.endswith(("o_proj.weight", "down_proj.weight"))
                    std = small if is_added else 0.02
                    weight.copy_(torch.randn(weight.shape, generator=generator) * std)
            if final_norm is not None:
                self.norm.weight.copy_(final_norm.float())

    def forward(
        self,
        # [num_seqs, C, num_features * hidden_size], the target's layer outputs
        features: torch.Tensor,
        # [num_seqs, num_blocks * block_size, hidden_size], target's embeddings
        embeddings: torch.Tensor,
        # [num_seqs, num_blocks]
        anchors: torch.Tensor,
        attend: Callable[..., torch.Tensor],
        mask: Any = None,
    ) -> torch.Tensor:
        """Return normed hidden rows. [num_seqs, num_blocks, block_size, hidden_size]

        `attend(query, key, value, mask)` is one of `attention.py`.
        """
        shape = self.shape
        offsets = torch.arange(shape.block_size, device=anchors.device)
        positions = (anchors[..., None] + offsets).flatten(1)
        context_positions = torch.arange(features.shape[1], device=anchors.device)
        rotary = Rotary(positions, shape.head_dim, shape.rope_theta)
        context_rotary = Rotary(context_positions, shape.head_dim, shape.rope_theta)
        context = self.hidden_norm(self.fc(features))
        x = embeddings
        for layer in self.layers:
            x = layer(x, context, rotary, context_rotary, attend, mask)
        return self.norm(x).view(*anchors.shape, shape.block_size, -1)
