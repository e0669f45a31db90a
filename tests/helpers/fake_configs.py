# SPDX-License-Identifier: Apache-2.0
"""Engine configs that hold only what the support checks read."""

from types import SimpleNamespace

from vllm_dflash.config import parse_ddtree_option


def engine(**changes):
    """A config that a tree works with; `section__field` changes one field."""
    tree = parse_ddtree_option(
        True, num_speculative_tokens=7, block_size=8, is_cpu=False
    )
    sections = {
        "model_config": dict(
            runner_type="generate",
            architectures=["LlamaForCausalLM"],
            is_hybrid=False,
            is_attention_free=False,
            use_mla=False,
            is_encoder_decoder=False,
            is_multimodal_model=False,
            uses_mrope=False,
            uses_alibi=False,
            is_diffusion=False,
            is_moe=False,
            enable_prompt_embeds=False,
            return_sampling_mask=False,
            enable_trace_replay=False,
            max_model_len=4096,
            get_sliding_window=lambda: None,
            get_head_size=lambda: 128,
            attention_chunk_size=None,
            rswa_window=None,
            hf_text_config=SimpleNamespace(),
        ),
        "parallel_config": dict(
            pipeline_parallel_size=1,
            tensor_parallel_size=2,
            data_parallel_size=1,
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            use_ubatching=False,
            enable_batch_sharded_sampling=False,
            enable_elastic_ep=False,
            worker_cls="vllm.v1.worker.gpu_worker.Worker",
        ),
        "speculative_config": dict(
            method="dflash",
            draft_model_config=SimpleNamespace(
                architectures=["DFlashDraftModel"], hf_config=SimpleNamespace()
            ),
            draft_sample_method="greedy",
            rejection_sample_method="standard",
            enable_adaptive_verification=False,
            use_local_argmax_reduction=False,
        ),
        "cache_config": dict(
            cache_dtype="auto",
            kv_sharing_fast_prefill=False,
            num_gpu_blocks_override=None,
            block_size=16,
        ),
        "aux_output_config": dict(enable_return_routed_experts=False),
        "attention_config": dict(backend=None, backend_per_kind=None),
        "scheduler_config": dict(
            max_num_batched_tokens=2048,
            max_num_seqs=64,
            long_prefill_token_threshold=0,
        ),
    }
    top = dict(
        additional_config={"ddtree": tree.to_dict()},
        use_v2_model_runner=True,
        lora_config=None,
        kv_transfer_config=None,
        watermark_config=None,
    )
    for path, value in changes.items():
        section, _, field = path.partition("__")
        if field:
            sections[section][field] = value
        else:
            top[section] = value
    config = SimpleNamespace(**top)
    for name, fields in sections.items():
        setattr(config, name, SimpleNamespace(**fields))
    return config


def named(name):
    return SimpleNamespace(name=name)


def lora(specialize_active_lora=False):
    return SimpleNamespace(specialize_active_lora=specialize_active_lora)


def draft(*architectures, **hf_config):
    return SimpleNamespace(
        architectures=list(architectures), hf_config=SimpleNamespace(**hf_config)
    )


def tree_of(budget=48, schedule=None):
    option = {"budget": budget, "budget_per_batch_size": "fixed"}
    if schedule is not None:
        option["budget_per_batch_size"] = schedule
    return parse_ddtree_option(
        option, num_speculative_tokens=15, block_size=16, is_cpu=False
    )


def pretend_cuda(monkeypatch):
    """Replace the platform that the checks ask, and return it."""
    # Importing vLLM's Triton asks the real platform.
    monkeypatch.setattr("vllm.triton_utils.HAS_TRITON", True)
    platform = SimpleNamespace(
        is_cuda=lambda: True, is_cpu=lambda: False, device_name="cuda"
    )
    monkeypatch.setattr("vllm.platforms.current_platform", platform)
    return platform
