# SPDX-License-Identifier: Apache-2.0
"""What every tree-aware metadata builder does, whatever its base backend."""

from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheSpec

from vllm_dflash.attention.metadata import (
    AttentionContext,
    TreeAttention,
    find_attention_context,
)


class TreeBuilderMixin:
    """Attaches the tree to the metadata that the target's layers use.

    Draft layers use the same backend class (one override per backend name); the
    metadata that the speculator builds for them carries no tree, so the base backend
    serves them.
    """

    # Set by the classes that our backends name, and never inherited: vLLM's chunked and
    # sink attention subclass any builder and call build() without a tree.
    takes_tree = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.takes_tree = vars(cls).get("takes_tree", False)

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
        **kwargs: Any,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device, **kwargs)  # type: ignore[call-arg]
        self._captured_tree: TreeAttention | None = None
        context = find_attention_context(vllm_config)
        if context is not None and not self._serves_draft_only(context):
            context.reserve_workspace(
                kv_cache_spec.head_size, vllm_config.model_config.dtype, device
            )

    def _serves_draft_only(self, context: AttentionContext) -> bool:
        # The runner's group holds draft layers too when their shapes agree; the
        # speculator's own group holds nothing else.
        return context.draft_layer_names.issuperset(self.layer_names)  # type: ignore[attr-defined]

    @classmethod
    def get_cudagraph_support(
        cls, vllm_config: VllmConfig, kv_cache_spec: KVCacheSpec
    ) -> AttentionCGSupport:
        support = super().get_cudagraph_support(vllm_config, kv_cache_spec)  # type: ignore[misc]
        # A verify graph replays one width; mixed batches need the base's eager path.
        return min(
            support, AttentionCGSupport.UNIFORM_BATCH, key=lambda level: level.value
        )

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
        tree: TreeAttention | None = None,
        **kwargs: Any,
    ) -> Any:
        tree = tree or self._captured_tree
        context = find_attention_context(self.vllm_config)  # type: ignore[attr-defined]
        if context is None or self._serves_draft_only(context):
            tree = None
        metadata = self._build_base(
            tree, common_prefix_len, common_attn_metadata, fast_build, **kwargs
        )
        metadata.tree = tree
        return metadata

    def _build_base(self, tree: TreeAttention | None, *args: Any, **kwargs: Any) -> Any:
        """The base backend's metadata."""
        return super().build(*args, **kwargs)  # type: ignore[misc]

    def build_for_cudagraph_capture(
        self, common_attn_metadata: CommonAttentionMetadata
    ) -> Any:
        context = find_attention_context(self.vllm_config)  # type: ignore[attr-defined]
        tree = None
        # One row a request is plain decoding; only uniform batches are captured, so
        # every wider graph verifies.
        if context is not None and common_attn_metadata.max_query_len > 1:
            tree = context.tree(
                common_attn_metadata.num_reqs,
                common_attn_metadata.max_query_len,
                pure=True,
            )
        # The base builds the metadata of a capture through build() above.
        self._captured_tree = tree
        try:
            return super().build_for_cudagraph_capture(common_attn_metadata)  # type: ignore[misc]
        finally:
            self._captured_tree = None
