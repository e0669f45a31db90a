# SPDX-License-Identifier: Apache-2.0
"""Sizes of a draft, from and to the config.json of the z-lab layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm_dflash.errors import option_error
from vllm_dflash_training.config import DraftOptions

ARCHITECTURE = "DFlashDraftModel"
# Of a new draft that names no number.
NUM_LAYERS = 5


@dataclass(frozen=True)
class DraftShape:
    """What a draft is built from."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    rope_theta: float
    eps: float

    @property
    def depth(self) -> int:
        """Number of drafted tokens of a block."""
        return self.block_size - 1


def spread_layers(num_target_layers: int, num_features: int) -> list[int]:
    """Spread layers evenly from the second to the third-last, as DFlash does."""
    first, last = 1, num_target_layers - 3
    if num_features == 1 or last <= first:
        return [max(0, min(first, num_target_layers - 1))]
    step = (last - first) / (num_features - 1)
    return sorted({round(first + i * step) for i in range(num_features)})


def new_draft_config(target: Any, options: DraftOptions) -> dict[str, Any]:
    """Return the config of a new draft with the target's widths.

    Args:
        target: Its config of transformers.
        options: Depth, layers and ids.
    """
    num_layers = options.num_layers or NUM_LAYERS
    layers = options.target_layer_ids
    if layers is None:
        layers = spread_layers(target.num_hidden_layers, options.num_features)
    heads = target.num_attention_heads
    head_dim = getattr(target, "head_dim", None) or target.hidden_size // heads
    rope = getattr(target, "rope_parameters", None) or {}
    theta = rope.get("rope_theta") or getattr(target, "rope_theta", 10000.0)
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "qwen3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "block_size": options.block_size,
        "bos_token_id": _first(target.bos_token_id),
        "eos_token_id": _first(target.eos_token_id),
        "dflash_config": {
            "mask_token_id": options.mask_token_id,
            "target_layer_ids": layers,
        },
        "head_dim": head_dim,
        "hidden_act": "silu",
        "hidden_size": target.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": target.intermediate_size,
        "layer_types": ["full_attention"] * num_layers,
        "max_position_embeddings": target.max_position_embeddings,
        "max_window_layers": num_layers,
        "num_attention_heads": heads,
        "num_hidden_layers": num_layers,
        "num_key_value_heads": target.num_key_value_heads,
        "num_target_layers": target.num_hidden_layers,
        "rms_norm_eps": target.rms_norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "rope_theta": theta,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": target.vocab_size,
    }


def shape_from_config(config: dict[str, Any], target: Any) -> DraftShape:
    """Read a draft's config; refuse what this recipe can't train.

    Args:
        config: The draft's config.json.
        target: The target's config of transformers.

    Raises:
        ValueError: A feature of the draft is not built here, or it is made for
            another target.
    """
    options = config.get("dflash_config") or {}
    block_size = config.get("block_size") or options.get("block_size")
    rope = config.get("rope_parameters") or {}
    heads = config["num_attention_heads"]
    layer_types = set(config.get("layer_types") or ["full_attention"])
    unsupported = {
        "architectures": config.get("architectures") != [ARCHITECTURE],
        "attention_bias": bool(config.get("attention_bias")),
        "layer_types": layer_types != {"full_attention"},
        "rope_parameters": rope.get("rope_type", "default") != "default",
        "draft_vocab_size": config.get("draft_vocab_size")
        not in (None, target.vocab_size),
        "dflash_config": bool(set(options) - {"mask_token_id", "target_layer_ids"}),
        "block_size": not isinstance(block_size, int) or block_size < 2,
        "hidden_size": config["hidden_size"] != target.hidden_size,
        "vocab_size": config["vocab_size"] != target.vocab_size,
        "target_layer_ids": not _are_layers(
            options.get("target_layer_ids"), target.num_hidden_layers
        ),
        "mask_token_id": not isinstance(options.get("mask_token_id"), int)
        or not 0 <= options["mask_token_id"] < target.vocab_size,
    }
    wrong = [name for name, is_wrong in unsupported.items() if is_wrong]
    if wrong:
        got = config.get(wrong[0], options.get(wrong[0]))
        raise option_error(
            f"the draft's {', '.join(wrong)} can't be trained here (got {wrong[0]} "
            f"{got!r})",
            "Plain DFlash drafts with full attention, the target's width and "
            "vocabulary, and ascending target_layer_ids are allowed",
            "draft.init_from: null, or another draft",
        )
    return DraftShape(
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=config["num_key_value_heads"],
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        vocab_size=config["vocab_size"],
        block_size=block_size,
        mask_token_id=options["mask_token_id"],
        target_layer_ids=tuple(options["target_layer_ids"]),
        # vLLM's default where neither is given.
        rope_theta=float(rope.get("rope_theta") or config.get("rope_theta") or 1e6),
        eps=config["rms_norm_eps"],
    )


def _are_layers(layers: Any, num_target_layers: int) -> bool:
    return (
        isinstance(layers, list)
        and bool(layers)
        and all(isinstance(i, int) and 0 <= i < num_target_layers for i in layers)
        and layers == sorted(set(layers))
    )


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, list) else value
