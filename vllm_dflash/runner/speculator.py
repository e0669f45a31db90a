# SPDX-License-Identifier: Apache-2.0
"""DFlash drafts, laid out as trees: depth K inside, budget N outside.

vLLM is told ``num_speculative_tokens = N`` and schedules, reserves and captures for N
drafts. The DFlash model must be fed exactly the mask tokens it was trained on, so this
speculator works on a copy of the config that says K. Candidates are collected and the
tree is built inside the captured draft graph.
"""

import copy
from typing import Any

import torch
import torch.nn as nn
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator
from vllm.v1.worker.gpu.states import RequestState

from vllm_dflash.attention.registry import (
    CPU_TREE_BACKENDS,
    GPU_TREE_BACKENDS,
    install_tree_backends,
)
from vllm_dflash.config import DDTreeConfig, get_ddtree_config
from vllm_dflash.graphs import draft_sizes
from vllm_dflash.runner.path_batch import PathBatchMaker
from vllm_dflash.runner.runtime import TreeRuntime
from vllm_dflash.tree.builder import TreeBuilder
from vllm_dflash_kernels.gather_rows import gather_rows


def draft_vllm_config(vllm_config: VllmConfig, depth: int) -> VllmConfig:
    """A copy of the engine's config for the draft: K drafts, no width schedule."""
    config = copy.copy(vllm_config)
    spec_config = copy.copy(vllm_config.speculative_config)
    assert spec_config is not None
    spec_config.num_speculative_tokens = depth
    spec_config.num_speculative_tokens_per_batch_size = None
    config.speculative_config = spec_config
    return config


class DDTreeSpeculator(DFlashSpeculator):
    """Proposes ``[num_reqs, N]`` node tokens; the tree stays in the runtime."""

    _speculator_name = "DDTree"

    def __init__(
        self,
        vllm_config: VllmConfig,
        device: torch.device,
        config: DDTreeConfig,
        runtime: TreeRuntime,
    ):
        super().__init__(draft_vllm_config(vllm_config, config.depth), device)
        self.config = config
        self.runtime = runtime
        self.builder = TreeBuilder(
            runtime.trees,
            config.depth,
            config.max_children,
            config.scale_by_temperature,
            # Of 53 bits, which is not the kernel's.
            config.use_noise and not self.use_fp64_gumbel,
            self.vocab_size,
            device,
        )
        self._context_only = False
        self.path_batch = PathBatchMaker(
            self.max_num_reqs, self.max_num_tokens, config.depth, device
        )

    def load_model(self, target_model: nn.Module) -> None:
        super().load_model(target_model)
        self.runtime.attention.draft_layer_names = set(self.draft_attn_layer_names)

    def set_attn(self, *args: Any, **kwargs: Any) -> None:
        super().set_attn(*args, **kwargs)
        for group in (g for groups in self.target_attn_groups for g in groups):
            if not getattr(group.get_metadata_builder(), "takes_tree", False):
                raise ValueError(
                    "DDTree can't verify trees with the attention backend "
                    f"{group.backend.get_name()}. Allowed: "
                    f"{', '.join((*GPU_TREE_BACKENDS, *CPU_TREE_BACKENDS))}. Type "
                    "--attention-backend with one of them, or "
                    '"ddtree": false in --speculative-config.'
                )

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        # The engine's capture sizes are multiples of the tree width; the draft's
        # graphs are K + 1 wide.
        engine_config = self.vllm_config
        compilation = copy.copy(engine_config.compilation_config)
        if compilation.cudagraph_capture_sizes:
            sizes = draft_sizes(
                self.config,
                self.max_num_reqs,
                self.max_num_tokens,
                compilation.cudagraph_capture_sizes,
            )
            compilation.cudagraph_capture_sizes = sizes
            compilation.max_cudagraph_capture_size = sizes[-1]
        self.vllm_config = copy.copy(engine_config)
        self.vllm_config.compilation_config = compilation
        try:
            super().init_cudagraph_manager(cudagraph_mode)
        finally:
            self.vllm_config = engine_config

    def sample_draft(
        self,
        # [num_reqs * K, hidden_size]
        hidden_states: torch.Tensor,
        sample_src_positions: torch.Tensor,
        # [num_reqs * K], int64, -1: inert row
        idx_mapping: torch.Tensor,
        # [max_num_reqs], float32
        temperature: torch.Tensor,
        # [max_num_reqs], int64
        seeds: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        logits = self.compute_draft_logits(hidden_states, 0)
        return self.builder.collect_candidates(
            logits, idx_mapping, temperature, seeds, sample_src_positions
        )

    def _generate_draft(self, num_reqs: int, *args: Any, **kwargs: Any) -> None:
        if self._context_only:
            return
        super()._generate_draft(num_reqs, *args, **kwargs)
        self.builder.build(num_reqs, self.sample_idx_mapping)

    @torch.inference_mode()
    def propose(
        self,
        input_batch: InputBatch,
        attn_metadata: dict[str, Any],
        slot_mappings: dict[str, torch.Tensor],
        last_hidden_states: torch.Tensor,
        aux_hidden_states: list[torch.Tensor] | None,
        # [num_reqs]
        num_sampled: torch.Tensor,
        # [num_reqs]
        num_rejected: torch.Tensor,
        *args: Any,
        dummy_run: bool = False,
        is_profile: bool = False,
        num_speculative_tokens: int | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        step = self.runtime.step
        num_reqs = input_batch.num_reqs
        if not dummy_run:
            self.runtime.observer.mark("update")
        if not dummy_run and step.num_tree_rows_np is not None:
            input_batch, rows, num_rejected = self.path_batch.make(
                input_batch,
                step,
                self.runtime.has_tree_np,
                num_sampled,
                num_rejected,
            )
            if aux_hidden_states:
                # What the base does with them, less one concatenation.
                last_hidden_states = self.model.combine_hidden_states(
                    gather_rows(aux_hidden_states, rows)
                )
                aux_hidden_states = None
            else:
                last_hidden_states = last_hidden_states[rows]
        # A step after which nothing is verified needs no draft, but the draft's context
        # must go on growing: it is stored outside the graph, and nothing else runs.
        self._context_only = num_speculative_tokens == 0 and not dummy_run
        super().propose(
            input_batch,
            attn_metadata,
            slot_mappings,
            last_hidden_states,
            aux_hidden_states,
            num_sampled,
            num_rejected,
            *args,
            dummy_run=dummy_run,
            # Keeps the draft out of its graph, which would store the context itself.
            is_profile=is_profile or self._context_only,
            num_speculative_tokens=num_speculative_tokens,
            **kwargs,
        )
        if not dummy_run and not self._context_only:
            self.runtime.has_tree_np[input_batch.idx_mapping_np] = True
        if not dummy_run:
            self.runtime.observer.drafted(input_batch, self.builder)
        return self.builder.draft_tokens[:num_reqs]


def make_speculator(
    vllm_config: VllmConfig, device: torch.device, req_states: RequestState
) -> DDTreeSpeculator:
    """Build the runtime of an engine with trees, and its speculator.

    Runs in the worker before the target is loaded, so the attention backends are put
    in place here: no attention layer exists yet.
    """
    config = get_ddtree_config(vllm_config)
    assert config is not None, "called for an engine without trees"
    install_tree_backends()
    runtime = TreeRuntime(vllm_config, config, device)
    return DDTreeSpeculator(vllm_config, device, config, runtime)
