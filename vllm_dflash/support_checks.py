# SPDX-License-Identifier: Apache-2.0
"""How to find in an engine's config what a tree does not work with."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_dflash.config import DDTreeConfig, get_ddtree_config

if TYPE_CHECKING:
    from vllm.config import VllmConfig

TREE_BACKENDS = ("FLASH_ATTN", "TRITON_ATTN", "CPU_ATTN")
_CACHE_DTYPES = ("auto", "bfloat16", "float16")
_FP8_CACHE_DTYPES = ("fp8", "fp8_e4m3")
TREE_DRAFT = "DFlashDraftModel"
# vLLM's workers, and what stands for them in an engine with trees.
TREE_WORKERS = {
    "vllm.v1.worker.gpu_worker.Worker": "vllm_dflash.runner.gpu_worker.TreeGPUWorker",
    "vllm.v1.worker.cpu_worker.CPUWorker": (
        "vllm_dflash.runner.cpu_worker.TreeCPUWorker"
    ),
}

# Returns what was found, as the user would type it; None if the row does not apply.
Check = Callable[["VllmConfig"], str | None]


def find_flag(section: str, field: str) -> Check:
    """Find a switch that is on, or an optional section that is present."""

    def check(config: VllmConfig) -> str | None:
        value = getattr(getattr(config, section, None), field, None)
        return f"{field}={value}" if value else None

    return check


def find_section(name: str) -> Check:
    return lambda config: name if getattr(config, name, None) is not None else None


def find_more_than_one(field: str) -> Check:
    def check(config: VllmConfig) -> str | None:
        value = getattr(config.parallel_config, field)
        return f"{field}={value}" if value > 1 else None

    return check


def find_joint_engines(config: VllmConfig) -> str | None:
    """Find data parallelism whose engines meet in every layer of experts."""
    if not config.model_config.is_moe:
        return None
    return find_more_than_one("data_parallel_size")(config)


def find_other_than(field: str, allowed: str) -> Check:
    def check(config: VllmConfig) -> str | None:
        value = getattr(config.speculative_config, field)
        return None if value == allowed else f"{field}={value}"

    return check


def find_model(*fields: str) -> Check:
    def check(config: VllmConfig) -> str | None:
        model = config.model_config
        if any(getattr(model, field) for field in fields):
            return ", ".join(model.architectures)
        return None

    return check


def find_other_vllm(config: VllmConfig) -> str | None:
    import vllm

    version = vllm.__version__
    return None if version.split(".")[:2] == ["0", "32"] else f"vLLM {version}"


def find_other_device(config: VllmConfig) -> str | None:
    from vllm.platforms import current_platform

    if current_platform.is_cuda() or current_platform.is_cpu():
        return None
    return current_platform.device_name


def find_missing_triton(config: VllmConfig) -> str | None:
    from vllm.platforms import current_platform
    from vllm.triton_utils import HAS_TRITON

    if HAS_TRITON or not current_platform.is_cuda():
        return None
    return "a CUDA device and no Triton that vLLM can use"


def find_runner_v1(config: VllmConfig) -> str | None:
    # vLLM takes V1 where there is no Triton, which is named by itself.
    if config.use_v2_model_runner or find_missing_triton(config):
        return None
    return "Model Runner V1"


def find_batch_invariance(config: VllmConfig) -> str | None:
    from vllm import envs

    return "VLLM_BATCH_INVARIANT=1" if envs.VLLM_BATCH_INVARIANT else None


def find_other_worker(config: VllmConfig) -> str | None:
    name = config.parallel_config.worker_cls
    return None if name in {*TREE_WORKERS, *TREE_WORKERS.values()} else name


def find_other_task(config: VllmConfig) -> str | None:
    runner_type = config.model_config.runner_type
    return None if runner_type == "generate" else f"runner {runner_type}"


def find_other_draft(config: VllmConfig) -> str | None:
    architectures = config.speculative_config.draft_model_config.architectures
    return None if TREE_DRAFT in architectures else ", ".join(architectures)


def find_anchor(config: VllmConfig) -> str | None:
    hf_config = config.speculative_config.draft_model_config.hf_config
    options: Any = getattr(hf_config, "dflash_config", None) or {}
    return "sample_from_anchor=true" if options.get("sample_from_anchor") else None


def find_other_backend(config: VllmConfig) -> str | None:
    attention_config = config.attention_config
    if attention_config.backend_per_kind:
        return f"backend_per_kind={attention_config.backend_per_kind}"
    backend = attention_config.backend
    if backend is None or backend.name in TREE_BACKENDS:
        return None
    return backend.name


def find_other_cache_dtype(config: VllmConfig) -> str | None:
    from vllm.platforms import current_platform

    dtype = config.cache_config.cache_dtype
    if dtype in _CACHE_DTYPES:
        return None
    if dtype in _FP8_CACHE_DTYPES and current_platform.is_cuda():
        return None
    return f"--kv-cache-dtype {dtype}"


def tokens_reserved(tree: DDTreeConfig) -> int:
    """Return how much of a step vLLM reserves for one request.

    The rows of the verify, and the mask tokens of the draft.
    """
    return tree.width + tree.depth


def find_small_step(config: VllmConfig) -> str | None:
    tree = get_ddtree_config(config)
    step = config.scheduler_config.max_num_batched_tokens
    if tree is None or step >= tokens_reserved(tree):
        return None
    return (
        f"--max-num-batched-tokens {step} and a budget of {tree.budget}, which needs "
        f"{tokens_reserved(tree)}"
    )


def find_small_threshold(config: VllmConfig) -> str | None:
    tree = get_ddtree_config(config)
    threshold = config.scheduler_config.long_prefill_token_threshold
    # With a schedule vLLM fills no request up to the width of a tree.
    if tree is None or tree.budget_per_batch_size is not None:
        return None
    if not 0 < threshold < tree.width:
        return None
    return (
        f"--long-prefill-token-threshold {threshold} and a budget of {tree.budget}, "
        f"which needs {tree.width}"
    )


def find_short_model_length(config: VllmConfig) -> str | None:
    tree = get_ddtree_config(config)
    length = config.model_config.max_model_len
    # A prompt has at least one token.
    if tree is None or length > tree.width:
        return None
    return (
        f"--max-model-len {length} and a budget of {tree.budget}, which needs "
        f"{tree.width + 1}"
    )


def find_small_pool(config: VllmConfig) -> str | None:
    """Find a cache of so many blocks that no request of full length fits.

    vLLM finds a cache that is small for lack of memory, when it knows the memory.
    """
    cache, model = config.cache_config, config.model_config
    blocks, block_size = cache.num_gpu_blocks_override, cache.block_size
    fits_by_itself = getattr(model, "original_max_model_len", None) == -1
    has_window = model.get_sliding_window() is not None
    if blocks is None or not block_size or fits_by_itself or has_window:
        return None
    # vLLM keeps one block back. The slots of a tree end at the model's length too.
    slots = (blocks - 1) * block_size
    if slots >= model.max_model_len:
        return None
    return (
        f"--num-gpu-blocks-override {blocks} with blocks of {block_size} and "
        f"--max-model-len {model.max_model_len}, which needs "
        f"{-(-model.max_model_len // block_size) + 1}"
    )
