# SPDX-License-Identifier: Apache-2.0
"""vLLM's own manager of CUDA graphs, without a GPU."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu import cudagraph_utils

from vllm_dflash.config import DDTreeConfig
from vllm_dflash.graphs import verify_sizes


def make_manager(
    monkeypatch: Any,
    tree: DDTreeConfig,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    default_sizes: list[int],
    max_graph_tokens: int | None = None,
    prepare: Callable[[Any], None] = lambda config: None,
) -> Any:
    """Return a manager over the sizes that an engine with these trees captures.

    Args:
        default_sizes: What vLLM captures without trees.
        max_graph_tokens: Of `verify_sizes`.
        prepare: Changes the config before the manager is made.
    """
    own = verify_sizes(tree, max_num_seqs, max_num_batched_tokens, max_graph_tokens)
    sizes = sorted({*default_sizes, *own})
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(
            max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens
        ),
        compilation_config=SimpleNamespace(
            cudagraph_capture_sizes=sizes, max_cudagraph_capture_size=sizes[-1]
        ),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
        cache_config=SimpleNamespace(use_kda_recoverssm=False),
        speculative_config=SimpleNamespace(
            method="dflash",
            uses_dynamic_speculative_decoding=lambda: True,
            num_speculative_tokens_per_batch_size=list(tree.budget_per_batch_size),
        ),
        num_speculative_tokens=tree.budget,
        additional_config={"ddtree": tree.to_dict()},
    )
    prepare(config)
    group = SimpleNamespace(is_first_rank=True, is_last_rank=True)
    platform = SimpleNamespace(get_global_graph_pool=lambda: None)
    monkeypatch.setattr(cudagraph_utils, "get_pp_group", lambda: group)
    monkeypatch.setattr(cudagraph_utils, "current_platform", platform)
    made = cudagraph_utils.CudaGraphManager(
        config, torch.device("cpu"), CUDAGraphMode.FULL_AND_PIECEWISE, tree.width
    )
    made._graphs_captured = True
    return made
