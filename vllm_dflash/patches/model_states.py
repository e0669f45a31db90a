# SPDX-License-Identifier: Apache-2.0
"""`vllm/v1/worker/gpu/model_states/__init__.py`: the tree's model state."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_dflash.config import get_ddtree_config

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig


def wrap_resolve_model_state_cls(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `resolve_model_state_cls` with trees."""

    @functools.wraps(original)
    def resolve_model_state_cls(
        vllm_config: VllmConfig, model: torch.nn.Module
    ) -> type[Any]:
        base_cls = original(vllm_config, model)
        if get_ddtree_config(vllm_config) is None:
            return base_cls

        from vllm_dflash.runner.model_state import make_model_state_cls
        from vllm_dflash.support import require_supported_model_state

        require_supported_model_state(base_cls)
        return make_model_state_cls(base_cls)

    return resolve_model_state_cls
