# SPDX-License-Identifier: Apache-2.0
"""Equality with no speculation on targets of other shapes than the tiny default."""

from typing import Any

import pytest
import torch
from engines import (
    FP32_BACKEND,
    engine,
    generate,
    params,
    target_attention,
    token_ids,
    tree_config,
    window_of,
)
from tiny_models import write_target

pytestmark = pytest.mark.e2e

# Less than the nodes of a tree, so that windows by node index and by depth differ, and
# less than every prompt, so that it cuts the committed prefix too.
WINDOW = 12

TARGETS: dict[str, dict[str, Any]] = {
    "mistral with a window in all layers": dict(
        family="Mistral", sliding_window=WINDOW, num_key_value_heads=1
    ),
    "window and full layers in turn": dict(
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        sliding_window=WINDOW,
    ),
    "qwen3, head 128, group 1": dict(
        family="Qwen3", head_dim=128, num_attention_heads=2, num_key_value_heads=2
    ),
    "qwen3, head 128, group 4": dict(
        family="Qwen3", head_dim=128, num_attention_heads=8, num_key_value_heads=2
    ),
    "llama, head 64, group 1": dict(num_key_value_heads=4),
    "llama, head 64, group 4, biases": dict(num_key_value_heads=1, attention_bias=True),
}


SAMPLING = [
    dict(),
    dict(temperature=1.0, seed=21),
    dict(),
    dict(temperature=0.8, seed=22, top_k=30, top_p=0.9),
    dict(),
    dict(temperature=1.2, seed=23),
]


@pytest.mark.parametrize("name", TARGETS)
def test_greedy_and_seeded_tokens_equal_no_speculation(
    tiny_draft, prompts, rig, tmp_path, name
):
    target = write_target(tmp_path / "target", **TARGETS[name])
    options = [params(24, **kwargs) for kwargs in SAMPLING]
    with engine(target) as llm:
        expected = token_ids(generate(llm, prompts, options))
    for prompt, tokens in zip(prompts, expected, strict=True):
        rig.add_reference(prompt, tokens)
    with engine(target, tree_config(tiny_draft)) as llm:
        layers = target_attention(llm)
        windows = [window_of(layer) for layer in layers]
        backends = {layer.attn_backend.get_name() for layer in layers}
        got = token_ids(generate(llm, prompts, options))
    assert got == expected
    # The configs did what they say.
    layer_types = TARGETS[name].get("layer_types", ["sliding_attention"] * 3)
    window = TARGETS[name].get("sliding_window")
    assert windows == [window if "sliding" in t else None for t in layer_types]
    assert backends == {FP32_BACKEND if torch.cuda.is_available() else "CPU_ATTN"}
    assert all(len(set(tokens)) > 10 for tokens in expected)
    assert rig.mean_tokens > 2
    assert rig.num_branching_paths > 20
