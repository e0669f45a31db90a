# SPDX-License-Identifier: Apache-2.0
"""The rows of the support table.

A feature that nobody has tested with trees is refused. Rows of the status "chain" are
options of a request: its own blocks are verified as chains, exactly, in one batch with
the trees of other requests.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from vllm_dflash.support_checks import (
    TREE_BACKENDS,
    TREE_DRAFT,
    Check,
    find_anchor,
    find_flag,
    find_model,
    find_more_than_one,
    find_other_backend,
    find_other_cache_dtype,
    find_other_device,
    find_other_draft,
    find_other_task,
    find_other_than,
    find_other_vllm,
    find_runner_v1,
    find_section,
    find_small_step,
)


class Status(Enum):
    """How a feature and a tree get along."""

    TREE = "tree"
    CHAIN = "chain"
    REFUSED = "refused"


@dataclass(frozen=True)
class Feature:
    """One row of the table.

    Attributes:
        area: Heading in the docs.
        name: What the user calls it.
        status: Served as a tree, as a chain beside trees, or refused.
        note: Why.
        way_out: What to type instead, in refused rows.
        check: Finds the feature in an engine's config; refused rows only.
    """

    area: str
    name: str
    status: Status
    note: str
    way_out: str = ""
    check: Check | None = None


def _tree(area: str, name: str, note: str) -> Feature:
    return Feature(area, name, Status.TREE, note)


def _chain(area: str, name: str, note: str) -> Feature:
    return Feature(area, name, Status.CHAIN, note)


def _refused(
    area: str, name: str, note: str, way_out: str, check: Check | None
) -> Feature:
    return Feature(area, name, Status.REFUSED, note, way_out, check)


_ENGINE = "Engine"
_PARALLEL = "Parallelism"
_TARGET = "Target model"
_CACHE = "KV cache and attention"
_SPEC = "Draft and verification"
_SAMPLING = "Sampling"

FEATURES: tuple[Feature, ...] = (
    _tree(_ENGINE, "vLLM 0.32", "the one version whose hooks this release knows"),
    _refused(
        _ENGINE,
        "another vLLM than 0.32",
        "its hooks are unknown to this release",
        "pip install vllm==0.32.0",
        find_other_vllm,
    ),
    _tree(_ENGINE, "NVIDIA GPU", "Triton kernels"),
    _tree(
        _ENGINE,
        "CPU",
        "With VLLM_DFLASH_CPU=1: vLLM's GPU runner through Triton's interpreter, "
        "for tests and demonstrations",
    ),
    _refused(
        _ENGINE,
        "another device",
        "no kernel has been tested there",
        "",
        find_other_device,
    ),
    _refused(
        _ENGINE,
        "Model Runner V1",
        "only Model Runner V2 has the hooks",
        "VLLM_USE_V2_MODEL_RUNNER=1 (on the CPU VLLM_DFLASH_CPU=1) before the command",
        find_runner_v1,
    ),
    _tree(_ENGINE, "async scheduling", "the scheduler sees only how many nodes"),
    _tree(_ENGINE, "chunked prefill", "prefill and verify rows share a batch"),
    _tree(_ENGINE, "prefix caching", "the cache is compacted before it is shared"),
    _tree(_ENGINE, "preemption", "a resumed request starts without a tree"),
    _tree(_ENGINE, "CUDA graphs", "FULL graphs for every width in use"),
    _tree(_ENGINE, "sleep mode", "the tree's buffers are a few megabytes"),
    _refused(
        _ENGINE,
        "a step smaller than a tree",
        "a request of N nodes reserves 2 N + 1 tokens of a step",
        "a larger --max-num-batched-tokens or a smaller budget",
        find_small_step,
    ),
    _refused(
        _ENGINE,
        "LoRA",
        "untested with trees",
        "the command without --enable-lora",
        find_section("lora_config"),
    ),
    _refused(
        _ENGINE,
        "KV connectors",
        "a connector may read slots that are not compacted yet",
        "the command without --kv-transfer-config",
        find_section("kv_transfer_config"),
    ),
    _refused(
        _ENGINE,
        "prompt embeddings",
        "untested with trees",
        "the command without --enable-prompt-embeds",
        find_flag("model_config", "enable_prompt_embeds"),
    ),
    _tree(_PARALLEL, "tensor parallelism", "each rank walks the same gathered logits"),
    _refused(
        _PARALLEL,
        "pipeline parallelism",
        "the walk's result is on the last rank only, compaction needs it on all",
        "--pipeline-parallel-size 1",
        find_more_than_one("pipeline_parallel_size"),
    ),
    _refused(
        _PARALLEL,
        "data parallelism",
        "untested with trees",
        "--data-parallel-size 1 and one server for each replica",
        find_more_than_one("data_parallel_size"),
    ),
    _refused(
        _PARALLEL,
        "decode context parallelism",
        "the tree's slots would be spread over ranks",
        "--decode-context-parallel-size 1",
        find_more_than_one("decode_context_parallel_size"),
    ),
    _refused(
        _PARALLEL,
        "prefill context parallelism",
        "the tree's slots would be spread over ranks",
        "--prefill-context-parallel-size 1",
        find_more_than_one("prefill_context_parallel_size"),
    ),
    _refused(
        _PARALLEL,
        "dual batch overlap",
        "a batch in halves has no single tree buffer",
        "the command without --enable-dbo and --ubatch-size",
        find_flag("parallel_config", "use_ubatching"),
    ),
    _refused(
        _PARALLEL,
        "batch-sharded sampling",
        "the walk's result is on one rank only, compaction needs it on all",
        "--no-enable-batch-sharded-sampling",
        find_flag("parallel_config", "enable_batch_sharded_sampling"),
    ),
    _refused(
        _PARALLEL,
        "elastic expert parallelism",
        "untested with trees",
        "the command without --enable-elastic-ep",
        find_flag("parallel_config", "enable_elastic_ep"),
    ),
    _tree(_TARGET, "decoder-only attention models", "dense and mixture of experts"),
    _refused(
        _TARGET,
        "hybrid and attention-free models",
        "a recurrent state can't be committed along a path",
        "",
        find_model("is_hybrid", "is_attention_free"),
    ),
    _refused(
        _TARGET,
        "multi-head latent attention",
        "there is no tree kernel for it",
        "",
        find_model("use_mla"),
    ),
    _refused(
        _TARGET,
        "encoder-decoder models",
        "cross attention is untested with trees",
        "",
        find_model("is_encoder_decoder"),
    ),
    _refused(
        _TARGET,
        "multimodal models",
        "positions of several dimensions are not laid out by depth yet",
        "",
        find_model("is_multimodal_model", "uses_mrope"),
    ),
    _refused(
        _TARGET,
        "ALiBi",
        "its bias counts slots, a tree needs depths",
        "",
        find_model("uses_alibi"),
    ),
    _refused(
        _TARGET,
        "diffusion models",
        "they draft and verify in their own way",
        "",
        find_model("is_diffusion"),
    ),
    _refused(
        _TARGET,
        "pooling models",
        "they generate nothing to verify",
        "",
        find_other_task,
    ),
    _tree(_CACHE, "FLASH_ATTN, TRITON_ATTN", "on GPUs, under their own names"),
    _tree(_CACHE, "CPU_ATTN", "on the CPU: gathered keys and an explicit mask"),
    _refused(
        _CACHE,
        "another attention backend",
        f"tree attention knows {', '.join(TREE_BACKENDS)}",
        "--attention-backend FLASH_ATTN or --attention-backend TRITON_ATTN",
        find_other_backend,
    ),
    _tree(
        _CACHE,
        "sliding windows, soft caps, attention sinks",
        "windows count depths, not slots",
    ),
    _tree(_CACHE, "bf16, fp16, fp32 caches", "as the model's dtype says"),
    _refused(
        _CACHE,
        "a quantised KV cache",
        "the tree kernel reads e4m3, but no engine has been tested with it",
        "--kv-cache-dtype auto",
        find_other_cache_dtype,
    ),
    _refused(
        _CACHE,
        "KV-sharing fast prefill",
        "untested with trees",
        "the command without --kv-sharing-fast-prefill",
        find_flag("cache_config", "kv_sharing_fast_prefill"),
    ),
    _tree(_SPEC, "DFlash drafts", "greedy candidates, one block a step"),
    _refused(
        _SPEC,
        "another kind of draft",
        f"trees are built from the plain DFlash head ({TREE_DRAFT})",
        "a DFlash draft as the model in speculative_config",
        find_other_draft,
    ),
    _refused(
        _SPEC,
        "a draft that samples from its anchor",
        "its block has another layout",
        "",
        find_anchor,
    ),
    _refused(
        _SPEC,
        "sampled drafts",
        "a tree holds the likeliest candidates",
        '"draft_sample_method": "greedy"',
        find_other_than("draft_sample_method", "greedy"),
    ),
    _refused(
        _SPEC,
        "another rejection method",
        "a tree is walked exactly",
        '"rejection_sample_method": "standard"',
        find_other_than("rejection_sample_method", "standard"),
    ),
    _refused(
        _SPEC,
        "adaptive verification",
        "budget_per_batch_size is the tree's way to verify less",
        '"enable_adaptive_verification": false',
        find_flag("speculative_config", "enable_adaptive_verification"),
    ),
    _refused(
        _SPEC,
        "local argmax reduction",
        "a tree needs more of the draft's logits than the largest",
        '"use_local_argmax_reduction": false',
        find_flag("speculative_config", "use_local_argmax_reduction"),
    ),
    _tree(
        _SAMPLING,
        "temperature, top_k, top_p, min_p, seed",
        "exact at every node, with the noise of a run without speculation",
    ),
    _tree(
        _SAMPLING,
        "logit_bias, allowed_token_ids, min_tokens",
        "they ask a row for its request and its depth position only",
    ),
    _tree(
        _SAMPLING,
        "stop, stop_token_ids, ignore_eos, max_tokens, repetition_detection",
        "vLLM cuts the accepted path at the token where it would have stopped",
    ),
    _tree(_SAMPLING, "n > 1", "each sample is a request with a tree of its own"),
    _tree(
        _SAMPLING,
        "logprobs, logprob_token_ids, prompt_logprobs",
        "of the tokens that were emitted, in every --logprobs-mode",
    ),
    _chain(
        _SAMPLING,
        "repetition, frequency and presence penalties",
        "they read the drafts before a row as its history",
    ),
    _chain(_SAMPLING, "bad_words", "they read the drafts before a row as its history"),
    _chain(_SAMPLING, "structured outputs", "a grammar's masks follow one sequence"),
    _chain(_SAMPLING, "thinking_token_budget", "it is counted along one sequence"),
    _chain(
        _SAMPLING,
        "custom logits processors",
        "they may read the drafts before a row; requests they decline keep trees",
    ),
    _refused(
        _SAMPLING,
        "watermarking",
        "it replaces the noise that a tree shares with plain decoding",
        "the command without a watermark configuration",
        find_section("watermark_config"),
    ),
    _refused(
        _SAMPLING,
        "returned sampling masks",
        "untested with trees",
        "the command without --return-sampling-mask",
        find_flag("model_config", "return_sampling_mask"),
    ),
    _refused(
        _SAMPLING,
        "returned routed experts",
        "untested with trees",
        "the command without --enable-return-routed-experts",
        find_flag("aux_output_config", "enable_return_routed_experts"),
    ),
    _refused(
        _SAMPLING,
        "trace replay",
        "a forced token need not be in the tree",
        "the command without --enable-trace-replay",
        find_flag("model_config", "enable_trace_replay"),
    ),
)
