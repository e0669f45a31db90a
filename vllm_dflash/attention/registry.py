# SPDX-License-Identifier: Apache-2.0
"""Which of vLLM's backends can verify trees, and how they are put in place.

Backends are overridden under their own names, so vLLM's selection, its checks and its
cache layout stay as they are. Done in the worker of an engine that uses trees, before
its first attention layer is built; other engines never see it.
"""

from vllm.platforms import current_platform
from vllm.v1.attention import selector
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

# Backend name -> tree-aware class. The support table names the same backends.
GPU_TREE_BACKENDS: dict[str, str] = {
    "FLASH_ATTN": "vllm_dflash.attention.gpu_backend.TreeFlashAttentionBackend",
    "TRITON_ATTN": "vllm_dflash.attention.gpu_backend.TreeTritonAttentionBackend",
}
CPU_TREE_BACKENDS: dict[str, str] = {
    "CPU_ATTN": "vllm_dflash.attention.cpu_backend.TreeCPUAttentionBackend",
}


def install_tree_backends() -> None:
    """Override the backends of this platform with their tree-aware subclasses."""
    backends = CPU_TREE_BACKENDS if current_platform.is_cpu() else GPU_TREE_BACKENDS
    for name, class_path in backends.items():
        register_backend(AttentionBackendEnum[name], class_path)
    selector._cached_get_attn_backend.cache_clear()


def remove_tree_backends() -> None:
    """Give vLLM's own classes back to an engine of this process without trees."""
    for backends in (CPU_TREE_BACKENDS, GPU_TREE_BACKENDS):
        for name in backends:
            AttentionBackendEnum[name].clear_override()
    selector._cached_get_attn_backend.cache_clear()
