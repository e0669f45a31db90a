# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters for the tiny targets, written as PEFT writes them.

Large enough to change the greedy text from its first tokens on.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tiny_models import HEAD_DIM, HIDDEN_SIZE, NUM_LAYERS, VOCAB_SIZE

RANK = 4
_EMBEDDING = "model.embed_tokens"

# Module -> (rows in, rows out) of a tiny target's projections.
_SHAPES = {
    "self_attn.q_proj": (HIDDEN_SIZE, 4 * HEAD_DIM),
    "self_attn.k_proj": (HIDDEN_SIZE, 2 * HEAD_DIM),
    "self_attn.v_proj": (HIDDEN_SIZE, 2 * HEAD_DIM),
    "self_attn.o_proj": (4 * HEAD_DIM, HIDDEN_SIZE),
    "mlp.gate_proj": (HIDDEN_SIZE, 128),
    "mlp.up_proj": (HIDDEN_SIZE, 128),
    "mlp.down_proj": (128, HIDDEN_SIZE),
}


def write_adapter(
    path: Path,
    *,
    seed: int,
    layers: bool = True,
    lm_head: bool = False,
    embedding: bool = False,
) -> str:
    """An adapter on the projections of every layer, the lm_head or the embedding."""
    path.mkdir(parents=True, exist_ok=True)
    modules = {}
    if layers:
        for layer in range(NUM_LAYERS):
            for name, shape in _SHAPES.items():
                modules[f"model.layers.{layer}.{name}"] = shape
    if lm_head:
        modules["lm_head"] = (HIDDEN_SIZE, VOCAB_SIZE)
    if embedding:
        modules[_EMBEDDING] = (VOCAB_SIZE, HIDDEN_SIZE)
    config = dict(
        peft_type="LORA",
        task_type="CAUSAL_LM",
        r=RANK,
        lora_alpha=2 * RANK,
        lora_dropout=0.0,
        bias="none",
        target_modules=sorted({name.rpartition(".")[2] for name in modules}),
    )
    (path / "adapter_config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, (size_in, size_out) in modules.items():
        names = (
            ("lora_embedding_A", "lora_embedding_B")
            if name == _EMBEDDING
            else ("lora_A.weight", "lora_B.weight")
        )
        shapes = (RANK, size_in), (size_out, RANK)
        for part, shape in zip(names, shapes, strict=True):
            weights[f"base_model.model.{name}.{part}"] = (
                torch.randn(*shape, generator=generator) * 0.2
            )
    save_file(weights, path / "adapter_model.safetensors")
    return str(path)


def lora_request(path: str, number: int) -> Any:
    """What a request with the adapter carries."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(f"adapter-{number}", number, path)
