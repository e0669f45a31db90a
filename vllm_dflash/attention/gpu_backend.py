# SPDX-License-Identifier: Apache-2.0
"""Tree attention beside vLLM's own GPU backends, on the same paged KV cache.

A batch that only verifies trees runs the tree kernel, alone or after FlashAttention-3
has attended to the committed keys (``flash_prefix.py``); in a mixed batch the verify
rows lead, and the base backend serves the others (``mixed.py``). Everything else
(selection, cache layout, cache update, prefill, the draft's non-causal attention) is
the base backend's.
"""

from typing import Any

import torch
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.triton_attn import (
    TritonAttentionBackend,
    TritonAttentionImpl,
    TritonAttentionMetadataBuilder,
)

from vllm_dflash.attention.builder import TreeBuilderMixin
from vllm_dflash.attention.flash_prefix import FlashPrefixMixin, attend_to_prefix
from vllm_dflash.attention.metadata import TreeAttention
from vllm_dflash.attention.mixed import MixedBuilderMixin
from vllm_dflash_kernels.tree_attention.step import TreeAttentionStep

_FP8_DTYPES = (torch.float8_e4m3fn, torch.uint8)


class TreeImplMixin:
    """Routes verify rows to the tree kernel."""

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        """No: the tree kernel writes the model's dtype."""
        return False

    def forward(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        tree = getattr(attn_metadata, "tree", None)
        if tree is None or not tree.pure:
            first = 0 if tree is None else attn_metadata.first_row
            super().forward(  # type: ignore[misc]
                layer,
                query[first:] if first else query,
                # Not read: they are in the cache.
                key,
                value,
                kv_cache,
                attn_metadata,
                output[first:] if first else output,
                output_scale,
                output_block_scale,
            )
        if tree is not None:
            self._verify(layer, query, kv_cache, attn_metadata, tree, output)
        return output

    def _verify(
        self,
        layer: torch.nn.Module,
        # [num_tokens, num_heads, head_size]
        query: torch.Tensor,
        # [num_blocks, num_kv_heads, block_size, 2 * head_size]
        kv_cache: torch.Tensor,
        metadata: Any,
        tree: TreeAttention,
        # [num_tokens, num_heads, head_size], verify rows are written
        output: torch.Tensor,
    ) -> None:
        k_scale = v_scale = None
        if kv_cache.dtype in _FP8_DTYPES:
            k_scale, v_scale = layer._k_scale, layer._v_scale
            if query.dtype in _FP8_DTYPES:
                # vLLM quantises the query for its own kernels; ours takes it wide.
                query = query.to(output.dtype)
                k_scale = k_scale * layer._q_scale
        prefix_lse = attend_to_prefix(self, query, kv_cache, metadata, output)
        window = self.sliding_window  # type: ignore[attr-defined]
        _step_of(metadata, tree)(
            query,
            kv_cache,
            output,
            scale=self.scale,  # type: ignore[attr-defined]
            # vLLM stores the window as (left, right) offsets, (-1, -1) when absent.
            sliding_window=-1 if window is None or window[0] < 0 else window[0] + 1,
            softcap=self.logits_soft_cap or 0.0,  # type: ignore[attr-defined]
            sinks=self.sinks,  # type: ignore[attr-defined]
            k_scale=k_scale,
            v_scale=v_scale,
            prefix_lse=prefix_lse,
        )


def _step_of(metadata: Any, tree: TreeAttention) -> TreeAttentionStep:
    """Return the launches that the layers of this metadata share."""
    step = getattr(metadata, "tree_step", None)
    if step is None:
        batch, num_reqs = metadata.verify_batch, tree.num_verify_reqs
        step = metadata.tree_step = TreeAttentionStep(
            block_table=batch.block_table_tensor[:num_reqs],
            seq_lens=batch.seq_lens[:num_reqs],
            query_start_loc=batch.query_start_loc[: num_reqs + 1],
            ancestors=tree.batch_ancestors,
            tree_len=tree.tree_len,
            max_query_len=tree.max_query_len,
            max_seq_len=tree.max_seq_len,
            workspace=tree.workspace,
        )
    return step


class TreeFlashAttentionMetadataBuilder(
    MixedBuilderMixin, FlashPrefixMixin, TreeBuilderMixin, FlashAttentionMetadataBuilder
):
    """FlashAttention metadata plus the tree."""

    takes_tree = True


class TreeFlashAttentionImpl(TreeImplMixin, FlashAttentionImpl):
    """FlashAttention, with verify rows served by the tree kernel."""


class TreeFlashAttentionBackend(FlashAttentionBackend):
    """FLASH_ATTN with tree verification."""

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """No: splits and kernels are chosen by the batch."""
        return False

    @staticmethod
    def get_impl_cls() -> type[TreeFlashAttentionImpl]:
        return TreeFlashAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[TreeFlashAttentionMetadataBuilder]:
        return TreeFlashAttentionMetadataBuilder


class TreeTritonAttentionMetadataBuilder(
    MixedBuilderMixin, TreeBuilderMixin, TritonAttentionMetadataBuilder
):
    """Triton attention metadata plus the tree."""

    takes_tree = True


class TreeTritonAttentionImpl(TreeImplMixin, TritonAttentionImpl):
    """Triton attention, with verify rows served by the tree kernel."""


class TreeTritonAttentionBackend(TritonAttentionBackend):
    """TRITON_ATTN with tree verification."""

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """No: splits and kernels are chosen by the batch."""
        return False

    @staticmethod
    def get_impl_cls() -> type[TreeTritonAttentionImpl]:
        return TreeTritonAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[TreeTritonAttentionMetadataBuilder]:
        return TreeTritonAttentionMetadataBuilder
