# SPDX-License-Identifier: Apache-2.0
"""Model folders that hold a config only, for engines with dummy weights."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

QWEN3_8B: dict[str, Any] = dict(
    architectures=["Qwen3ForCausalLM"],
    model_type="qwen3",
    attention_bias=False,
    bos_token_id=151643,
    eos_token_id=151645,
    head_dim=128,
    hidden_act="silu",
    hidden_size=4096,
    intermediate_size=12288,
    max_position_embeddings=40960,
    max_window_layers=36,
    num_attention_heads=32,
    num_hidden_layers=36,
    num_key_value_heads=8,
    rms_norm_eps=1e-6,
    rope_theta=1000000,
    tie_word_embeddings=False,
    torch_dtype="bfloat16",
    use_sliding_window=False,
    vocab_size=151936,
)


# Qwen3-30B-A3B, and Qwen3-Coder-30B-A3B.
QWEN3_30B_A3B: dict[str, Any] = dict(
    QWEN3_8B,
    architectures=["Qwen3MoeForCausalLM"],
    model_type="qwen3_moe",
    decoder_sparse_step=1,
    hidden_size=2048,
    intermediate_size=6144,
    max_window_layers=48,
    mlp_only_layers=[],
    moe_intermediate_size=768,
    norm_topk_prob=True,
    num_attention_heads=32,
    num_experts=128,
    num_experts_per_tok=8,
    num_hidden_layers=48,
    num_key_value_heads=4,
    router_aux_loss_coef=0.001,
)
# One of two ranks of Llama-3.3-70B: half of the heads, the MLP and the vocabulary.
LLAMA_70B_RANK: dict[str, Any] = dict(
    architectures=["LlamaForCausalLM"],
    model_type="llama",
    attention_bias=False,
    bos_token_id=0,
    eos_token_id=1,
    head_dim=128,
    hidden_act="silu",
    hidden_size=8192,
    intermediate_size=28672 // 2,
    max_position_embeddings=8192,
    num_attention_heads=64 // 2,
    num_hidden_layers=80,
    num_key_value_heads=8 // 2,
    rms_norm_eps=1e-5,
    rope_theta=500000,
    tie_word_embeddings=False,
    torch_dtype="bfloat16",
    vocab_size=128256 // 2,
)


@dataclass(frozen=True)
class PairShape:
    """Configs of a target and of the draft's layers.

    Attributes:
        draft_layers: Dense layers of the target's width.
        draft_intermediate: Of their MLPs.
    """

    target: dict[str, Any]
    draft_layers: int
    draft_intermediate: int


SHAPES = {
    "qwen3-8b": PairShape(QWEN3_8B, 5, 12288),
    # As many layers as z-lab's draft for the Coder; the width of the MLP is assumed.
    "qwen3-30b-a3b": PairShape(QWEN3_30B_A3B, 8, 6144),
    # No draft of it is public: one like that of the 8B.
    "llama-70b-rank": PairShape(LLAMA_70B_RANK, 5, 28672 // 2),
}


def parse_shape(text: str) -> PairShape:
    """Return the shape of ``NAME``, or of ``NAME@LAYERS``.

    Raises:
        ValueError: There is none, or the draft wants more layers to read.
    """
    name, at, number = text.partition("@")
    shape = SHAPES.get(name)
    layers = int(number) if number.isdecimal() else 0
    if shape is None or (at and layers < shape.draft_layers):
        raise ValueError(
            f"there is no shape {text!r}. Allowed are {', '.join(SHAPES)}, and "
            "NAME@LAYERS with at least as many layers as the draft. Type "
            "qwen3-30b-a3b or llama-70b-rank@16"
        )
    if not at:
        return shape
    changes = {"num_hidden_layers": layers}
    if "max_window_layers" in shape.target:
        changes["max_window_layers"] = layers
    return replace(shape, target=shape.target | changes)


def dflash_config(
    target: dict[str, Any], layer_ids: list[int], intermediate_size: int | None = None
) -> dict[str, Any]:
    """A block-16 DFlash draft for ``target``, a dense layer for each id."""
    num_layers = len(layer_ids)
    dense = {k: v for k, v in target.items() if k in QWEN3_8B}
    return dict(
        dense,
        architectures=["DFlashDraftModel"],
        model_type="qwen3",
        num_hidden_layers=num_layers,
        intermediate_size=intermediate_size or target["intermediate_size"],
        block_size=16,
        num_target_layers=target["num_hidden_layers"],
        dflash_config=dict(
            mask_token_id=min(151669, target["vocab_size"] - 1),
            target_layer_ids=layer_ids,
        ),
        max_window_layers=num_layers,
        layer_types=["full_attention"] * num_layers,
    )


def write_pair(
    base: Path, shape: PairShape, layer_ids: list[int] | None = None
) -> tuple[str, str]:
    """Write the folders of a target and its draft; return their paths.

    Args:
        base: Folder of both.
        shape: What they are.
        layer_ids: What the draft reads; spread over the target's layers if None.
    """
    target, count = shape.target, shape.draft_layers
    if layer_ids is None:
        last = target["num_hidden_layers"] - 1
        layer_ids = [round(i * last / count) for i in range(count)]
    configs = {
        "target": target,
        "draft": dflash_config(target, layer_ids, shape.draft_intermediate),
    }
    for name, config in configs.items():
        (base / name).mkdir(parents=True, exist_ok=True)
        (base / name / "config.json").write_text(json.dumps(config, indent=1))
    return str(base / "target"), str(base / "draft")


def write_qwen3_8b(base: Path) -> tuple[str, str]:
    """Write target and draft folders of Qwen3-8B's shape; return their paths."""
    return write_pair(base, SHAPES["qwen3-8b"], [1, 9, 17, 25, 33])
