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
from vllm_dflash_kernels.tree_attention import TreeAttentionWorkspace


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
    # Scratch of the GPU kernel; None on the CPU.
    workspace: TreeAttentionWorkspace | None = None
    # Bound of the sequence lengths; one value for eager steps and graphs, so that
    # both cut the keys alike.
    max_seq_len: int | None = None

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
        self.max_seq_len = vllm_config.model_config.max_model_len
        self.workspace: TreeAttentionWorkspace | None = None
        # Filled when the draft model is loaded, before any builder exists.
        self.draft_layer_names: set[str] = set()
        # The strong reference keeps the id below unique while this object lives.
        self._key_object = vllm_config.compilation_config.static_forward_context
        _contexts[id(self._key_object)] = self

    def reserve_workspace(
        self, head_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Make room for layers of this head size; layers run one after another."""
        if device.type != "cuda":
            return
        workspace = TreeAttentionWorkspace.allocate(head_size, device, dtype=dtype)
        held = self.workspace
        if held is None:
            self.workspace = workspace
            return
        # Small heads need more rows, large ones more values.
        held.lse = max(held.lse, workspace.lse, key=torch.Tensor.numel)
        held.partial = max(held.partial, workspace.partial, key=torch.Tensor.numel)

    def tree(
        self, num_verify_reqs: int, max_query_len: int, pure: bool
    ) -> TreeAttention:
        """Tree part of a batch whose first ``num_verify_reqs`` requests verify."""
        return TreeAttention(
            step=self.step,
            num_verify_reqs=num_verify_reqs,
            max_query_len=max_query_len,
            pure=pure,
            workspace=self.workspace,
            max_seq_len=self.max_seq_len,
        )


_contexts: "weakref.WeakValueDictionary[int, AttentionContext]" = (
    weakref.WeakValueDictionary()
)


def find_attention_context(vllm_config: VllmConfig) -> AttentionContext | None:
    """The engine's tree state, or None for an engine without trees."""
    return _contexts.get(id(vllm_config.compilation_config.static_forward_context))
