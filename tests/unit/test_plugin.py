# SPDX-License-Identifier: Apache-2.0
"""The door: what registration changes, and what the front end decides."""

import logging

import pytest
import torch
from tiny_models import BLOCK_SIZE, write_draft, write_target

from vllm_dflash import patches, plugin
from vllm_dflash.config import get_ddtree_config

DEPTH = BLOCK_SIZE - 1
CPU_BUDGET = 16
REFUSED_LORA = {"enable_lora": True, "specialize_active_lora": True}
# What the config of a target says, and the row that refuses it.
OTHER_TARGETS = [
    ({"attention_chunk_size": 64}, "chunked local attention"),
    ({"head_dim": 512}, "heads wider than 256"),
    ({"v_head_dim": 8}, "values of another width"),
    ({"param_sink_number": 16}, "another kind of attention"),
]

# The front end of a CUDA build chooses other defaults; tests on a GPU cover it.
cpu_only = pytest.mark.skipif(torch.cuda.is_available(), reason="CPU defaults")


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> str:
    return write_target(tmp_path_factory.mktemp("plugin_target"))


@pytest.fixture(scope="module")
def draft(tmp_path_factory) -> str:
    # vLLM recognises a DFlash draft without a method by its name.
    return write_draft(tmp_path_factory.mktemp("models") / "tiny-dflash")


@pytest.fixture
def build(target):
    """Build an engine's config as the front end does."""
    from vllm.engine.arg_utils import EngineArgs

    plugin.register()

    def build(speculative_config=None, **kwargs):
        options = dict(
            skip_tokenizer_init=True,
            max_model_len=256,
            enforce_eager=True,
            dtype="float32",
            max_num_seqs=4,
            max_num_batched_tokens=256,
        )
        args = EngineArgs(
            model=target, speculative_config=speculative_config, **options | kwargs
        )
        return args, args.create_engine_config()

    return build


@pytest.fixture
def log():
    """Messages of the front end; vLLM's loggers do not propagate."""
    records = []
    handler = logging.Handler()
    handler.emit = records.append
    logger = logging.getLogger("vllm.vllm_dflash.patches.arg_utils")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield lambda level: [r.getMessage() for r in records if r.levelname == level]
    logger.removeHandler(handler)
    logger.setLevel(level)


def spec(draft, **kwargs):
    return dict(method="dflash", model=draft, **kwargs)


def test_no_speculation_is_untouched(build, log):
    args, config = build(None)
    assert config.speculative_config is None
    assert config.additional_config == {}
    assert not log("INFO")


def test_ngram_is_untouched(build, log):
    words = dict(method="ngram", num_speculative_tokens=3, prompt_lookup_max=3)
    _, config = build(words)
    assert config.speculative_config.num_speculative_tokens == 3
    assert config.additional_config == {}
    assert get_ddtree_config(config) is None
    assert not log("INFO")


@cpu_only
def test_absent_key_gives_a_tree(build, draft, log):
    args, config = build(spec(draft))
    tree = get_ddtree_config(config)
    assert (tree.depth, tree.budget, tree.demanded) == (DEPTH, CPU_BUDGET, False)
    assert config.speculative_config.num_speculative_tokens == CPU_BUDGET
    assert config.num_speculative_tokens == CPU_BUDGET
    (line,) = log("INFO")
    for word in ("depth 7", "budget 16", "width 17", "CPU_ATTN"):
        assert word in line
    assert not log("WARNING")
    assert args.additional_config == {}


@cpu_only
def test_depth_of_the_user_is_kept(build, draft):
    _, config = build(spec(draft, num_speculative_tokens=3))
    tree = get_ddtree_config(config)
    assert (tree.depth, config.speculative_config.num_speculative_tokens) == (3, 16)


def test_options_reach_the_config(build, draft):
    options = {
        "budget": 20,
        "max_children": 3,
        "scale_by_temperature": True,
        "use_noise": False,
        "budget_per_batch_size": [[1, 2, 20], [3, 8, 7]],
    }
    _, config = build(spec(draft, ddtree=options))
    tree = get_ddtree_config(config)
    assert tree.to_dict() == {**options, "depth": DEPTH, "demanded": True}
    schedule = config.speculative_config.num_speculative_tokens_per_batch_size
    assert schedule == [(1, 2, 20), (3, 8, 7)]
    assert config.speculative_config.num_speculative_tokens == 20


def test_false_is_vllms_chain(build, draft, log):
    _, config = build(spec(draft, num_speculative_tokens=5, ddtree=False))
    assert config.speculative_config.num_speculative_tokens == 5
    assert config.additional_config == {}
    assert not log("INFO")
    assert not log("WARNING")


def test_chain_has_the_default_depth_too(build, draft):
    _, config = build(spec(draft, ddtree=False))
    assert config.speculative_config.num_speculative_tokens == DEPTH


@cpu_only
def test_method_is_detected_as_vllm_detects_it(build, draft):
    _, config = build(dict(model=draft))
    assert config.speculative_config.method == "dflash"
    assert get_ddtree_config(config).depth == DEPTH


@cpu_only
@pytest.mark.parametrize("tokens", [None, 5])
def test_flags_instead_of_a_dict(build, draft, tokens):
    _, config = build(spec_method="dflash", spec_model=draft, spec_tokens=tokens)
    assert get_ddtree_config(config).depth == (tokens or DEPTH)


@cpu_only
def test_flags_beside_the_key(build, draft):
    _, config = build(
        {"ddtree": {"budget": 20}}, spec_method="dflash", spec_model=draft
    )
    assert get_ddtree_config(config).budget == 20


@cpu_only
def test_a_second_config_of_the_same_arguments_is_equal(build, draft):
    args, first = build(spec(draft, ddtree={"budget": 20}))
    second = args.create_engine_config()
    assert second.additional_config == first.additional_config
    assert second.speculative_config.num_speculative_tokens == 20


def test_the_users_dict_is_not_written_to(build, draft):
    words = spec(draft, ddtree={"budget": 20})
    build(words)
    assert words == spec(draft, ddtree={"budget": 20})


def test_lora_is_served_by_trees(build, draft):
    _, config = build(spec(draft, ddtree=True), enable_lora=True)
    assert get_ddtree_config(config) is not None
    assert config.lora_config is not None


def test_other_additional_config_is_kept(build, draft):
    _, config = build(spec(draft, ddtree=True), additional_config={"mine": 1})
    assert config.additional_config["mine"] == 1
    assert "ddtree" in config.additional_config


@pytest.mark.parametrize(
    ("words", "kwargs", "message"),
    [
        ({"ddtree": {"nodes": 3}}, {}, "has no option nodes"),
        ({"ddtree": {"budget": 3}}, {}, "7 to 255 is allowed"),
        ({"ddtree": 5}, {}, "neither a switch"),
        (
            {"ddtree": True, "num_speculative_tokens": 8},
            {},
            r"got 8.*1 to 7 is allowed",
        ),
        (
            {"ddtree": {"budget": 255}},
            {},
            "--max-num-batched-tokens 263 or more",
        ),
        (
            {"ddtree": True, "draft_sample_method": "probabilistic"},
            {},
            "sampled drafts",
        ),
        ({"ddtree": True}, REFUSED_LORA, "LoRA"),
        (
            {
                "ddtree": True,
                "num_speculative_tokens": 7,
                "num_speculative_tokens_per_batch_size": [[1, 4, 7]],
            },
            {},
            "drafts of a chain",
        ),
        ({}, {"additional_config": {"ddtree": {}}}, "belongs into speculative_config"),
    ],
)
def test_demanded_tree_is_refused_by_name(build, draft, words, kwargs, message):
    with pytest.raises(ValueError, match=message) as error:
        build(spec(draft, **words), **kwargs)
    assert "Type" in str(error.value)


@pytest.mark.parametrize(
    ("words", "kwargs", "reason", "depth"),
    [
        ({"draft_sample_method": "probabilistic"}, {}, "sampled drafts", DEPTH),
        ({}, REFUSED_LORA, "LoRA", DEPTH),
        ({}, {"max_num_batched_tokens": 20}, "step smaller than a tree", DEPTH),
        ({"num_speculative_tokens": 8}, {}, "got 8", 8),
        (
            {
                "num_speculative_tokens": 7,
                "num_speculative_tokens_per_batch_size": [[1, 4, 5]],
            },
            {},
            "drafts of a chain",
            7,
        ),
    ],
)
def test_tree_that_nobody_demanded_gives_way(
    build, draft, log, words, kwargs, reason, depth
):
    _, config = build(spec(draft, **words), **kwargs)
    assert config.speculative_config.num_speculative_tokens == depth
    assert config.num_speculative_tokens == depth
    assert get_ddtree_config(config) is None
    assert "ddtree" not in config.additional_config
    (warning,) = log("WARNING")
    assert reason in warning
    assert '"ddtree": false' in warning
    assert not log("INFO")


@pytest.mark.parametrize(("words", "row"), OTHER_TARGETS)
def test_target_whose_layers_take_no_tree_is_found_in_time(
    build, draft, log, words, row
):
    """A worker would find it after the front end had promised a tree."""
    with pytest.raises(ValueError, match=row):
        build(spec(draft, ddtree=True), hf_overrides=words)
    _, config = build(spec(draft), hf_overrides=words)
    assert get_ddtree_config(config) is None
    assert config.speculative_config.num_speculative_tokens == DEPTH
    (warning,) = log("WARNING")
    assert row in warning


def test_batch_invariance_is_kept_by_a_chain(build, draft, log, monkeypatch):
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    with pytest.raises(ValueError, match="batch-invariant kernels"):
        build(spec(draft, ddtree=True))
    _, config = build(spec(draft))
    assert get_ddtree_config(config) is None
    (warning,) = log("WARNING")
    assert "VLLM_BATCH_INVARIANT=1" in warning


@pytest.mark.parametrize(
    ("rust", "context", "ddtree", "is_named"),
    [
        ("1", "OPENAI_API_SERVER", None, True),
        ("0", "OPENAI_API_SERVER", None, False),
        ("1", "LLM_CLASS", None, False),
        ("1", "OPENAI_API_SERVER", False, False),
    ],
)
def test_front_end_without_our_metrics_is_named(
    build, draft, log, monkeypatch, rust, context, ddtree, is_named
):
    from vllm.usage.usage_lib import UsageContext

    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", rust)
    words = spec(draft) if ddtree is None else spec(draft, ddtree=ddtree)
    args, _ = build(words)
    assert not log("WARNING")
    args.create_engine_config(UsageContext[context])
    assert [("RUST_FRONTEND=1" in line) for line in log("WARNING")] == [True] * is_named


@pytest.mark.parametrize("words", [None, {"ddtree": False}, REFUSED_LORA])
def test_engine_without_trees_has_vllms_attention_again(build, draft, words):
    """In the process of an earlier engine with trees, which has replaced it."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from vllm_dflash.attention.registry import install_tree_backends

    install_tree_backends()
    replaced = [each for each in AttentionBackendEnum if each.is_overridden()]
    assert replaced
    build(spec(draft, ddtree=True))
    assert all(each.is_overridden() for each in replaced)
    if words is None:
        build(None)
    elif words is REFUSED_LORA:
        build(spec(draft), **words)
    else:
        build(spec(draft, **words))
    assert not any(each.is_overridden() for each in replaced)


def test_fallback_works_with_flags(build, draft):
    """vLLM merges flags into the dict it was given, so a second build could clash."""
    _, config = build(spec_method="dflash", spec_model=draft, **REFUSED_LORA)
    assert config.speculative_config.num_speculative_tokens == DEPTH


def test_fallback_equals_the_config_of_the_chain(build, draft):
    words = dict(draft_sample_method="probabilistic", num_speculative_tokens=DEPTH)
    _, fallback = build(spec(draft, **words))
    _, chain = build(spec(draft, ddtree=False, **words))
    assert fallback.compute_hash() == chain.compute_hash()
    for section in ("scheduler_config", "compilation_config", "cache_config"):
        assert repr(getattr(fallback, section)) == repr(getattr(chain, section))


def test_key_with_another_method_is_refused(build):
    words = dict(method="ngram", num_speculative_tokens=3, prompt_lookup_max=3)
    with pytest.raises(ValueError, match=r"method dflash \(got ngram\)"):
        build({**words, "ddtree": True})
    _, config = build({**words, "ddtree": False})
    assert config.speculative_config.method == "ngram"


def test_errors_of_vllm_pass(build, draft):
    with pytest.raises(ValueError, match="no_such_key"):
        build(spec(draft, no_such_key=1))


def test_registering_again_changes_nothing():
    from vllm.engine.arg_utils import EngineArgs

    plugin.register()
    before = EngineArgs.create_engine_config, EngineArgs.create_speculative_config
    plugin.register()
    assert before == (
        EngineArgs.create_engine_config,
        EngineArgs.create_speculative_config,
    )


def test_registration_never_raises(monkeypatch):
    def fail(name):
        raise RuntimeError(name)

    monkeypatch.setattr(patches, "apply", fail)
    plugin.register()
    monkeypatch.setenv("VLLM_DFLASH_CPU", "maybe")
    plugin.register()
    plugin.register_platform()
