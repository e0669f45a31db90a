# SPDX-License-Identifier: Apache-2.0
"""The rows of the support table.

A feature that nobody has tested with trees is refused, or its row says "not tested
here". Rows of the status "chain" are options of a request: its own blocks are verified
as chains, exactly, in one batch with the trees of other requests.
"""

from __future__ import annotations

from vllm_dflash.support_checks import (
    TREE_BACKENDS,
    TREE_DRAFT,
    find_anchor,
    find_batch_invariance,
    find_flag,
    find_joint_engines,
    find_missing_triton,
    find_more_than_one,
    find_other_backend,
    find_other_cache_dtype,
    find_other_device,
    find_other_draft,
    find_other_than,
    find_other_vllm,
    find_other_worker,
    find_runner_v1,
    find_section,
    find_short_model_length,
    find_small_pool,
    find_small_step,
    find_small_threshold,
)
from vllm_dflash.support_lora import lora_rows
from vllm_dflash.support_rows import (
    Feature,
    Status,
    chain_row,
    refused_row,
    tree_row,
)
from vllm_dflash.support_targets import TARGETS

__all__ = ["FEATURES", "Feature", "Status"]

_ENGINE = "Engine"
_PARALLEL = "Parallelism"
_CACHE = "KV cache and attention"
_SPEC = "Draft and verification"
_SAMPLING = "Sampling"

FEATURES: tuple[Feature, ...] = (
    tree_row(_ENGINE, "vLLM 0.32", "the one version whose hooks this release knows"),
    refused_row(
        _ENGINE,
        "another vLLM than 0.32",
        "its hooks are unknown to this release",
        "pip install vllm==0.32.0",
        find_other_vllm,
    ),
    tree_row(_ENGINE, "NVIDIA GPU", "Triton kernels"),
    tree_row(
        _ENGINE,
        "CPU",
        "With VLLM_DFLASH_CPU=1: vLLM's GPU runner through Triton's interpreter, "
        "for tests and demonstrations",
    ),
    refused_row(
        _ENGINE,
        "another device",
        "no kernel has been tested there",
        "",
        find_other_device,
    ),
    refused_row(
        _ENGINE,
        "a GPU without Triton",
        "the tree's kernels are written in it",
        "pip install triton, in the version that your torch names",
        find_missing_triton,
    ),
    refused_row(
        _ENGINE,
        "Model Runner V1",
        "only Model Runner V2 has the hooks",
        "VLLM_USE_V2_MODEL_RUNNER=1 (on the CPU VLLM_DFLASH_CPU=1) before the command",
        find_runner_v1,
    ),
    tree_row(_ENGINE, "async scheduling", "the scheduler sees only how many nodes"),
    tree_row(_ENGINE, "chunked prefill", "prefill and verify rows share a batch"),
    tree_row(_ENGINE, "prefix caching", "the cache is compacted before it is shared"),
    tree_row(_ENGINE, "preemption", "a resumed request starts without a tree"),
    tree_row(_ENGINE, "CUDA graphs", "FULL graphs for every width in use"),
    tree_row(_ENGINE, "sleep mode", "the tree's buffers are a few megabytes"),
    refused_row(
        _ENGINE,
        "a step smaller than a tree",
        "each request reserves its rows (nodes + 1) and its depth",
        "a larger --max-num-batched-tokens or a smaller budget",
        find_small_step,
    ),
    refused_row(
        _ENGINE,
        "a long-prefill threshold smaller than a tree of fixed size",
        "vLLM fills a request of one new token up to the width of a tree, cuts it to "
        "the threshold, and stops at the contradiction",
        "a larger --long-prefill-token-threshold, a smaller budget or "
        '"budget_per_batch_size"',
        find_small_threshold,
    ),
    refused_row(
        _ENGINE,
        "a model length smaller than a tree",
        "a prompt token, the root and N nodes have to fit",
        "a larger --max-model-len or a smaller budget",
        find_short_model_length,
    ),
    refused_row(
        _ENGINE,
        "a KV cache smaller than a request",
        "a request of full length would never get all its blocks",
        "a larger --num-gpu-blocks-override or a smaller --max-model-len",
        find_small_pool,
    ),
    refused_row(
        _ENGINE,
        "batch-invariant kernels",
        "how tree attention cuts the keys, and which kernel reads them, depends on the "
        "batch",
        "the command without VLLM_BATCH_INVARIANT=1",
        find_batch_invariance,
    ),
    refused_row(
        _ENGINE,
        "another worker class",
        "the plugin's own worker refuses to run without trees",
        "the command without --worker-cls",
        find_other_worker,
    ),
    *lora_rows(_ENGINE),
    refused_row(
        _ENGINE,
        "KV connectors",
        "a connector may read slots that are not compacted yet",
        "the command without --kv-transfer-config",
        find_section("kv_transfer_config"),
    ),
    refused_row(
        _ENGINE,
        "prompt embeddings",
        "untested with trees",
        "the command without --enable-prompt-embeds",
        find_flag("model_config", "enable_prompt_embeds"),
    ),
    tree_row(
        _PARALLEL, "tensor parallelism", "each rank walks the same gathered logits"
    ),
    refused_row(
        _PARALLEL,
        "pipeline parallelism",
        "the walk's result is on the last rank only, compaction needs it on all",
        "--pipeline-parallel-size 1",
        find_more_than_one("pipeline_parallel_size"),
    ),
    tree_row(
        _PARALLEL, "data parallelism", "of dense models: independent engines in vLLM"
    ),
    refused_row(
        _PARALLEL,
        "data parallelism of a mixture of experts",
        "its engines step together, which is untested with trees",
        "--data-parallel-size 1 and one server for each replica",
        find_joint_engines,
    ),
    refused_row(
        _PARALLEL,
        "decode context parallelism",
        "the tree's slots would be spread over ranks",
        "--decode-context-parallel-size 1",
        find_more_than_one("decode_context_parallel_size"),
    ),
    refused_row(
        _PARALLEL,
        "prefill context parallelism",
        "the tree's slots would be spread over ranks",
        "--prefill-context-parallel-size 1",
        find_more_than_one("prefill_context_parallel_size"),
    ),
    refused_row(
        _PARALLEL,
        "dual batch overlap",
        "a batch in halves has no single tree buffer",
        "the command without --enable-dbo and --ubatch-size",
        find_flag("parallel_config", "use_ubatching"),
    ),
    refused_row(
        _PARALLEL,
        "batch-sharded sampling",
        "the walk's result is on one rank only, compaction needs it on all",
        "--no-enable-batch-sharded-sampling",
        find_flag("parallel_config", "enable_batch_sharded_sampling"),
    ),
    refused_row(
        _PARALLEL,
        "elastic expert parallelism",
        "untested with trees",
        "the command without --enable-elastic-ep",
        find_flag("parallel_config", "enable_elastic_ep"),
    ),
    *TARGETS,
    tree_row(_CACHE, "FLASH_ATTN, TRITON_ATTN", "on GPUs, under their own names"),
    tree_row(_CACHE, "CPU_ATTN", "on the CPU: gathered keys and an explicit mask"),
    refused_row(
        _CACHE,
        "another attention backend",
        f"tree attention knows {', '.join(TREE_BACKENDS)}",
        "--attention-backend FLASH_ATTN or --attention-backend TRITON_ATTN",
        find_other_backend,
    ),
    tree_row(_CACHE, "sliding windows", "they count depths, not slots"),
    tree_row(
        _CACHE,
        "soft caps, attention sinks",
        "whole engines tested on the CPU only; on a GPU the kernel by itself",
    ),
    tree_row(_CACHE, "bf16, fp16, fp32 caches", "as the model's dtype says"),
    tree_row(_CACHE, "fp8 (e4m3) caches", "on a GPU, one scale a layer"),
    refused_row(
        _CACHE,
        "another quantised KV cache",
        "the tree kernel reads e4m3 only, and on the CPU none",
        "--kv-cache-dtype auto",
        find_other_cache_dtype,
    ),
    refused_row(
        _CACHE,
        "KV-sharing fast prefill",
        "untested with trees",
        "the command without --kv-sharing-fast-prefill",
        find_flag("cache_config", "kv_sharing_fast_prefill"),
    ),
    tree_row(_SPEC, "DFlash drafts", "greedy candidates, one block a step"),
    refused_row(
        _SPEC,
        "another kind of draft",
        f"trees are built from the plain DFlash head ({TREE_DRAFT})",
        "a DFlash draft as the model in speculative_config",
        find_other_draft,
    ),
    refused_row(
        _SPEC,
        "a draft that samples from its anchor",
        "its block has another layout",
        "",
        find_anchor,
    ),
    refused_row(
        _SPEC,
        "sampled drafts",
        "a tree holds the likeliest candidates",
        '"draft_sample_method": "greedy"',
        find_other_than("draft_sample_method", "greedy"),
    ),
    refused_row(
        _SPEC,
        "another rejection method",
        "a tree is walked exactly",
        '"rejection_sample_method": "standard"',
        find_other_than("rejection_sample_method", "standard"),
    ),
    refused_row(
        _SPEC,
        "adaptive verification",
        "budget_per_batch_size is the tree's way to verify less",
        '"enable_adaptive_verification": false',
        find_flag("speculative_config", "enable_adaptive_verification"),
    ),
    refused_row(
        _SPEC,
        "local argmax reduction",
        "a tree needs more of the draft's logits than the largest",
        '"use_local_argmax_reduction": false',
        find_flag("speculative_config", "use_local_argmax_reduction"),
    ),
    tree_row(
        _SAMPLING,
        "temperature, top_k, top_p, min_p, seed",
        "exact at every node, with the noise of a run without speculation",
    ),
    tree_row(
        _SAMPLING,
        "logit_bias, allowed_token_ids, min_tokens",
        "they ask a row for its request and its depth position only",
    ),
    tree_row(
        _SAMPLING,
        "stop, stop_token_ids, ignore_eos, max_tokens, repetition_detection",
        "vLLM cuts the accepted path at the token where it would have stopped",
    ),
    tree_row(_SAMPLING, "n > 1", "each sample is a request with a tree of its own"),
    tree_row(
        _SAMPLING,
        "logprobs, logprob_token_ids, prompt_logprobs",
        "of the tokens that were emitted, in every --logprobs-mode",
    ),
    chain_row(
        _SAMPLING,
        "repetition, frequency and presence penalties",
        "they read the drafts before a row as its history",
    ),
    chain_row(
        _SAMPLING, "bad_words", "they read the drafts before a row as its history"
    ),
    chain_row(_SAMPLING, "structured outputs", "a grammar's masks follow one sequence"),
    chain_row(_SAMPLING, "thinking_token_budget", "it is counted along one sequence"),
    chain_row(
        _SAMPLING,
        "custom logits processors",
        "they may read the drafts before a row; requests they decline keep trees",
    ),
    refused_row(
        _SAMPLING,
        "watermarking",
        "it replaces the noise that a tree shares with plain decoding",
        "the command without a watermark configuration",
        find_section("watermark_config"),
    ),
    refused_row(
        _SAMPLING,
        "returned sampling masks",
        "untested with trees",
        "the command without --return-sampling-mask",
        find_flag("model_config", "return_sampling_mask"),
    ),
    refused_row(
        _SAMPLING,
        "returned routed experts",
        "untested with trees",
        "the command without --enable-return-routed-experts",
        find_flag("aux_output_config", "enable_return_routed_experts"),
    ),
    refused_row(
        _SAMPLING,
        "trace replay",
        "a forced token need not be in the tree",
        "the command without --enable-trace-replay",
        find_flag("model_config", "enable_trace_replay"),
    ),
)
