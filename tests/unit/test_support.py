# SPDX-License-Identifier: Apache-2.0
"""The support table finds what it refuses, and the docs say the same."""

import re
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

from vllm_dflash import support, support_checks
from vllm_dflash.config import parse_ddtree_option
from vllm_dflash.graphs import cover_verify_widths, verify_sizes
from vllm_dflash.selection import select_backend
from vllm_dflash.support_table import FEATURES, Status

DOCS = Path(__file__).resolve().parents[2] / "docs/compatibility.md"


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
            enable_prompt_embeds=False,
            logits_processors=None,
            return_sampling_mask=False,
            enable_trace_replay=False,
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
        "cache_config": dict(cache_dtype="auto", kv_sharing_fast_prefill=False),
        "attention_config": dict(backend=None, backend_per_kind=None),
        "scheduler_config": dict(max_num_batched_tokens=2048, max_num_seqs=64),
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


def draft(*architectures, **hf_config):
    return SimpleNamespace(
        architectures=list(architectures), hf_config=SimpleNamespace(**hf_config)
    )


@pytest.fixture
def cuda(monkeypatch):
    """The platform of the checks, whatever this machine is."""
    platform = SimpleNamespace(
        is_cuda=lambda: True, is_cpu=lambda: False, device_name="cuda"
    )
    monkeypatch.setattr("vllm.platforms.current_platform", platform)
    return platform


def test_plain_engine_is_supported(cuda):
    assert support.find_refusal(engine()) is None
    support.require_supported(engine())


@pytest.mark.parametrize(
    "changes",
    [
        {"attention_config__backend": named("FLASH_ATTN")},
        {"attention_config__backend": named("TRITON_ATTN")},
        {"cache_config__cache_dtype": "fp8"},
        {"cache_config__cache_dtype": "bfloat16"},
    ],
)
def test_supported_choices(cuda, changes):
    assert support.find_refusal(engine(**changes)) is None


REFUSED = {
    "Model Runner V1": {"use_v2_model_runner": False},
    "LoRA": {"lora_config": object()},
    "KV connectors": {"kv_transfer_config": object()},
    "prompt embeddings": {"model_config__enable_prompt_embeds": True},
    "pipeline parallelism": {"parallel_config__pipeline_parallel_size": 2},
    "data parallelism": {"parallel_config__data_parallel_size": 2},
    "decode context parallelism": {"parallel_config__decode_context_parallel_size": 2},
    "prefill context parallelism": {
        "parallel_config__prefill_context_parallel_size": 2
    },
    "dual batch overlap": {"parallel_config__use_ubatching": True},
    "batch-sharded sampling": {"parallel_config__enable_batch_sharded_sampling": True},
    "elastic expert parallelism": {"parallel_config__enable_elastic_ep": True},
    "hybrid and attention-free models": {"model_config__is_hybrid": True},
    "multi-head latent attention": {"model_config__use_mla": True},
    "encoder-decoder models": {"model_config__is_encoder_decoder": True},
    "multimodal models": {"model_config__uses_mrope": True},
    "ALiBi": {"model_config__uses_alibi": True},
    "diffusion models": {"model_config__is_diffusion": True},
    "pooling models": {"model_config__runner_type": "pooling"},
    "another attention backend": {"attention_config__backend": named("FLASHINFER")},
    "another KV cache type": {"cache_config__cache_dtype": "int8_per_token_head"},
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
    "custom logits processors": {"model_config__logits_processors": ["a:B"]},
    "watermarking": {"watermark_config": object()},
    "returned sampling masks": {"model_config__return_sampling_mask": True},
    "trace replay": {"model_config__enable_trace_replay": True},
    "a step smaller than a tree": {"scheduler_config__max_num_batched_tokens": 96},
}
# Found by what this process is rather than by its config; tested on their own.
ENVIRONMENT = {"another vLLM than 0.32", "another device"}


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
    config = engine(lora_config=object(), model_config__use_mla=True)
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


def test_fp8_cache_is_refused_on_the_cpu(cuda):
    cuda.is_cpu = lambda: True
    refusal = support.find_refusal(engine(cache_config__cache_dtype="fp8"))
    assert "--kv-cache-dtype fp8" in refusal.reason
    assert support.find_refusal(engine()) is None


def test_installed_logits_processors_are_found(cuda, monkeypatch):
    monkeypatch.setattr(
        "importlib.metadata.entry_points", lambda group: [named("mine")]
    )
    assert "installed plugins mine" in support.find_refusal(engine()).reason


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


def tree_of(budget=48, schedule=None):
    option = {"budget": budget}
    if schedule is not None:
        option["budget_per_batch_size"] = schedule
    return parse_ddtree_option(
        option, num_speculative_tokens=15, block_size=16, is_cpu=False
    )


def test_a_chains_schedule_is_refused_early():
    config = SimpleNamespace(num_speculative_tokens_per_batch_size=[(1, 4, 7)])
    refusal = support.find_early_refusal(config, tree_of(), None)
    assert "budget_per_batch_size" in refusal.way_out


@pytest.mark.parametrize(
    ("step", "refused"), [(None, False), (97, False), (96, True), (1, True)]
)
def test_a_small_step_is_refused_early(step, refused):
    config = SimpleNamespace(num_speculative_tokens_per_batch_size=None)
    refusal = support.find_early_refusal(config, tree_of(48), step)
    assert (refusal is not None) == refused
    if refused:
        assert "--max-num-batched-tokens 97" in refusal.way_out


def test_reserved_tokens_are_what_vllm_reserves():
    """The rows of a verify and `max_num_new_slots_for_drafting`."""
    from vllm.config import SpeculativeConfig

    tree = tree_of(48)
    slots = SpeculativeConfig.max_num_new_slots_for_drafting.fget(
        SimpleNamespace(num_speculative_tokens=tree.budget, use_dflash=lambda: True)
    )
    assert support_checks.tokens_reserved(tree) == tree.width + slots


def test_refused_rows_say_why():
    for feature in FEATURES:
        assert feature.note, feature.name
        assert not feature.note.endswith("."), feature.name
        if feature.status is not Status.REFUSED:
            assert feature.check is None
            assert not feature.way_out


def test_names_are_unique():
    assert len({feature.name for feature in FEATURES}) == len(FEATURES)


def test_docs_contain_the_table():
    assert support.render_markdown() in DOCS.read_text(encoding="utf-8")


def test_table_names_the_backends_that_exist():
    from vllm_dflash.attention.registry import CPU_TREE_BACKENDS, GPU_TREE_BACKENDS

    assert set(support_checks.TREE_BACKENDS) == {*GPU_TREE_BACKENDS, *CPU_TREE_BACKENDS}


def test_chain_rows_are_what_the_model_state_verifies_as_chains():
    from vllm import SamplingParams

    from vllm_dflash.sample.history import linear_history_reason

    for options in (
        {"repetition_penalty": 1.1},
        {"frequency_penalty": 0.1},
        {"presence_penalty": 0.1},
        {"bad_words": ["x"]},
    ):
        assert linear_history_reason(SamplingParams(**options)) is not None
    plain = SamplingParams(
        temperature=0.7, top_p=0.9, top_k=5, seed=1, logprobs=2, min_tokens=3, n=2
    )
    assert linear_history_reason(plain) is None


def test_verify_sizes_cover_the_batches_of_a_step():
    sizes = verify_sizes(tree_of(48), 256, 8192, None)
    assert all(size % 49 == 0 for size in sizes)
    # 8192 // 97 requests fit a step.
    assert sizes[-1] == 84 * 49
    assert sizes[:8] == [49 * n for n in range(1, 9)]
    assert len(sizes) < 30
    gaps = [b / a for a, b in zip(sizes[7:], sizes[8:], strict=False)]
    assert max(gaps) <= 1.25


def test_verify_sizes_stop_at_the_number_of_requests_and_of_tokens():
    assert verify_sizes(tree_of(48), 4, 8192, None) == [49, 98, 147, 196]
    assert verify_sizes(tree_of(48), 256, 8192, 2048)[-1] == 41 * 49


def test_verify_sizes_of_a_schedule():
    tree = tree_of(64, [[1, 4, 64], [5, 8, 15], [9, 16, 0]])
    assert verify_sizes(tree, 16, 8192, None) == sorted(
        [65, 130, 195, 260] + [16 * n for n in (5, 6, 7, 8)]
    )


def test_last_range_of_a_schedule_goes_on():
    tree = tree_of(64, [[1, 4, 64], [5, 8, 15]])
    assert 12 * 16 in verify_sizes(tree, 12, 8192, None)
    assert 13 * 16 not in verify_sizes(tree, 12, 8192, None)


def candidates(*names):
    """What the platform's ranking returns, worst first."""
    return [
        SimpleNamespace(backend=named(name), priority=place)
        for place, name in reversed(list(enumerate(names)))
    ]


@pytest.fixture
def ranking(cuda, monkeypatch):
    """Let vLLM rank backends without a GPU; returns a setter of the ranking."""
    import contextlib

    import torch
    import vllm.config

    cuda.get_device_capability = lambda: (9, 0)
    asked = []

    def set_ranking(*names):
        def get_valid_backends(device_capability, attn_selector_config, num_heads):
            asked.append(attn_selector_config)
            return candidates(*names), {}

        cuda.get_valid_backends = get_valid_backends
        return asked

    monkeypatch.setattr(vllm.config, "set_current_vllm_config", contextlib.nullcontext)
    cuda.config = engine()
    model = cuda.config.model_config
    model.get_head_size = lambda: 128
    model.dtype = torch.bfloat16
    model.get_sliding_window = lambda: 512
    model.get_num_attention_heads = lambda parallel_config: 32
    cache = cuda.config.cache_config
    cache.block_size, cache.user_specified_block_size = 16, False
    return set_ranking


def test_vllms_choice_stands_if_it_has_tree_attention(cuda, ranking):
    asked = ranking("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN")
    assert select_backend(cuda.config) == "FLASH_ATTN"
    assert cuda.config.attention_config.backend is None
    assert (asked[0].head_size, asked[0].has_sliding_window) == (128, True)
    assert asked[0].block_size is None


@pytest.mark.parametrize("better", ["FLASH_ATTN", "TRITON_ATTN"])
def test_best_backend_with_tree_attention_is_named(cuda, ranking, better):
    ranking("FLASHINFER", better, "FLEX_ATTENTION")
    assert select_backend(cuda.config) == better
    assert cuda.config.attention_config.backend.name == better


@pytest.mark.parametrize("names", [(), ("FLASHINFER", "FLEX_ATTENTION")])
def test_no_backend_with_tree_attention(cuda, ranking, names):
    ranking(*names)
    refusal = select_backend(cuda.config)
    assert isinstance(refusal, support.Refusal)
    assert "TRITON_ATTN" in refusal.reason
    assert cuda.config.attention_config.backend is None


def test_named_backend_is_not_ranked(cuda):
    config = engine(attention_config__backend=named("TRITON_ATTN"))
    assert select_backend(config) == "TRITON_ATTN"


def test_ranking_that_fails_is_left_to_the_workers(cuda, ranking):
    cuda.get_valid_backends = None
    assert select_backend(cuda.config) is None


def test_backend_of_the_cpu(cuda):
    cuda.is_cpu = lambda: True
    assert select_backend(engine()) == "CPU_ATTN"


def test_ranking_asks_vllm_with_words_it_knows():
    import ast

    import vllm

    path = Path(vllm.__file__).parent / "platforms/cuda.py"
    functions = {
        node.name: [argument.arg for argument in node.args.args]
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef)
    }
    assert functions["get_valid_backends"] == [
        "cls",
        "device_capability",
        "attn_selector_config",
        "num_heads",
    ]


def compilation(sizes, full=True):
    return SimpleNamespace(
        cudagraph_capture_sizes=sizes,
        max_cudagraph_capture_size=max(sizes, default=0),
        cudagraph_mode=SimpleNamespace(has_full_cudagraphs=lambda: full),
    )


@pytest.mark.parametrize(("user_max_num_seqs", "largest"), [(True, 64), (False, 41)])
def test_capture_sizes_cover_the_verify_widths(user_max_num_seqs, largest):
    config = engine(
        compilation_config=compilation([1, 2, 4, 512]),
        scheduler_config__max_num_batched_tokens=8192,
    )
    cover_verify_widths(
        config, tree_of(48), user_sizes=False, user_max_num_seqs=user_max_num_seqs
    )
    sizes = config.compilation_config.cudagraph_capture_sizes
    assert {1, 2, 4, 512, 49, 98} <= set(sizes)
    assert sizes == sorted(sizes)
    assert sizes[-1] == largest * 49
    assert config.compilation_config.max_cudagraph_capture_size == sizes[-1]


@pytest.mark.parametrize(
    ("sizes", "full", "user_sizes"),
    [([1, 2, 4], True, True), ([1, 2, 4], False, False), ([], True, False)],
)
def test_capture_sizes_that_stay(sizes, full, user_sizes):
    config = engine(compilation_config=compilation(list(sizes), full))
    cover_verify_widths(
        config, tree_of(48), user_sizes=user_sizes, user_max_num_seqs=False
    )
    assert config.compilation_config.cudagraph_capture_sizes == sizes
