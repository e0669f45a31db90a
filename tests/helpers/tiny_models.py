# SPDX-License-Identifier: Apache-2.0
"""Tiny random targets and DFlash drafts, written as ordinary checkpoints.

Weights are untied and wide, so that greedy text does not collapse to one token and
hide errors.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

VOCAB_SIZE = 512
DRAFT_VOCAB_SIZE = 200
HIDDEN_SIZE = 64
HEAD_DIM = 64
NUM_LAYERS = 3
BLOCK_SIZE = 8
MASK_TOKEN = 5
MAX_LEN = 1024

DRAFT_LAYERS = 2
DRAFT_HEADS = 4
DRAFT_KV_HEADS = 2
TARGET_LAYER_IDS = [0, 1]


def write_target(
    path: Path,
    *,
    family: str = "Llama",
    sliding_window: int | None = None,
    seed: int = 0,
    **config_overrides: Any,
) -> str:
    """A 3-layer decoder of a family of transformers, Llama or another."""
    import transformers

    config: dict[str, Any] = dict(
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
    if sliding_window is not None:
        config["sliding_window"] = sliding_window
    config.update(config_overrides)
    torch.manual_seed(seed)
    model_cls = getattr(transformers, f"{family}ForCausalLM")
    model = model_cls(model_cls.config_class(**config)).float()
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            parameter.data = near_one(parameter.shape[0], generator)
        if name.endswith("self_attn.sinks"):
            # As large as the best scores: a head that leaves its sink out shows.
            parameter.data = torch.randn(parameter.shape, generator=generator) * 4
    model.save_pretrained(path)
    return str(path)


def near_one(size: int, generator: torch.Generator) -> torch.Tensor:
    """Norm weights; not all ones, so that using another layer's weight shows."""
    return 1 + torch.randn(size, generator=generator) * 0.3


def write_draft(path: Path, *, seed: int = 1, **config_overrides: Any) -> str:
    """A 2-layer DFlash draft in the z-lab layout, sharing embedding and lm_head."""
    path.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = dict(
        **_draft_decoder_config(),
        architectures=["DFlashDraftModel"],
        block_size=BLOCK_SIZE,
        num_target_layers=NUM_LAYERS,
        dflash_config=dict(mask_token_id=MASK_TOKEN, target_layer_ids=TARGET_LAYER_IDS),
    )
    config.update(config_overrides)
    (path / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(seed)
    save_file(_draft_weights(config, generator), path / "model.safetensors")
    return str(path)


def write_speculators_draft(
    path: Path, *, target: str, seed: int = 2, **config_overrides: Any
) -> str:
    """The same decoder in the layout of vllm-project/speculators.

    It has its own embedding and an lm_head over a part of the target's vocabulary;
    `d2t` holds the distance from each of its ids to the target's id.
    """
    path.mkdir(parents=True, exist_ok=True)
    decoder = _draft_decoder_config()
    config: dict[str, Any] = dict(
        architectures=["DFlashSpeculator"],
        speculators_model_type="dflash",
        speculators_config=dict(
            algorithm="dflash",
            default_proposal_method="greedy",
            proposal_methods=[
                dict(proposal_type="greedy", speculative_tokens=BLOCK_SIZE - 1)
            ],
            verifier=dict(architectures=["LlamaForCausalLM"], name_or_path=target),
        ),
        transformer_layer_config=decoder,
        draft_vocab_size=DRAFT_VOCAB_SIZE,
        block_size=BLOCK_SIZE,
        mask_token_id=MASK_TOKEN,
        aux_hidden_state_layer_ids=[i + 1 for i in TARGET_LAYER_IDS],
        tie_word_embeddings=False,
        dtype="float32",
    )
    config.update(config_overrides)
    (path / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randperm(VOCAB_SIZE, generator=generator)[:DRAFT_VOCAB_SIZE]
    ids = ids.sort().values
    in_draft = torch.zeros(VOCAB_SIZE, dtype=torch.bool)
    in_draft[ids] = True
    weights = {
        **_draft_weights(decoder, generator),
        "embed_tokens.weight": torch.randn(
            VOCAB_SIZE, HIDDEN_SIZE, generator=generator
        ),
        "lm_head.weight": torch.randn(
            DRAFT_VOCAB_SIZE, HIDDEN_SIZE, generator=generator
        ),
        "d2t": ids - torch.arange(DRAFT_VOCAB_SIZE),
        "t2d": in_draft,
    }
    save_file(weights, path / "model.safetensors")
    return str(path)


def _draft_decoder_config() -> dict[str, Any]:
    return dict(
        model_type="qwen3",
        hidden_size=HIDDEN_SIZE,
        intermediate_size=128,
        num_hidden_layers=DRAFT_LAYERS,
        num_attention_heads=DRAFT_HEADS,
        num_key_value_heads=DRAFT_KV_HEADS,
        head_dim=HEAD_DIM,
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=MAX_LEN,
        rope_theta=10000.0,
        rms_norm_eps=1e-6,
        attention_bias=False,
        tie_word_embeddings=False,
        hidden_act="silu",
        dtype="float32",
        bos_token_id=1,
        eos_token_id=2,
    )


def _draft_weights(
    config: dict[str, Any], generator: torch.Generator
) -> dict[str, torch.Tensor]:
    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.2

    inter = config["intermediate_size"]
    weights = {
        "fc.weight": rand(HIDDEN_SIZE, HIDDEN_SIZE * len(TARGET_LAYER_IDS)),
        "hidden_norm.weight": near_one(HIDDEN_SIZE, generator),
        "norm.weight": near_one(HIDDEN_SIZE, generator),
    }
    options = config.get("dflash_config", {})
    for layer in range(DRAFT_LAYERS):
        prefix = f"layers.{layer}."
        shapes = {
            "self_attn.q_proj": (DRAFT_HEADS * HEAD_DIM, HIDDEN_SIZE),
            "self_attn.k_proj": (DRAFT_KV_HEADS * HEAD_DIM, HIDDEN_SIZE),
            "self_attn.v_proj": (DRAFT_KV_HEADS * HEAD_DIM, HIDDEN_SIZE),
            "self_attn.o_proj": (HIDDEN_SIZE, DRAFT_HEADS * HEAD_DIM),
            "mlp.gate_proj": (inter, HIDDEN_SIZE),
            "mlp.up_proj": (inter, HIDDEN_SIZE),
            "mlp.down_proj": (HIDDEN_SIZE, inter),
        }
        for name, shape in shapes.items():
            weights[f"{prefix}{name}.weight"] = rand(*shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{prefix}{name}.weight"] = near_one(HIDDEN_SIZE, generator)
        for name in ("self_attn.q_norm", "self_attn.k_norm"):
            weights[f"{prefix}{name}.weight"] = near_one(HEAD_DIM, generator)
        if options.get("attention_sink_bias"):
            weights[f"{prefix}self_attn.attention_sink_bias"] = rand(DRAFT_HEADS) * 10
    return weights


def quantise(path: str) -> str:
    """Quantise a target's linear layers in place to W8A8, as compressed-tensors does.

    Integers of eight bits: weights a channel, activations a token. vLLM takes them with
    fp32 around; its fp8, AWQ and GPTQ ask for half precision.
    """
    folder = Path(path)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        scale = tensors[name].abs().amax(1, keepdim=True) / 127
        tensors[name] = (tensors[name] / scale).round().to(torch.int8)
        tensors[f"{name}_scale"] = scale
    save_file(tensors, folder / "model.safetensors")
    integers = dict(num_bits=8, type="int", symmetric=True)
    group = dict(
        targets=["Linear"],
        weights=integers | dict(strategy="channel"),
        input_activations=integers | dict(strategy="token", dynamic=True),
    )
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = dict(
        quant_method="compressed-tensors",
        format="int-quantized",
        config_groups=dict(group_0=group),
        ignore=["lm_head"],
    )
    (folder / "config.json").write_text(json.dumps(config))
    return path
