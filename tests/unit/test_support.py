# SPDX-License-Identifier: Apache-2.0
"""The support table finds what it refuses, and the docs say the same."""

import re
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
from fake_configs import draft, engine, lora, named, pretend_cuda, tree_of

from vllm_dflash import support, support_checks
from vllm_dflash.support_table import FEATURES, Status

DOCS = Path(__file__).resolve().parents[2] / "docs/compatibility.md"


@pytest.fixture
def cuda(monkeypatch):
    """A GPU's platform, whatever this machine is."""
    return pretend_cuda(monkeypatch)


def test_plain_engine_is_supported(cuda):
    assert support.find_refusal(engine()) is None
    support.require_supported(engine())


@pytest.mark.parametrize(
    "changes",
    [
        {"attention_config__backend": named("FLASH_ATTN")},
        {"attention_config__backend": named("TRITON_ATTN")},
        {"cache_config__cache_dtype": "bfloat16"},
        {"parallel_config__tensor_parallel_size": 2},
        {"parallel_config__data_parallel_size": 2},
        {"model_config__is_moe": True},
        {"lora_config": lora()},
    ],
)
def test_supported_choices(cuda, changes):
    assert support.find_refusal(engine(**changes)) is None


REFUSED = {
    "Model Runner V1": {"use_v2_model_runner": False},
    "LoRA with graphs by the number of adapters": {
        "lora_config": lora(specialize_active_lora=True)
    },
    "LoRA on a mixture of experts": {
        "lora_config": lora(),
        "model_config__is_moe": True,
    },
    "KV connectors": {"kv_transfer_config": object()},
    "prompt embeddings": {"model_config__enable_prompt_embeds": True},
    "pipeline parallelism": {"parallel_config__pipeline_parallel_size": 2},
    "data parallelism of a mixture of experts": {
        "parallel_config__data_parallel_size": 2,
        "model_config__is_moe": True,
    },
    "decode context parallelism": {"parallel_config__decode_context_parallel_size": 2},
    "prefill context parallelism": {
        "parallel_config__prefill_context_parallel_size": 2
    },
    "dual batch overlap": {"parallel_config__use_ubatching": True},
    "batch-sharded sampling": {"parallel_config__enable_batch_sharded_sampling": True},
    "elastic expert parallelism": {"parallel_config__enable_elastic_ep": True},
    "hybrid and attention-free models": {"model_config__is_hybrid": True},
    "models with a state of their own": {
        "model_config__architectures": ["LongcatFlashNgramForCausalLM"]
    },
    "multi-head latent attention": {"model_config__use_mla": True},
    "chunked local attention": {"model_config__attention_chunk_size": 8192},
    "another kind of attention in the model's layers": {
        "model_config__rswa_window": 128
    },
    "heads wider than 256": {"model_config__get_head_size": lambda: 512},
    "values of another width than their keys": {
        "model_config__hf_text_config": SimpleNamespace(v_head_dim=64)
    },
    "encoder-decoder models": {"model_config__is_encoder_decoder": True},
    "multimodal models": {"model_config__uses_mrope": True},
    "ALiBi": {"model_config__uses_alibi": True},
    "diffusion models": {"model_config__is_diffusion": True},
    "pooling models": {"model_config__runner_type": "pooling"},
    "another attention backend": {"attention_config__backend": named("FLASHINFER")},
    "another quantised KV cache": {"cache_config__cache_dtype": "fp8_e5m2"},
    "KV-sharing fast prefill": {"cache_config__kv_sharing_fast_prefill": True},
    "another kind of draft": {
        "speculative_config__draft_model_config": draft("DFlash2DraftModel")
    },
    "a draft that samples from its anchor": {
        "speculative_config__draft_model_config": draft(
            "DFlashDraftModel", dflash_config={"sample_from_anchor": True}
        )
    },
    "sampled drafts": {"speculative_config__draft_sample_method": "probabilistic"},
    "another rejection method": {
        "speculative_config__rejection_sample_method": "block"
    },
    "adaptive verification": {"speculative_config__enable_adaptive_verification": True},
    "local argmax reduction": {"speculative_config__use_local_argmax_reduction": True},
    "watermarking": {"watermark_config": object()},
    "returned sampling masks": {"model_config__return_sampling_mask": True},
    "returned routed experts": {
        "aux_output_config__enable_return_routed_experts": True
    },
    "trace replay": {"model_config__enable_trace_replay": True},
    "a step smaller than a tree": {"scheduler_config__max_num_batched_tokens": 47},
    "a long-prefill threshold smaller than a tree of fixed size": {
        "scheduler_config__long_prefill_token_threshold": 47,
        "additional_config": {"ddtree": tree_of(47).to_dict()},
    },
    "a model length smaller than a tree": {"model_config__max_model_len": 48},
    "a KV cache smaller than a request": {"cache_config__num_gpu_blocks_override": 256},
    "another worker class": {"parallel_config__worker_cls": "mine.Worker"},
}
# Found by what this process is rather than by its config; tested on their own.
ENVIRONMENT = {
    "another vLLM than 0.32",
    "another device",
    "a GPU without Triton",
    "batch-invariant kernels",
}


def test_every_refused_row_of_the_engine_is_tested():
    checked = {feature.name for feature in FEATURES if feature.check is not None}
    assert checked == set(REFUSED) | ENVIRONMENT


@pytest.mark.parametrize("name", REFUSED)
def test_refused_row_is_found_alone(cuda, name):
    config = engine(**REFUSED[name])
    found = [
        feature.name
        for feature in FEATURES
        if feature.check is not None and feature.check(config) is not None
    ]
    assert found == [name]
    message = support.find_refusal(config).message
    assert name in message
    assert re.search(r"got \S+", message)
    assert '"ddtree": false' in message
    with pytest.raises(ValueError, match=re.escape(name)):
        support.require_supported(config)


def test_backends_per_kind_are_refused(cuda):
    config = engine(attention_config__backend_per_kind={"full": named("FLASH_ATTN")})
    assert "backend_per_kind" in support.find_refusal(config).reason


def test_several_refusals_are_named_at_once(cuda):
    config = engine(
        lora_config=lora(specialize_active_lora=True), model_config__use_mla=True
    )
    message = support.find_refusal(config).message
    assert "LoRA" in message
    assert "latent attention" in message


@pytest.mark.parametrize("version", ["0.31.2", "0.33.0", "1.32.0", "0.320.0"])
def test_another_vllm_is_refused(cuda, version):
    with mock.patch("vllm.__version__", version):
        assert f"got vLLM {version}" in support.find_refusal(engine()).reason


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1", "0.32.0+cpu", "0.32.1rc1"])
def test_every_release_of_the_minor_is_taken(cuda, version):
    with mock.patch("vllm.__version__", version):
        assert support.find_refusal(engine()) is None


def test_another_device_is_refused(cuda):
    cuda.is_cuda = lambda: False
    cuda.device_name = "tpu"
    assert "got tpu" in support.find_refusal(engine()).reason


@pytest.mark.parametrize(("value", "is_refused"), [("1", True), ("0", False)])
def test_batch_invariance_is_refused(cuda, monkeypatch, value, is_refused):
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", value)
    refusal = support.find_refusal(engine())
    assert (refusal is not None) is is_refused
    if is_refused:
        assert "got VLLM_BATCH_INVARIANT=1" in refusal.reason
        assert "without VLLM_BATCH_INVARIANT=1" in refusal.way_out


def test_other_model_states_are_refused():
    class MambaState:
        pass

    with pytest.raises(ValueError, match="model state MambaState"):
        support.require_supported_model_state(MambaState)


def test_default_model_state_is_taken():
    import vllm.v1.worker.cpu.shm  # noqa: F401
    from vllm.v1.worker.gpu.model_states.default import DefaultModelState

    support.require_supported_model_state(DefaultModelState)


@pytest.mark.parametrize(
    ("hf_config", "size"),
    [
        ({"block_size": 16}, 16),
        ({"dflash_config": {"block_size": 8}}, 8),
        ({"dflash_config": None}, None),
        ({}, None),
    ],
)
def test_draft_block_size(hf_config, size):
    config = SimpleNamespace(draft_model_config=draft("DFlashDraftModel", **hf_config))
    assert support.draft_block_size(config) == size


def test_a_chains_schedule_is_refused_early():
    config = SimpleNamespace(num_speculative_tokens_per_batch_size=[(1, 4, 7)])
    refusal = support.find_early_refusal(config, tree_of(), None)
    assert "budget_per_batch_size" in refusal.way_out


@pytest.mark.parametrize(
    ("step", "refused"), [(None, False), (64, False), (63, True), (1, True)]
)
def test_a_small_step_is_refused_early(step, refused):
    config = SimpleNamespace(num_speculative_tokens_per_batch_size=None)
    refusal = support.find_early_refusal(config, tree_of(48), step)
    assert (refusal is not None) == refused
    if refused:
        assert "--max-num-batched-tokens 64" in refusal.way_out


@pytest.mark.parametrize(
    ("threshold", "schedule", "is_refused"),
    [
        (0, None, False),
        (1, None, True),
        (47, None, True),
        (48, None, False),
        (1, [[1, 8, 47]], False),
    ],
)
def test_a_threshold_has_to_let_a_fixed_tree_through(threshold, schedule, is_refused):
    config = engine(
        scheduler_config__long_prefill_token_threshold=threshold,
        additional_config={"ddtree": tree_of(47, schedule).to_dict()},
    )
    found = support_checks.find_small_threshold(config)
    assert (found is not None) is is_refused


def test_reserved_tokens_are_what_vllm_reserves():
    """The rows of a verify and `max_num_new_slots_for_drafting`."""
    from vllm.config import SpeculativeConfig

    from vllm_dflash.patches import original
    from vllm_dflash.patches.speculative_config import (
        make_draft_slots,
        set_draft_slots,
    )
    from vllm_dflash.plugin import register

    register()
    tree = tree_of(48)
    config = SimpleNamespace(
        num_speculative_tokens=tree.budget, use_dflash=lambda: True
    )
    slots = make_draft_slots(original("draft_slots"))
    assert slots.fget(config) == tree.budget
    set_draft_slots(config, tree.depth)
    assert slots.fget(config) == tree.depth == 15
    assert support_checks.tokens_reserved(tree) == tree.width + tree.depth
    assert isinstance(
        vars(SpeculativeConfig)["max_num_new_slots_for_drafting"], property
    )


def test_refused_rows_say_why():
    for feature in FEATURES:
        assert feature.note, feature.name
        assert not feature.note.endswith("."), feature.name
        if feature.status is not Status.REFUSED:
            assert feature.check is None
            assert not feature.way_out


def test_rows_that_vllm_refuses_by_itself():
    """A class without hidden states for a draft, and the way out of it."""
    from vllm.model_executor.models.gemma2 import Gemma2ForCausalLM
    from vllm.model_executor.models.interfaces import supports_eagle3
    from vllm.model_executor.models.mixtral import MixtralForCausalLM
    from vllm.model_executor.models.transformers import TransformersForCausalLM

    (row,) = (f for f in FEATURES if f.status is Status.REFUSED and f.check is None)
    assert "hidden states" in row.name
    assert row.way_out == "--model-impl transformers"
    assert not supports_eagle3(Gemma2ForCausalLM)
    assert not supports_eagle3(MixtralForCausalLM)
    assert supports_eagle3(TransformersForCausalLM)


def test_names_are_unique():
    assert len({feature.name for feature in FEATURES}) == len(FEATURES)


def test_docs_contain_the_table():
    assert support.render_markdown() in DOCS.read_text(encoding="utf-8")


def test_table_names_the_backends_that_exist():
    from vllm_dflash.attention.registry import CPU_TREE_BACKENDS, GPU_TREE_BACKENDS

    assert set(support_checks.TREE_BACKENDS) == {*GPU_TREE_BACKENDS, *CPU_TREE_BACKENDS}


def test_chain_rows_are_what_the_model_state_verifies_as_chains():
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    from vllm_dflash.sample.history import linear_history_reason

    for options in (
        {"repetition_penalty": 1.1},
        {"frequency_penalty": 0.1},
        {"presence_penalty": 0.1},
        {"bad_words": ["x"]},
        {"structured_outputs": StructuredOutputsParams(regex="a+")},
        {"thinking_token_budget": 8},
    ):
        assert linear_history_reason(SamplingParams(**options)) is not None
    plain = SamplingParams(
        temperature=0.7,
        top_p=0.9,
        top_k=5,
        min_p=0.1,
        seed=1,
        logit_bias={3: 1.0},
        allowed_token_ids=[3, 4],
        logprobs=2,
        min_tokens=3,
        n=2,
        stop=["x"],
        stop_token_ids=[4],
    )
    assert linear_history_reason(plain) is None
