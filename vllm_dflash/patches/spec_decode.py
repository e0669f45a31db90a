# SPDX-License-Identifier: Apache-2.0
"""`vllm/v1/worker/gpu/spec_decode/__init__.py`: the tree's speculator."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_dflash import patches
from vllm_dflash.config import get_ddtree_config

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.worker.gpu.states import RequestState


def wrap_init_speculator(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `init_speculator` with trees.

    The runner calls it in its constructor, before the model and so before the first
    attention layer exists: the last moment to choose attention and model state.
    """

    @functools.wraps(original)
    def init_speculator(
        vllm_config: VllmConfig, device: torch.device, req_states: RequestState
    ) -> Any:
        if vllm_config.speculative_config.method == "dflash" and device.type == "cpu":
            patches.apply("normalize_context_k")
        if get_ddtree_config(vllm_config) is None:
            return original(vllm_config, device, req_states)

        from vllm_dflash.runner.speculator import make_speculator
        from vllm_dflash.support import require_supported

        require_supported(vllm_config)
        patches.apply("resolve_model_state_cls")
        patches.apply("init_candidates")
        if device.type != "cpu":
            patches.apply("apply_top_k_top_p")
        if vllm_config.lora_config is not None:
            patches.apply("set_active_loras")
            if device.type == "cpu":
                patches.apply("punica_wrapper")
        return make_speculator(vllm_config, device, req_states)

    return init_speculator
