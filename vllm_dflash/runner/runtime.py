# SPDX-License-Identifier: Apache-2.0
"""The tree state of one engine, shared by its speculator and its model state."""

import weakref

import numpy as np
import torch
from vllm.config import VllmConfig

from vllm_dflash.attention.metadata import AttentionContext
from vllm_dflash.config import DDTreeConfig
from vllm_dflash.kv_cache.compaction import KVCompactor
from vllm_dflash.metrics.observer import RoundObserver
from vllm_dflash.tree.draft_tree import DraftTreeBuffers
from vllm_dflash.tree.verify_step import VerifyStep


class TreeRuntime:
    """Persistent tree buffers and the objects that work on them."""

    def __init__(
        self, vllm_config: VllmConfig, config: DDTreeConfig, device: torch.device
    ):
        num_slots = vllm_config.scheduler_config.max_num_seqs
        self.config = config
        self.trees = DraftTreeBuffers.allocate(num_slots, config.width, device)
        self.step = VerifyStep.allocate(self.trees, config.depth, device)
        self.compactor = KVCompactor()
        self.attention = AttentionContext(vllm_config, self.step)
        self.observer = RoundObserver(vllm_config, config, device)
        # Host mirror of num_nodes > 0: the sizes of the next draft batch depend on it.
        self.has_tree_np = np.zeros(num_slots, dtype=bool)
        # [num_reqs], rows of logits of each request of a verify step, until its
        # adapters are set.
        self.num_logits_np: np.ndarray | None = None
        self._key_object = vllm_config.compilation_config.static_forward_context
        _runtimes[id(self._key_object)] = self

    def reset_slot(self, slot: int, chain_only: bool, noise_temperature: float) -> None:
        """A new request takes the slot over."""
        self.trees.reset_slot(slot, chain_only, noise_temperature)
        self.has_tree_np[slot] = False

    def spread_over_logits(self, values: tuple[int, ...]) -> tuple[int, ...]:
        """One value a request becomes one for each of its rows of logits.

        Holds for the step that was prepared last, and once: dummy batches have a row
        a request.
        """
        num_logits, self.num_logits_np = self.num_logits_np, None
        return values if num_logits is None else tuple(np.repeat(values, num_logits))

    def require_chain(self, slot: int) -> None:
        """The request that has just taken the slot needs a linear history."""
        self.trees.require_chain(slot)


# Keyed like AttentionContext: every copy of an engine's config shares that dict.
_runtimes: "weakref.WeakValueDictionary[int, TreeRuntime]" = (
    weakref.WeakValueDictionary()
)


def find_runtime(vllm_config: VllmConfig) -> TreeRuntime | None:
    """The engine's runtime, or None when it does not verify trees."""
    return _runtimes.get(id(vllm_config.compilation_config.static_forward_context))
