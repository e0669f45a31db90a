# SPDX-License-Identifier: Apache-2.0
"""The attention backend of the target and the worker, before any worker exists."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_dflash.logger import init_logger
from vllm_dflash.support import Refusal
from vllm_dflash.support_checks import TREE_BACKENDS, TREE_WORKERS

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

logger = init_logger(__name__)


def select_backend(config: VllmConfig) -> str | Refusal | None:
    """Make sure that vLLM takes a backend with tree attention.

    A backend that the user named has passed the support table. Where vLLM's own first
    choice has no tree attention (FlashInfer on some GPUs), the best one that has it is
    named in `config` in place.

    Returns:
        The backend's name, None if it can't be told here, or why there is none.
    """
    from vllm.platforms import current_platform

    named = config.attention_config.backend
    if named is not None:
        return named.name
    if current_platform.is_cpu():
        return "CPU_ATTN"
    try:
        ranking = _rank_backends(config)
    except Exception:
        # Only a forecast: the workers check the backend that they really get.
        logger.debug("the attention backend is not known yet", exc_info=True)
        return None
    usable = [backend for backend in ranking if backend.name in TREE_BACKENDS]
    if not usable:
        return Refusal(
            "DDTree does not work with the attention backends that fit this model and "
            f"GPU (got {', '.join(backend.name for backend in ranking) or 'none'}): "
            f"tree attention knows {', '.join(TREE_BACKENDS)}"
        )
    if usable[0] is not ranking[0]:
        config.attention_config.backend = usable[0]
    return usable[0].name


def select_worker(config: VllmConfig) -> None:
    """Name the worker that refuses to run without trees, in `config` in place.

    A worker class is imported by its name in the worker's own process, so one without
    this plugin can't start.
    """
    parallel = config.parallel_config
    parallel.worker_cls = TREE_WORKERS.get(parallel.worker_cls, parallel.worker_cls)


def _rank_backends(config: VllmConfig) -> list[AttentionBackendEnum]:
    """Return the backends that vLLM finds valid, best first."""
    from vllm.config import set_current_vllm_config
    from vllm.platforms import current_platform
    from vllm.v1.attention.selector import AttentionSelectorConfig

    model, cache = config.model_config, config.cache_config
    block_size = cache.block_size if cache.user_specified_block_size else None
    with set_current_vllm_config(config):
        candidates, _ = current_platform.get_valid_backends(
            device_capability=current_platform.get_device_capability(),
            attn_selector_config=AttentionSelectorConfig(
                head_size=model.get_head_size(),
                dtype=model.dtype,
                kv_cache_dtype=cache.cache_dtype,
                block_size=block_size,
                has_sliding_window=model.get_sliding_window() is not None,
            ),
            num_heads=model.get_num_attention_heads(config.parallel_config),
        )
    candidates = sorted(candidates, key=lambda candidate: candidate.priority)
    return [candidate.backend for candidate in candidates]
