# SPDX-License-Identifier: Apache-2.0
"""Target models: what of a config keeps them from trees, and what does not."""

from types import SimpleNamespace

import pytest
from fake_configs import engine

from vllm_dflash import support_targets
from vllm_dflash_kernels.tree_attention.tiles import HEAD_SIZES


def model(head_size=128, layers=None, architecture="LlamaForCausalLM", **changes):
    """A config whose text config has `layers`, one of which makes it uniform."""
    layers = [SimpleNamespace(**layer) for layer in layers or [{}]]
    text = layers[0]
    if len(layers) > 1:
        text = SimpleNamespace(is_heterogeneous=True, per_layer_config=layers)
    return engine(
        model_config__architectures=[architecture],
        model_config__get_head_size=lambda: head_size,
        model_config__hf_text_config=text,
        **{f"model_config__{name}": value for name, value in changes.items()},
    )


def test_widest_head_is_that_of_the_kernels():
    assert max(HEAD_SIZES) == support_targets.MAX_HEAD_SIZE


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"head_size": 256}, None),
        ({"head_size": 257}, "head size 257"),
        ({"head_size": 576, "use_mla": True}, None),
        ({"layers": [{"swa_head_dim": 256}]}, None),
        ({"layers": [{"global_head_dim": 512}]}, "head size 512"),
        ({"layers": [{}, {"swa_head_dim": 320}]}, "head size 320"),
        ({"layers": [{"swa_head_dim": None}]}, None),
    ],
)
def test_wide_heads(options, found):
    assert support_targets.find_wide_heads(model(**options)) == found


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"layers": [{"v_head_dim": 128}]}, None),
        ({"layers": [{"v_head_dim": None}]}, None),
        ({"layers": [{"v_head_dim": 128, "head_dim": 128}], "head_size": 64}, None),
        ({"head_size": 192, "layers": [{"v_head_dim": 128}]}, "v_head_dim=128"),
        ({"head_size": 576, "layers": [{"v_head_dim": 128}], "use_mla": True}, None),
        ({"layers": [{"swa_head_dim": 192, "swa_v_head_dim": 192}]}, None),
        (
            {"layers": [{"swa_head_dim": 192, "swa_v_head_dim": 128}]},
            "swa_v_head_dim=128 and swa_head_dim=192",
        ),
        ({"layers": [{}, {"v_head_dim": 64}]}, "v_head_dim=64 and head_dim=128"),
    ],
)
def test_values_of_another_width(options, found):
    value = support_targets.find_unlike_values(model(**options))
    assert value is None if found is None else value.startswith(found)


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({}, None),
        ({"layers": [{"is_causal": True, "param_sink_number": 0}]}, None),
        ({"layers": [{"is_causal": False}]}, "is_causal=False"),
        ({"layers": [{"param_sink_number": 128}]}, "param_sink_number=128"),
        ({"rswa_window": 0}, "rswa_window=0"),
        ({"architecture": "HrmTextForCausalLM"}, "HrmTextForCausalLM"),
        (
            {"architecture": "HrmTextForCausalLM", "rswa_window": 8},
            "rswa_window=8, HrmTextForCausalLM",
        ),
    ],
)
def test_other_attention(options, found):
    assert support_targets.find_other_attention(model(**options)) == found


@pytest.mark.parametrize(
    ("size", "found"),
    [(None, None), (0, None), (8192, "attention_chunk_size=8192")],
)
def test_chunks(size, found):
    config = model(attention_chunk_size=size)
    assert support_targets.find_chunks(config) == found


def test_layers_that_differ_are_read_one_by_one():
    """A heterogeneous config of transformers refuses to be asked as a whole."""
    from transformers import Gemma4TextConfig

    text = Gemma4TextConfig(num_hidden_layers=6)
    with pytest.raises(RuntimeError, match="per-layer attribute"):
        _ = text.head_dim
    config = model(head_size=256, v_head_dim=None)
    config.model_config.hf_text_config = text
    assert support_targets.find_unlike_values(config) is None
    assert support_targets.find_other_attention(config) is None


@pytest.mark.parametrize(
    ("global_head_dim", "found"), [(512, "head size 512"), (256, None)]
)
def test_widest_layer_of_gemma_4_counts(global_head_dim, found):
    from transformers import Gemma4TextConfig
    from vllm.transformers_utils.model_arch_config_convertor import (
        MODEL_ARCH_CONFIG_CONVERTORS,
    )

    text = Gemma4TextConfig(
        num_hidden_layers=6,
        global_head_dim=global_head_dim,
        architectures=["Gemma4ForCausalLM"],
    )
    arch = MODEL_ARCH_CONFIG_CONVERTORS["gemma4_text"](text, text).convert()
    config = model(head_size=arch.head_size)
    config.model_config.hf_text_config = text
    assert support_targets.find_wide_heads(config) == found
