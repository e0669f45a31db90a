# SPDX-License-Identifier: Apache-2.0
"""Whether a draft's checkpoint is whole: its files, their format, every tensor.

vLLM does not track which tensors of a DFlash draft it has loaded, so a missing one
would stay uninitialised memory. Only the headers of the files are read.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_dflash.draft_fit import (
    LEAVE_IT_TO_VLLM,
    dflash_options,
    reads_target_layers,
    target_layer_ids,
)
from vllm_dflash.errors import option_error
from vllm_dflash.support_checks import TREE_DRAFT

if TYPE_CHECKING:
    from vllm.config import ModelConfig, SpeculativeConfig

Shape = tuple[int, ...]

_SAFETENSORS = ("auto", "hf", "safetensors", "fastsafetensors", "instanttensor")
_PICKLES = ("pt", "npcache")
# vLLM reads it beside the weights, with weights_only=True: no code in it can run.
_MASK_EMBEDDING = "mask_embedding.pt"
_INDEX = "model.safetensors.index.json"
# Other names of a tensor that vLLM's loader knows.
_RENAMED = {
    "midlayer.": "layers.0.",
    "encoder.output_norm_enc.": "hidden_norm.",
    "encoder.fc.": "fc.",
}
_FUSED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}
_MOST_NAMES = 4


def require_whole_draft(
    config: SpeculativeConfig, load_format: str, folder: Path
) -> None:
    """Refuse the checkpoint of a DFlash draft that vLLM could not load entirely.

    Args:
        config: Of the engine; says what the draft consists of.
        load_format: Of the draft; others than safetensors files are not looked into.
        folder: Where the draft's files are.

    Raises:
        ValueError: A file or a tensor is missing, damaged, a pickle, or of another
            shape.
    """
    draft = config.draft_model_config
    if TREE_DRAFT not in draft.architectures:
        return
    if not is_checked(load_format):
        return
    if load_format.lower() in _PICKLES:
        raise _pickled(draft.model, f"load_format {load_format}")
    shapes = _read_shapes(draft.model, find_weight_files(draft.model, folder))
    expected = expected_shapes(draft.hf_config, config.target_model_config)
    is_plain = (
        draft.quantization is None
        and getattr(draft.hf_config, "quantization_config", None) is None
    )
    missing = [
        name for name in expected if not _is_there(name, shapes, by_module=not is_plain)
    ]
    if missing:
        raise _incomplete(
            f"the draft {draft.model} lacks {len(missing)} of the {len(expected)} "
            f"tensors that its config asks for (missing are {_join(missing)})"
        )
    wrong = [
        f"{name} {list(shapes[name])} instead of {list(shape)}"
        for name, shape in expected.items()
        if is_plain and name in shapes and shapes[name] != shape
    ]
    if wrong:
        raise _incomplete(
            f"the draft {draft.model} has tensors of other shapes than its config and "
            f"the target ask for (got {_join(wrong)})"
        )


def is_checked(load_format: str) -> bool:
    """Whether a draft of this format is files that can be looked into."""
    return load_format.lower() in _SAFETENSORS + _PICKLES


def find_weight_files(model: str, folder: Path) -> list[Path]:
    """Return the safetensors files that vLLM would load.

    Raises:
        ValueError: There are none, only pickles, or not all that the index names.
    """
    files = sorted(folder.glob("*.safetensors"))
    index = folder / _INDEX
    if index.is_file():
        try:
            words = json.loads(index.read_text(encoding="utf-8"))
            named = set(words["weight_map"].values())
        except (KeyError, AttributeError, TypeError, ValueError) as error:
            raise _damaged(index, error) from error
        absent = sorted(named - {file.name for file in files})
        if absent:
            raise _incomplete(
                f"the draft {model} lacks weight files that {_INDEX} names (missing "
                f"are {_join(absent)})"
            )
        files = [file for file in files if file.name in named]
    if files:
        return files
    pickles = sorted(
        file.name
        for pattern in ("*.bin", "*.pt", "*.pth")
        for file in folder.glob(pattern)
        if file.name != _MASK_EMBEDDING
    )
    if pickles:
        raise _pickled(model, _join(pickles))
    raise _incomplete(f"the draft {model} has no weights (got no *.safetensors file)")


def expected_shapes(hf_config: Any, target: ModelConfig) -> dict[str, Shape]:
    """Return name and shape of every tensor that a DFlash draft must bring."""
    hidden, inner = hf_config.hidden_size, hf_config.intermediate_size
    heads, kv_heads = hf_config.num_attention_heads, hf_config.num_key_value_heads
    head_dim = getattr(hf_config, "head_dim", None) or hidden // heads
    options = dflash_options(hf_config)
    has_sinks = options.get(
        "attention_sink_bias", getattr(hf_config, "add_swa_attention_sink_bias", False)
    )
    layer: dict[str, Shape] = {
        "self_attn.q_proj.weight": (heads * head_dim, hidden),
        "self_attn.k_proj.weight": (kv_heads * head_dim, hidden),
        "self_attn.v_proj.weight": (kv_heads * head_dim, hidden),
        "self_attn.o_proj.weight": (hidden, heads * head_dim),
        "self_attn.q_norm.weight": (head_dim,),
        "self_attn.k_norm.weight": (head_dim,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    if getattr(hf_config, "attention_bias", False):
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            weight = layer[f"self_attn.{name}.weight"]
            layer[f"self_attn.{name}.bias"] = weight[:1]
    if has_sinks:
        layer["self_attn.attention_sink_bias"] = (heads,)
    shapes = {
        f"layers.{index}.{name}": shape
        for index in range(hf_config.num_hidden_layers)
        for name, shape in layer.items()
    }
    shapes |= {"hidden_norm.weight": (hidden,), "norm.weight": (hidden,)}
    target_hidden = target.get_hidden_size()
    if reads_target_layers(hf_config):
        shapes["fc.weight"] = (hidden, target_hidden * len(target_layer_ids(hf_config)))
    vocab_size = target.get_vocab_size()
    drafted = getattr(hf_config, "draft_vocab_size", None) or vocab_size
    if drafted != vocab_size:
        shapes["d2t"] = (drafted,)
    if drafted != vocab_size or hidden != target_hidden:
        shapes["lm_head.weight"] = (drafted, hidden)
    if hidden != target_hidden:
        shapes["embed_tokens.weight"] = (vocab_size, hidden)
    return shapes


def _read_shapes(model: str, files: Iterable[Path]) -> dict[str, Shape]:
    from safetensors import SafetensorError, safe_open

    shapes: dict[str, Shape] = {}
    for file in files:
        try:
            with safe_open(file, framework="numpy") as tensors:
                for name in tensors.keys():  # noqa: SIM118, no mapping
                    shape = tuple(tensors.get_slice(name).get_shape())
                    shapes[_vllm_name(name)] = shape
        except (SafetensorError, OSError) as error:
            raise _damaged(file, error) from error
    return shapes


def _vllm_name(name: str) -> str:
    for before, after in _RENAMED.items():
        name = name.replace(before, after)
    return name


def _is_there(name: str, shapes: dict[str, Shape], *, by_module: bool) -> bool:
    """Whether a tensor is in the checkpoint, or one that vLLM splits into it."""
    if name in shapes:
        return True
    module, _, leaf = name.rpartition(".")
    parent, _, last = module.rpartition(".")
    if last in _FUSED and f"{parent}.{_FUSED[last]}.{leaf}" in shapes:
        return True
    # Quantised weights have scales and packed values under names of their own.
    return by_module and any(other.startswith(f"{module}.") for other in shapes)


def _join(names: list[str]) -> str:
    rest = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {rest} more" if rest > 0 else "")


def _incomplete(wrong: str) -> ValueError:
    return option_error(
        wrong,
        "A safetensors checkpoint with every tensor of the draft is allowed",
        f'"model": with a complete copy of the draft, or {LEAVE_IT_TO_VLLM}',
    )


def _damaged(file: Path, error: Exception) -> ValueError:
    size = f"{file.stat().st_size} bytes, " if file.exists() else ""
    return _incomplete(
        f"the draft's file {file} can't be read (got {size}"
        f"{type(error).__name__}: {error})"
    )


def _pickled(model: str, got: str) -> ValueError:
    return option_error(
        f"the draft {model} has its weights in pickles (got {got}), which can hold "
        "code",
        "Weights in safetensors files are allowed",
        '"model": with a safetensors copy of the draft, made by someone you trust',
    )
