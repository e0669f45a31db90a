# SPDX-License-Identifier: Apache-2.0
"""Committed keys of a verify batch by FlashAttention-3, own keys by the tree kernel.

Every row of a tree sees every committed key, so that part needs no mask and any
attention kernel can do it that returns its log-sum-exps. The tree kernel starts from
them and reads the step's own keys only (``tree_attention(prefix_lse=...)``). Where this
wins is decided by ``prefers_given_prefix`` from the shape of the batch.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.fa_utils import get_flash_attn_version

from vllm_dflash_kernels.tree_attention.tiles import prefers_given_prefix

if TYPE_CHECKING:
    from vllm_dflash.attention.metadata import TreeAttention

_FLASH_ATTENTION = 3
_NO_WINDOW = (None, (-1, -1))
# vLLM lets FlashAttention split the keys of captured batches, with fp32 partial
# results of [splits, heads, tokens, head size]. It captures up to 512 tokens, engines
# with trees more; the product stays what it was. At 2048 tokens of 32 heads of 128 that
# is 0.27 GB instead of 1.07.
_MAX_SPLIT_TOKENS = 32 * 512


class FlashPrefixMixin:
    """Builds FlashAttention's schedule for the committed keys of a verify batch.

    Stands before the tree's mixin and FlashAttention's builder.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Asked here, where vLLM's config is set: the user may have named a version.
        self._flash_version = get_flash_attn_version(head_size=self.headdim)  # type: ignore[has-type]

    def _build_base(
        self,
        tree: TreeAttention | None,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        most_splits = self.max_num_splits
        self.max_num_splits = min(
            most_splits,
            max(1, _MAX_SPLIT_TOKENS // max(common_attn_metadata.num_actual_tokens, 1)),
        )
        build = self._build_scheduled
        if tree is None or not tree.pure:
            build = super()._build_base  # type: ignore[misc]
        try:
            return build(tree, common_prefix_len, common_attn_metadata, *args, **kwargs)
        finally:
            self.max_num_splits = most_splits

    def _build_scheduled(
        self,
        tree: TreeAttention,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Metadata of a batch that only verifies trees."""
        num_reqs = common_attn_metadata.num_reqs
        seq_lens = common_attn_metadata.seq_lens
        prefix_len = None
        if self._prefers_prefix(num_reqs, tree.max_query_len):
            prefix_len = tree.step.prefix_len[:num_reqs]
            common_attn_metadata = copy.copy(common_attn_metadata)
            common_attn_metadata.seq_lens = prefix_len
            common_attn_metadata.causal = False
        scheduled = self.aot_schedule
        # The tree kernel plans its own splits. The first build must not skip the
        # schedule: it learns the layers' window there.
        first = self.aot_sliding_window is None
        self.aot_schedule = scheduled and (first or prefix_len is not None)
        try:
            metadata = super()._build_base(  # type: ignore[misc]
                tree, common_prefix_len, common_attn_metadata, *args, **kwargs
            )
        finally:
            # Layers with unlike windows have no common schedule, which the first build
            # finds out for good.
            if not first:
                self.aot_schedule = scheduled
        metadata.seq_lens = seq_lens
        metadata.prefix_len = prefix_len
        return metadata

    def _prefers_prefix(self, num_reqs: int, width: int) -> bool:
        rows = width * (self.num_heads_q // self.num_heads_kv)
        return (
            self._flash_version == _FLASH_ATTENTION
            and self.kv_cache_dtype in (torch.bfloat16, torch.float16)
            and self.aot_sliding_window in (None, (-1, -1))
            and prefers_given_prefix(num_reqs, self.num_heads_kv, rows, self.headdim)
        )


def attend_to_prefix(
    impl: Any,
    # [num_tokens, num_heads, head_size]
    query: torch.Tensor,
    # [num_blocks, num_kv_heads, block_size, 2 * head_size]
    kv_cache: torch.Tensor,
    metadata: Any,
    # [num_tokens, num_heads, head_size], written
    output: torch.Tensor,
) -> torch.Tensor | None:
    """Attention to the committed keys; natural log-sum-exps [num_heads, num_tokens].

    None, and nothing is written, where the tree kernel does all by itself.
    """
    prefix_len = getattr(metadata, "prefix_len", None)
    if prefix_len is None or impl.sliding_window not in _NO_WINDOW:
        return None
    from vllm.vllm_flash_attn.flash_attn_interface import flash_attn_varlen_func

    keys, values = kv_cache.transpose(1, 2).split(impl.head_size, dim=-1)
    num_tokens = metadata.num_actual_tokens
    _, lse = flash_attn_varlen_func(
        q=query[:num_tokens],
        k=keys,
        v=values,
        out=output[:num_tokens],
        cu_seqlens_q=metadata.query_start_loc,
        max_seqlen_q=metadata.max_query_len,
        seqused_k=prefix_len,
        max_seqlen_k=metadata.max_seq_len,
        softmax_scale=impl.scale,
        causal=False,
        block_table=metadata.block_table,
        softcap=impl.logits_soft_cap or 0.0,
        scheduler_metadata=metadata.scheduler_metadata,
        num_splits=metadata.max_num_splits,
        fa_version=_FLASH_ATTENTION,
        return_softmax_lse=True,
    )
    return lse
