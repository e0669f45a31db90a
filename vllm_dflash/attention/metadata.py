# SPDX-License-Identifier: Apache-2.0
"""How the trees of a verify step reach vLLM's attention backends.

vLLM builds attention metadata through builders that only see the vLLM config, so the
engine's tree buffers are found through the one object that every copy of an engine's
config shares: the static forward context of its layers.
"""

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.v1.worker.gpu.model_states.interface import ModelSpecificAttnMetadata

from vllm_dflash.tree.verify_step import VerifyStep


@dataclass
class TreeAttention:
    """Tree part of one batch's attention metadata."""

    step: VerifyStep
    # Leading requests of the batch that verify trees.
    num_verify_reqs: int
    # Query rows of the widest of them.
    max_query_len: int
    # No other request is in the batch: the base backend has nothing to do.
    pure: bool

    @property
    def batch_ancestors(self) -> torch.Tensor:
        return self.step.batch_ancestors

    @property
    def tree_len(self) -> torch.Tensor:
        return self.step.tree_len


@dataclass
class TreeModelAttnMetadata(ModelSpecificAttnMetadata):
    """Hands the batch's :class:`TreeAttention` to the tree-aware builders."""

    tree: TreeAttention | None

    def get_extra_attn_kwargs(
        self, attn_metadata_builder: Any, num_reqs: int
    ) -> dict[str, Any]:
        if getattr(attn_metadata_builder, "takes_tree", False):
            return {"tree": self.tree}
        return {}


class AttentionContext:
    """Tree state of one engine, as its attention builders find it."""

    def __init__(self, vllm_config: VllmConfig, step: VerifyStep):
        self.step = step
        # Filled when the draft model is loaded, before any builder exists.
        self.draft_layer_names: set[str] = set()
        # The strong reference keeps the id below unique while this object lives.
        self._key_object = vllm_config.compilation_config.static_forward_context
        _contexts[id(self._key_object)] = self

    def capture_tree(self, num_reqs: int, max_query_len: int) -> TreeAttention | None:
        """Tree part of a graph that verifies ``max_query_len`` rows a request."""
        if max_query_len <= 1:
            return None
        return TreeAttention(
            step=self.step,
            num_verify_reqs=num_reqs,
            max_query_len=max_query_len,
            pure=True,
        )


_contexts: "weakref.WeakValueDictionary[int, AttentionContext]" = (
    weakref.WeakValueDictionary()
)


def find_attention_context(vllm_config: VllmConfig) -> AttentionContext | None:
    """The engine's tree state, or None for an engine without trees."""
    return _contexts.get(id(vllm_config.compilation_config.static_forward_context))
