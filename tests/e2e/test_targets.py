# SPDX-License-Identifier: Apache-2.0
"""Equality with no speculation on targets of other shapes than the tiny default."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from engines import (
    FP32_BACKEND,
    engine,
    generate,
    model_runner,
    params,
    token_ids,
    tree_config,
    window_of,
)
from tiny_models import NUM_LAYERS, quantise, write_target

pytestmark = pytest.mark.e2e

# Less than the nodes of a tree, so that windows by node index and by depth differ, and
# less than every prompt, so that it cuts the committed prefix too.
WINDOW = 12
IN_TURN = dict(
    layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    sliding_window=WINDOW,
)
# Scores of these targets go beyond it, so that leaving it out shows.
CAPS = dict(attn_logit_softcapping=20.0, final_logit_softcapping=15.0)


@dataclass(frozen=True)
class Target:
    """A tiny target: what its config says, and how it is loaded.

    Attributes:
        config: For `write_target`.
        engine: Options of the engine that serves it.
        has_sinks: Whether all its layers have attention sinks.
        is_quantised: Whether its linear layers are.
    """

    config: dict[str, Any]
    engine: dict[str, Any] = field(default_factory=dict)
    has_sinks: bool = False
    is_quantised: bool = False


# For models whose own class in vLLM hands out no hidden states, which DFlash needs.
GENERIC = dict(model_impl="transformers")

TARGETS: dict[str, Target] = {
    "mistral with a window in all layers": Target(
        dict(family="Mistral", sliding_window=WINDOW, num_key_value_heads=1)
    ),
    "window and full layers in turn": Target(dict(**IN_TURN)),
    "qwen3, head 128, group 1": Target(
        dict(family="Qwen3", head_dim=128, num_attention_heads=2, num_key_value_heads=2)
    ),
    "qwen3, head 128, group 4": Target(
        dict(family="Qwen3", head_dim=128, num_attention_heads=8, num_key_value_heads=2)
    ),
    "llama, head 64, group 1": Target(dict(num_key_value_heads=4)),
    "llama, head 64, group 4, biases": Target(
        dict(num_key_value_heads=1, attention_bias=True)
    ),
    "qwen3, a mixture of experts": Target(
        dict(
            family="Qwen3Moe",
            num_experts=8,
            num_experts_per_tok=2,
            moe_intermediate_size=64,
        )
    ),
    "mixtral, in transformers": Target(
        dict(family="Mixtral", num_local_experts=8, num_experts_per_tok=2), GENERIC
    ),
    "gemma 2, in transformers: soft caps and windows": Target(
        dict(family="Gemma2", query_pre_attn_scalar=64, **IN_TURN, **CAPS), GENERIC
    ),
    "gemma 4: soft caps, two sizes of heads, keys of an earlier layer": Target(
        dict(
            family="Gemma4",
            layer_types=["sliding_attention", "full_attention", "full_attention"],
            sliding_window=WINDOW,
            global_head_dim=128,
            num_kv_shared_layers=1,
            hidden_size_per_layer_input=0,
            **CAPS,
        )
    ),
    "granite: sinks and windows": Target(
        dict(family="GraniteSWA", **IN_TURN), has_sinks=True
    ),
    "gpt-oss: experts, sinks and windows": Target(
        dict(family="GptOss", num_local_experts=4, num_experts_per_tok=2, **IN_TURN),
        has_sinks=True,
    ),
    "llama, weights and activations of eight bits": Target(dict(), is_quantised=True),
}


SAMPLING = [
    dict(),
    dict(temperature=1.0, seed=21),
    dict(),
    dict(temperature=0.8, seed=22, top_k=30, top_p=0.9),
    dict(),
    dict(temperature=1.2, seed=23),
]


def attention_by_layer(llm: Any) -> list[Any]:
    """The target's attention layers in order, however its class names them."""
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.models.utils import extract_layer_index

    context = model_runner(llm).vllm_config.compilation_config.static_forward_context
    layers = {
        extract_layer_index(name): layer
        for name, layer in context.items()
        if isinstance(layer, Attention)
    }
    # The draft's layers are counted on from the target's.
    return [layers[index] for index in range(NUM_LAYERS)]


@pytest.mark.parametrize("name", TARGETS)
def test_greedy_and_seeded_tokens_equal_no_speculation(
    tiny_draft, prompts, rig, tmp_path, name
):
    spec = TARGETS[name]
    target = write_target(tmp_path / "target", **spec.config)
    if spec.is_quantised:
        quantise(target)
    options = [params(24, **kwargs) for kwargs in SAMPLING]
    with engine(target, **spec.engine) as llm:
        expected = token_ids(generate(llm, prompts, options))
    for prompt, tokens in zip(prompts, expected, strict=True):
        rig.add_reference(prompt, tokens)
    with engine(target, tree_config(tiny_draft), **spec.engine) as llm:
        layers = attention_by_layer(llm)
        windows = [window_of(layer) for layer in layers]
        backends = {layer.attn_backend.get_name() for layer in layers}
        caps = {layer.impl.logits_soft_cap or None for layer in layers}
        has_sinks = {layer.impl.sinks is not None for layer in layers}
        config = model_runner(llm).vllm_config
        got = token_ids(generate(llm, prompts, options))
    assert got == expected
    # The configs did what they say.
    layer_types = spec.config.get("layer_types", ["sliding_attention"] * 3)
    window = spec.config.get("sliding_window")
    assert windows == [window if "sliding" in t else None for t in layer_types]
    assert backends == {FP32_BACKEND if torch.cuda.is_available() else "CPU_ATTN"}
    assert caps == {spec.config.get("attn_logit_softcapping")}
    assert has_sinks == {spec.has_sinks}
    assert (config.quant_config is not None) == spec.is_quantised
    assert config.model_config.is_moe == ("num_experts_per_tok" in spec.config)
    assert all(len(set(tokens)) > 10 for tokens in expected)
    assert rig.mean_tokens > 2
    assert rig.num_branching_paths > 20
