# SPDX-License-Identifier: Apache-2.0
"""Tiny random target and DFlash draft, written as ordinary checkpoints.

Weights are untied and wide, so that greedy text does not collapse to one token and
hide errors.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

VOCAB_SIZE = 512
HIDDEN_SIZE = 64
HEAD_DIM = 64
NUM_LAYERS = 3
BLOCK_SIZE = 8
MASK_TOKEN = 5
MAX_LEN = 1024


def write_target(path: Path, *, sliding_window: int | None = None, seed: int = 0) -> str:
    """A 3-layer decoder: Llama, or Mistral when a sliding window is asked for."""
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        MistralConfig,
        MistralForCausalLM,
    )

    common: dict[str, Any] = dict(
        vocab_size=VOCAB_SIZE,
        hidden_size=HIDDEN_SIZE,
        intermediate_size=128,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=HEAD_DIM,
        max_position_embeddings=MAX_LEN,
        tie_word_embeddings=False,
        initializer_range=0.35,
        bos_token_id=1,
        eos_token_id=2,
        dtype="float32",
    )
    torch.manual_seed(seed)
    if sliding_window is None:
        model = LlamaForCausalLM(LlamaConfig(**common))
    else:
        model = MistralForCausalLM(
            MistralConfig(**common, sliding_window=sliding_window)
        )
    model.float().save_pretrained(path)
    return str(path)


def write_draft(
    path: Path,
    *,
    draft_vocab_size: int | None = None,
    seed: int = 1,
    **config_overrides: Any,
) -> str:
    """A 2-layer DFlash draft in the z-lab layout, sharing embedding and lm_head."""
    path.mkdir(parents=True, exist_ok=True)
    num_layers, num_heads, num_kv_heads, inter = 2, 4, 2, 128
    target_layer_ids = [0, 1]
    config: dict[str, Any] = dict(
        architectures=["DFlashDraftModel"],
        model_type="qwen3",
        hidden_size=HIDDEN_SIZE,
        intermediate_size=inter,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=HEAD_DIM,
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=MAX_LEN,
        rope_theta=10000.0,
        rms_norm_eps=1e-6,
        attention_bias=False,
        tie_word_embeddings=False,
        block_size=BLOCK_SIZE,
        num_target_layers=NUM_LAYERS,
        hidden_act="silu",
        dflash_config=dict(
            mask_token_id=MASK_TOKEN, target_layer_ids=target_layer_ids
        ),
        dtype="float32",
        bos_token_id=1,
        eos_token_id=2,
    )
    config.update(config_overrides)
    (path / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(seed)

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.2

    def near_one(size: int) -> torch.Tensor:
        # Not all ones: a norm that uses another layer's weight must show.
        return 1 + torch.randn(size, generator=generator) * 0.3

    weights = {
        "fc.weight": rand(HIDDEN_SIZE, HIDDEN_SIZE * len(target_layer_ids)),
        "hidden_norm.weight": near_one(HIDDEN_SIZE),
        "norm.weight": near_one(HIDDEN_SIZE),
    }
    for layer in range(num_layers):
        prefix = f"layers.{layer}."
        shapes = {
            "self_attn.q_proj": (num_heads * HEAD_DIM, HIDDEN_SIZE),
            "self_attn.k_proj": (num_kv_heads * HEAD_DIM, HIDDEN_SIZE),
            "self_attn.v_proj": (num_kv_heads * HEAD_DIM, HIDDEN_SIZE),
            "self_attn.o_proj": (HIDDEN_SIZE, num_heads * HEAD_DIM),
            "mlp.gate_proj": (inter, HIDDEN_SIZE),
            "mlp.up_proj": (inter, HIDDEN_SIZE),
            "mlp.down_proj": (HIDDEN_SIZE, inter),
        }
        for name, shape in shapes.items():
            weights[f"{prefix}{name}.weight"] = rand(*shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{prefix}{name}.weight"] = near_one(HIDDEN_SIZE)
        for name in ("self_attn.q_norm", "self_attn.k_norm"):
            weights[f"{prefix}{name}.weight"] = near_one(HEAD_DIM)
    save_file(weights, path / "model.safetensors")
    return str(path)
