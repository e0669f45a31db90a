# SPDX-License-Identifier: Apache-2.0
"""The target's model state, with the hooks a tree verify step needs."""

from typing import Any

import numpy as np
import torch
from vllm.config import CUDAGraphMode
from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.model_states.interface import ModelState

from vllm_dflash.attention.metadata import TreeModelAttnMetadata
from vllm_dflash.runner.runtime import find_runtime
from vllm_dflash.sample.history import linear_history_reason
from vllm_dflash.sample.logits_processors import watch_custom_processors
from vllm_dflash.sample.noise import noise_temperature
from vllm_dflash.sample.tree_sampler import TreeRejectionSampler


class DDTreeModelState(DefaultModelState):
    """Slot reset, depth positions, mask hand-over and the tree sampler."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any):
        super().__init__(vllm_config, *args, **kwargs)
        runtime = find_runtime(vllm_config)
        assert runtime is not None, "the DDTree speculator was not built"
        self.runtime = runtime

    def initialize_kv_cache(
        self, kv_cache_config: KVCacheConfig, block_tables: BlockTables
    ) -> None:
        super().initialize_kv_cache(kv_cache_config, block_tables)
        draft_layers = self.runtime.attention.draft_layer_names
        layers = self.vllm_config.compilation_config.static_forward_context
        groups = [
            [name for name in group.layer_names if name not in draft_layers]
            for group in kv_cache_config.kv_cache_groups
        ]
        self.runtime.compactor.bind(
            groups,
            {name: layers[name].kv_cache for group in groups for name in group},
            block_tables.slot_mappings,
        )

    def add_request(self, req_index: int, new_req_data: NewRequestData) -> None:
        super().add_request(req_index, new_req_data)
        self.runtime.observer.request_added(new_req_data.req_id)
        params = new_req_data.sampling_params
        self.runtime.reset_slot(
            req_index,
            chain_only=linear_history_reason(params) is not None,
            noise_temperature=noise_temperature(params),
        )

    def preprocess_state(
        self,
        input_batch: InputBatch,
        block_tables: tuple[torch.Tensor, ...],
        kv_cache_config: KVCacheConfig,
        num_computed_tokens: torch.Tensor,
    ) -> None:
        super().preprocess_state(
            input_batch, block_tables, kv_cache_config, num_computed_tokens
        )
        step = self.runtime.step
        self.runtime.num_logits_np = None
        if input_batch.num_draft_tokens == 0:
            step.clear()
            return
        assert input_batch.num_draft_tokens_per_req is not None
        self.runtime.num_logits_np = input_batch.num_draft_tokens_per_req + 1
        self.runtime.observer.begin()
        step.prepare(
            input_batch.idx_mapping,
            input_batch.query_start_loc,
            input_batch.cu_num_logits,
            input_batch.positions,
            input_batch.num_draft_tokens_per_req,
        )
        self.runtime.observer.mark("prepare")

    def prepare_attn(
        self,
        input_batch: InputBatch,
        cudagraph_mode: CUDAGraphMode,
        *args: Any,
        for_capture: bool = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        tree = None
        # Captures and dummy batches ask the builder, which knows the graph's width.
        if not for_capture and input_batch.num_draft_tokens:
            step = self.runtime.step
            num_verify_reqs = step.num_verify_reqs
            rows = step.num_tree_rows_np
            assert rows is not None
            scheduled = input_batch.num_scheduled_tokens[:num_verify_reqs]
            # They lead, and nobody else writes what is beyond their trees.
            assert np.array_equal(scheduled, rows[:num_verify_reqs])
            tree = self.runtime.attention.tree(
                num_verify_reqs,
                step.max_tree_rows,
                pure=num_verify_reqs == input_batch.num_reqs,
            )
        return super().prepare_attn(
            input_batch,
            cudagraph_mode,
            *args,
            for_capture=for_capture,
            model_specific_attn_metadata=TreeModelAttnMetadata(tree),
            **kwargs,
        )

    def custom_sampler(self, sampler: Any) -> tuple[Any, Any]:
        spec_config = self.vllm_config.speculative_config
        assert spec_config is not None
        # The runner tells the sampler of a request after add_request above.
        sampler = watch_custom_processors(sampler, self.runtime.require_chain)
        return sampler, TreeRejectionSampler(
            sampler,
            spec_config,
            self.device,
            self.runtime.step,
            self.runtime.compactor,
            self.runtime.observer,
        )


def make_model_state_cls(base: type[ModelState]) -> type[ModelState]:
    """The tree's model state in place of ``base``.

    Raises:
        ValueError: The target model brings a model state of its own.
    """
    if base is not DefaultModelState:
        raise ValueError(
            f"DDTree does not support targets that use {base.__name__}. Supported are "
            'decoder-only attention models. Use "ddtree": false in '
            "--speculative-config to verify chains."
        )
    return DDTreeModelState
