# SPDX-License-Identifier: Apache-2.0
"""Turn the target's GGUF into a Hugging Face model directory that vLLM serves.

Weights are dequantised to fp32 with the ``gguf`` library and rounded once to bf16.
The Llama export permutes the rows of the query and key projections for interleaved
rotary embeddings; the conversion undoes it. Every byte written depends on the GGUF
alone, so the weights have one known checksum.
"""

import hashlib
import json
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_dflash.demo.fetch import (
    DISTRIBUTION,
    DISTRIBUTION_VERSION,
    GGUF_SHA256,
    Log,
    sha256_of,
)
from vllm_dflash.demo.tokenizer import tokenizer_files

if TYPE_CHECKING:
    import numpy as np
    import torch

MODEL_NAME = "SmolLM2-135M-Instruct"
WEIGHTS_NAME = "model.safetensors"
RECORD_NAME = "conversion.json"
# Of names and bf16 bytes in name order, so that it does not depend on how the
# installed safetensors lays out a file.
TENSORS_SHA256 = "8f747ddf5837dcf59da6dc8b2af189633f0511ca050653bbec928baf0144a87b"

_GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.weight")


class ConversionError(RuntimeError):
    """The GGUF is not what this conversion knows."""


def is_converted(directory: Path) -> bool:
    """Return whether ``directory`` holds a complete conversion with intact weights."""
    record_path = directory / RECORD_NAME
    if not record_path.exists():
        return False
    try:
        record = json.loads(record_path.read_text(encoding="utf-8"))
        return record["tensors_sha256"] == TENSORS_SHA256 and all(
            sha256_of(directory / name) == digest
            for name, digest in record["sha256"].items()
        )
    except (KeyError, TypeError, ValueError, FileNotFoundError):
        return False


def convert(gguf_path: Path, directory: Path, log: Log) -> None:
    """Write the model directory: weights, configuration, tokenizer, chat template.

    The directory appears under its name only when complete. A file
    ``conversion.json`` records the source and the checksum of every other file. The
    caller holds ``fetch.locked``.

    Raises:
        ConversionError: an unknown tensor, or weights other than the known ones.
    """
    import gguf
    from safetensors.torch import save_file

    reader = gguf.GGUFReader(gguf_path)
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    staging = directory.with_name(f"{directory.name}.partial")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    try:
        state_dict = load_state_dict(reader, metadata, log)
        digest = tensors_sha256(state_dict)
        if digest != TENSORS_SHA256:
            raise ConversionError(
                f"the dequantised tensors have SHA-256 {digest}, expected "
                f"{TENSORS_SHA256}: the installed gguf dequantises differently from "
                "the version this was tested with. Type: pip install gguf==0.19.0"
            )
        config = model_config(metadata, tied="lm_head.weight" not in state_dict)
        _write_json(staging / "config.json", config)
        _write_json(staging / "generation_config.json", generation_config(metadata))
        for name, text in tokenizer_files(metadata).items():
            (staging / name).write_text(text, encoding="utf-8")
        log(f"Writing {WEIGHTS_NAME}")
        save_file(state_dict, staging / WEIGHTS_NAME, metadata={"format": "pt"})
        files = {path.name: sha256_of(path) for path in sorted(staging.iterdir())}
        _write_json(staging / RECORD_NAME, _record(metadata, files))
        shutil.rmtree(directory, ignore_errors=True)
        staging.replace(directory)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def hf_name(gguf_name: str) -> str:
    """Return the Hugging Face parameter name of a Llama GGUF tensor."""
    if gguf_name in _GLOBAL_NAMES:
        return _GLOBAL_NAMES[gguf_name]
    match = _LAYER_TENSOR.fullmatch(gguf_name)
    if match is None or match[2] not in _LAYER_NAMES:
        raise ConversionError(f"unknown tensor {gguf_name!r} in the GGUF")
    return f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.weight"


def undo_rotary_permutation(weight: "np.ndarray", num_heads: int) -> "np.ndarray":
    """Restore the row order of a query or key projection.

    The export stores each head's rotary pairs interleaved, ``(0, d/2, 1, d/2 + 1,
    ...)``; Hugging Face keeps the two halves of a head apart.
    """
    rows, columns = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def model_config(metadata: dict[str, Any], *, tied: bool) -> dict[str, Any]:
    """Return ``config.json`` of the Llama model that the GGUF metadata describe."""
    architecture = metadata["general.architecture"]
    if architecture != "llama":
        raise ConversionError(f"expected a llama GGUF, got {architecture!r}")
    hidden_size = metadata["llama.embedding_length"]
    num_heads = metadata["llama.attention.head_count"]
    epsilon = metadata["llama.attention.layer_norm_rms_epsilon"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": metadata["llama.vocab_size"],
        "hidden_size": hidden_size,
        "intermediate_size": metadata["llama.feed_forward_length"],
        "num_hidden_layers": metadata["llama.block_count"],
        "num_attention_heads": num_heads,
        "num_key_value_heads": metadata["llama.attention.head_count_kv"],
        "head_dim": hidden_size // num_heads,
        "max_position_embeddings": metadata["llama.context_length"],
        # The GGUF holds the epsilon in fp32 (9.999999747378752e-06).
        "rms_norm_eps": float(f"{epsilon:.6g}"),
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": metadata["llama.rope.freq_base"],
        },
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        **generation_config(metadata),
    }


def generation_config(metadata: dict[str, Any]) -> dict[str, Any]:
    """Return ``generation_config.json``: the special token ids, no sampling wishes."""
    return {
        "bos_token_id": metadata["tokenizer.ggml.bos_token_id"],
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
        "pad_token_id": metadata["tokenizer.ggml.padding_token_id"],
    }


def load_state_dict(
    reader: Any, metadata: dict[str, Any], log: Log
) -> dict[str, "torch.Tensor"]:
    """Return Hugging Face name -> bf16 tensor for every tensor of the GGUF."""
    import torch
    from gguf.quants import dequantize

    heads = {
        "attn_q": metadata["llama.attention.head_count"],
        "attn_k": metadata["llama.attention.head_count_kv"],
    }
    log(f"Dequantising {len(reader.tensors)} tensors to bf16")
    state_dict = {}
    for tensor in reader.tensors:
        weight = dequantize(tensor.data, tensor.tensor_type)
        match = _LAYER_TENSOR.fullmatch(tensor.name)
        if match is not None and match[2] in heads:
            weight = undo_rotary_permutation(weight, heads[match[2]])
        # The copy also serves tensors that alias the read-only memory map.
        state_dict[hf_name(tensor.name)] = torch.tensor(weight, dtype=torch.bfloat16)
    return state_dict


def tensors_sha256(state_dict: dict[str, "torch.Tensor"]) -> str:
    """Return the SHA-256 over names and bf16 bytes of all tensors, in name order."""
    import torch

    digest = hashlib.sha256()
    for name, tensor in sorted(state_dict.items()):
        digest.update(f"{name} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.contiguous().view(torch.uint16).numpy())
    return digest.hexdigest()


def _record(metadata: dict[str, Any], files: dict[str, str]) -> dict[str, Any]:
    return {
        "model": MODEL_NAME,
        "license": metadata["general.license"],
        "source": f"{DISTRIBUTION} {DISTRIBUTION_VERSION}",
        "source_sha256": GGUF_SHA256,
        "tensors_sha256": TENSORS_SHA256,
        "sha256": files,
    }


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
