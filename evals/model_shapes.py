# SPDX-License-Identifier: Apache-2.0
"""Model folders that hold a config only, for engines with dummy weights."""

import json
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


def dflash_config(target: dict[str, Any], layer_ids: list[int]) -> dict[str, Any]:
    """A block-16 DFlash draft of five layers for ``target``."""
    num_layers = len(layer_ids)
    return dict(
        target,
        architectures=["DFlashDraftModel"],
        num_hidden_layers=num_layers,
        block_size=16,
        num_target_layers=target["num_hidden_layers"],
        dflash_config=dict(mask_token_id=151669, target_layer_ids=layer_ids),
        max_window_layers=num_layers,
        layer_types=["full_attention"] * num_layers,
    )


def write_qwen3_8b(base: Path) -> tuple[str, str]:
    """Write target and draft folders of Qwen3-8B's shape; return their paths."""
    folders = {
        "qwen3-8b": QWEN3_8B,
        "qwen3-8b-dflash": dflash_config(QWEN3_8B, [1, 9, 17, 25, 33]),
    }
    for name, config in folders.items():
        (base / name).mkdir(parents=True, exist_ok=True)
        (base / name / "config.json").write_text(json.dumps(config, indent=1))
    target, draft = (str(base / name) for name in folders)
    return target, draft
