# SPDX-License-Identifier: Apache-2.0
"""Tree attention on the CPU: gathered K/V and SDPA with an explicit mask.

vLLM's CPU kernel takes no mask and keeps keys in an ISA-specific packing, which can
neither be gathered nor compacted, so engines with trees keep plain logical rows
[block, head, slot, K || V] in the same cache memory for target and draft layers.
"""

from typing import Any

import torch
import torch.nn.functional as F
from vllm.v1.attention.backend import (
    AttentionLayer,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
)
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)

from vllm_dflash.attention.builder import TreeBuilderMixin
from vllm_dflash.attention.cpu_mask import attention_mask


class _PlainCPUMetadataBuilder(CPUAttentionMetadataBuilder):
    """CPU metadata without the C++ kernel's schedule."""

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device) -> None:
        # The parent chooses a packing for its C++ kernel, which is not used.
        AttentionMetadataBuilder.__init__(
            self, kv_cache_spec, layer_names, vllm_config, device
        )

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> CPUAttentionMetadata:
        common = common_attn_metadata
        metadata = CPUAttentionMetadata(
            num_actual_tokens=common.num_actual_tokens,
            max_query_len=common.max_query_len,
            query_start_loc=common.query_start_loc,
            max_seq_len=common.max_seq_len,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
            scheduler_metadata=None,
            causal=common.causal,
        )
        # Shared by all layers of the group: the mask depends on the window only.
        metadata.mask_cache = {}  # type: ignore[attr-defined]
        return metadata


class TreeCPUMetadataBuilder(TreeBuilderMixin, _PlainCPUMetadataBuilder):
    """Plain CPU metadata plus the tree."""

    takes_tree = True


class TreeCPUAttentionImpl(CPUAttentionBackendImpl):
    """Causal, windowed, non-causal and tree attention over plain KV rows."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        unsupported = [
            name
            for name, used in (
                ("ALiBi", self.alibi_slopes is not None),
                ("a quantised KV cache", self.is_fp8_kv_cache),
                (
                    f"{self.attn_type} attention",
                    self.attn_type != AttentionType.DECODER,
                ),
            )
            if used
        ]
        if unsupported:
            raise NotImplementedError(
                f"Tree verification on the CPU does not support {unsupported[0]}. "
                'Use "ddtree": false in --speculative-config.'
            )

    def do_kv_cache_update(
        self,
        layer: torch.nn.Module,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        num_tokens = slot_mapping.shape[0]
        valid = slot_mapping >= 0
        slots = slot_mapping[valid]
        block_size = kv_cache.shape[2]
        rows = torch.cat([key[:num_tokens][valid], value[:num_tokens][valid]], dim=-1)
        kv_cache[slots // block_size, :, slots % block_size] = rows.to(kv_cache.dtype)

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: CPUAttentionMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if attn_metadata is None:
            return output
        metadata = attn_metadata
        starts = metadata.query_start_loc.tolist()
        seq_lens = metadata.seq_lens.tolist()
        masks = metadata.mask_cache.get(self.sliding_window)  # type: ignore[attr-defined]
        if masks is None:
            masks = [
                attention_mask(metadata, req, starts, seq_lens, self.sliding_window)
                for req in range(len(seq_lens))
            ]
            metadata.mask_cache[self.sliding_window] = masks  # type: ignore[attr-defined]
        for req, seq_len in enumerate(seq_lens):
            start, end = starts[req], starts[req + 1]
            if end > start:
                output[start:end] = self._attend(
                    query[start:end],
                    kv_cache,
                    metadata.block_table[req],
                    seq_len,
                    masks[req],
                ).view(output[start:end].shape)
        return output

    def _attend(
        self,
        # [num_rows, num_heads, head_size]
        query: torch.Tensor,
        # [num_blocks, num_kv_heads, block_size, 2 * head_size]
        kv_cache: torch.Tensor,
        # [max_num_blocks], int32
        block_table: torch.Tensor,
        seq_len: int,
        # [num_rows, seq_len], bool
        mask: torch.Tensor,
    ) -> torch.Tensor:
        num_rows, group = query.shape[0], self.num_queries_per_kv
        num_kv_heads, block_size = kv_cache.shape[1:3]
        num_blocks = -(-seq_len // block_size)
        rows = kv_cache[block_table[:num_blocks].long()].transpose(0, 1)
        rows = rows.reshape(num_kv_heads, num_blocks * block_size, -1)[:, :seq_len]
        keys, values = rows.to(query.dtype).split(self.head_size, dim=-1)
        # Query heads of one KV head become rows of one product.
        packed = query.view(num_rows, num_kv_heads, group, self.head_size)
        packed = packed.permute(1, 2, 0, 3).reshape(num_kv_heads, group * num_rows, -1)
        packed_mask = mask.repeat(group, 1)
        if self.logits_soft_cap or self.sinks is not None:
            out = self._attend_capped(packed, keys, values, packed_mask, num_rows)
        else:
            out = F.scaled_dot_product_attention(
                packed[None], keys[None], values[None], packed_mask, scale=self.scale
            )[0]
        out = out.view(num_kv_heads, group, num_rows, self.head_size)
        return out.permute(2, 0, 1, 3)

    def _attend_capped(
        self,
        # [num_kv_heads, group * num_rows, head_size]
        packed: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        mask: torch.Tensor,
        num_rows: int,
    ) -> torch.Tensor:
        """Soft-capped scores and attention sinks, which SDPA does not know."""
        scores = torch.matmul(packed.float(), keys.float().transpose(1, 2)) * self.scale
        if self.logits_soft_cap:
            scores = self.logits_soft_cap * torch.tanh(scores / self.logits_soft_cap)
        scores = scores.masked_fill(~mask, float("-inf"))
        if self.sinks is not None:
            sinks = self.sinks.float().view(self.num_kv_heads, -1, 1)
            column = sinks.repeat_interleave(num_rows, dim=1)
            scores = torch.cat([scores, column], dim=-1)
        weights = torch.softmax(scores, dim=-1)[..., : keys.shape[1]]
        return torch.matmul(weights, values.float()).to(packed.dtype)


class TreeCPUAttentionBackend(CPUAttentionBackend):
    """CPU_ATTN with tree verification and plain KV rows."""

    @staticmethod
    def get_impl_cls() -> type[TreeCPUAttentionImpl]:
        return TreeCPUAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[TreeCPUMetadataBuilder]:
        return TreeCPUMetadataBuilder
