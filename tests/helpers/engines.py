# SPDX-License-Identifier: Apache-2.0
"""In-process engines on tiny models, and the requests the tests send them."""

import gc
import random
from contextlib import contextmanager
from typing import Any

import torch
from tiny_models import NUM_LAYERS

TREE_BUDGET = 16

ENGINE_DEFAULTS: dict[str, Any] = dict(
    skip_tokenizer_init=True,
    max_model_len=256,
    enforce_eager=True,
    dtype="float32",
    max_num_seqs=4,
    max_num_batched_tokens=256,
    block_size=32,
    num_gpu_blocks_override=64,
    seed=0,
    disable_log_stats=False,
)


# vLLM's only choice for fp32 that trees know on a GPU. Exact only with the
# TRITON_F32_DEFAULT that conftest.py sets.
FP32_BACKEND = "TRITON_ATTN"


def gpu_memory() -> dict[str, Any]:
    """What an engine of a test takes of a GPU: little, and the same beside others.

    vLLM's default is nine tenths of all memory; and where it measures what is left, it
    insists that no other process frees memory meanwhile.
    """
    if not torch.cuda.is_available():
        return {}
    return dict(gpu_memory_utilization=0.1, kv_cache_memory_bytes=1 << 28)


def gpu_memory_args() -> list[str]:
    """The same as options of a command."""
    return [
        word
        for name, value in gpu_memory().items()
        for word in (f"--{name.replace('_', '-')}", str(value))
    ]


def tree_config(draft: str, **ddtree: Any) -> dict[str, Any]:
    """The speculative_config of a demanded tree."""
    return dict(method="dflash", model=draft, ddtree={"budget": TREE_BUDGET, **ddtree})


def chain_config(draft: str, depth: int = 7) -> dict[str, Any]:
    """vLLM's own DFlash chain."""
    return dict(
        method="dflash", model=draft, num_speculative_tokens=depth, ddtree=False
    )


@contextmanager
def engine(
    target: str, speculative_config: dict[str, Any] | None = None, **kwargs: Any
):
    """An LLM that is shut down afterwards, so that the next one starts clean."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    from vllm_dflash.attention.registry import remove_tree_backends

    options = {**ENGINE_DEFAULTS, **gpu_memory(), **kwargs}
    if torch.cuda.is_available() and options["dtype"] == "float32":
        options.setdefault("attention_backend", FP32_BACKEND)
    if speculative_config is not None:
        options["speculative_config"] = speculative_config
    # An engine collects garbage a dozen times at its start, 0.3 s each over everything
    # that was imported; what is frozen is passed over until the engine shuts down.
    gc.freeze()
    llm = LLM(model=target, **options)
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        remove_tree_backends()
        cleanup_dist_env_and_memory()


def random_prompts(lengths: tuple[int, ...], seed: int = 1) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(10, 500) for _ in range(n)] for n in lengths]


def generate(llm: Any, prompts: list[list[int]], params: Any) -> list[Any]:
    """Outputs of one call, in prompt order."""
    return llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False
    )


def token_ids(outputs: list[Any]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def params(max_tokens: int = 32, **kwargs: Any) -> Any:
    from vllm import SamplingParams

    options = dict(
        temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False
    )
    return SamplingParams(**{**options, **kwargs})


def acceptance_counts(llm: Any) -> tuple[int, int]:
    """(verification steps, accepted drafts) of an engine since it started."""
    values = {m.name: getattr(m, "value", 0) for m in llm.get_metrics()}
    return (
        values.get("vllm:spec_decode_num_drafts", 0),
        values.get("vllm:spec_decode_num_accepted_tokens", 0),
    )


def model_runner(llm: Any) -> Any:
    """The worker's Model Runner V2 of an in-process engine."""
    executor = llm.llm_engine.engine_core.engine_core.model_executor
    return executor.driver_worker.worker.model_runner


def target_attention(llm: Any) -> list[Any]:
    """The target's attention layers of an in-process engine, in order."""
    context = model_runner(llm).vllm_config.compilation_config.static_forward_context
    return [context[f"model.layers.{i}.self_attn.attn"] for i in range(NUM_LAYERS)]


def window_of(layer: Any) -> int | None:
    """Tokens that a row of an attention layer sees, itself included; None: all.

    On a GPU an implementation keeps how far it sees to the left and to the right, on
    the CPU the size; -1 is no limit.
    """
    window = layer.impl.sliding_window
    if isinstance(window, tuple):
        left, _ = window
        return None if left < 0 else left + 1
    return None if window in (None, -1) else window
