# SPDX-License-Identifier: Apache-2.0
"""The support table's rows of target models, and how to find them in a config.

Trees are verified by vLLM's plain causal attention over a KV cache, as our backends
subclass it. Layers that bring another attention, or models that keep more than a cache,
would meet the tree in a worker only, so they are found here by what their config says,
or by name where it says nothing. `tests/compat/test_target_models.py` finds others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_dflash.schedule import layer_configs
from vllm_dflash.support_checks import Check, find_model, find_other_task
from vllm_dflash.support_rows import refused_row, tree_row

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_AREA = "Target model"

# The widest head that the kernels of tree attention have a tile for.
MAX_HEAD_SIZE = 256
# Keys of head sizes beside `head_dim`, and of the values that go with them.
_OTHER_HEADS = ("swa_head_dim", "global_head_dim")
_VALUE_HEADS = (("v_head_dim", "head_dim"), ("swa_v_head_dim", "swa_head_dim"))
# Their layers have a backend of their own, whatever --attention-backend says.
OWN_ATTENTION = (
    "HrmTextForCausalLM",
    "InklingForCausalLM",
    "InklingForConditionalGeneration",
    "MiniMaxM3SparseForCausalLM",
    "SarvamMLAForCausalLM",
)
# They have `get_model_state_cls`, which only a loaded model can be asked for.
OWN_STATE = (
    "DeepseekV41ForCausalLM",
    "DiffusionGemmaForBlockDiffusion",
    "LongcatFlashNgramForCausalLM",
    "Qwen4ExpForCausalLM",
    "Qwen4ExpForConditionalGeneration",
)


def find_architecture(*names: str) -> Check:
    """Find a model by the name of its class."""

    def check(config: VllmConfig) -> str | None:
        found = [name for name in config.model_config.architectures if name in names]
        return ", ".join(found) or None

    return check


def find_chunks(config: VllmConfig) -> str | None:
    size = config.model_config.attention_chunk_size
    return f"attention_chunk_size={size}" if size else None


def find_wide_heads(config: VllmConfig) -> str | None:
    """Find a head size without a tile, in any layer."""
    model = config.model_config
    if model.use_mla:
        return None
    # vLLM's is the largest of a model whose layers differ.
    sizes = [model.get_head_size()]
    for layer in layer_configs(model.hf_text_config):
        sizes += [getattr(layer, name, None) or 0 for name in _OTHER_HEADS]
    return f"head size {max(sizes)}" if max(sizes) > MAX_HEAD_SIZE else None


def find_unlike_values(config: VllmConfig) -> str | None:
    """Find values that are wider or narrower than their keys."""
    model = config.model_config
    if model.use_mla:
        return None
    for layer in layer_configs(model.hf_text_config):
        for value_key, head_key in _VALUE_HEADS:
            values = getattr(layer, value_key, None)
            heads = getattr(layer, head_key, None) or model.get_head_size()
            if values and values != heads:
                return f"{value_key}={values} and {head_key}={heads}"
    return None


def find_other_attention(config: VllmConfig) -> str | None:
    """Find layers that wrap the attention backend, or have one of their own."""
    text = config.model_config.hf_text_config
    found = []
    if (window := config.model_config.rswa_window) is not None:
        found.append(f"rswa_window={window}")
    if sinks := getattr(text, "param_sink_number", 0):
        found.append(f"param_sink_number={sinks}")
    if getattr(text, "is_causal", None) is False:
        found.append("is_causal=False")
    by_name = find_architecture(*OWN_ATTENTION)(config)
    return ", ".join(filter(None, [*found, by_name])) or None


TARGETS = (
    tree_row(_AREA, "decoder-only attention models", "dense and mixture of experts"),
    tree_row(
        _AREA,
        "quantised weights",
        "vLLM's own layers multiply a tree's rows: W8A8 integers tested on the CPU; "
        "fp8, AWQ, GPTQ and others not tested here",
    ),
    refused_row(
        _AREA,
        "models whose class in vLLM hands out no hidden states",
        "every DFlash draft reads them, and vLLM ends the start with 'Model does not "
        "support EAGLE3 interface'",
        "--model-impl transformers",
        None,
    ),
    refused_row(
        _AREA,
        "hybrid and attention-free models",
        "a recurrent state can't be committed along a path",
        "",
        find_model("is_hybrid", "is_attention_free"),
    ),
    refused_row(
        _AREA,
        "models with a state of their own",
        "only a plain KV cache can be committed along a path",
        "",
        find_architecture(*OWN_STATE),
    ),
    refused_row(
        _AREA,
        "multi-head latent attention",
        "there is no tree kernel for it",
        "",
        find_model("use_mla"),
    ),
    refused_row(
        _AREA,
        "chunked local attention",
        "its layers cut a batch into chunks by slot, a tree has depths",
        "",
        find_chunks,
    ),
    refused_row(
        _AREA,
        "another kind of attention in the model's layers",
        "tree attention stands in for plain causal attention: no prefix or sink tokens "
        "that all see, no reference windows, no sparse or bidirectional layers",
        "",
        find_other_attention,
    ),
    refused_row(
        _AREA,
        f"heads wider than {MAX_HEAD_SIZE}",
        "the tree kernels have no tile for them; one layer is enough, and Gemma 4's "
        "global layers have 512",
        "",
        find_wide_heads,
    ),
    refused_row(
        _AREA,
        "values of another width than their keys",
        "the tree kernels read both as rows of one width",
        "",
        find_unlike_values,
    ),
    refused_row(
        _AREA,
        "encoder-decoder models",
        "cross attention is untested with trees",
        "",
        find_model("is_encoder_decoder"),
    ),
    refused_row(
        _AREA,
        "multimodal models",
        "positions of several dimensions are not laid out by depth yet",
        "",
        find_model("is_multimodal_model", "uses_mrope"),
    ),
    refused_row(
        _AREA,
        "ALiBi",
        "its bias counts slots, a tree needs depths",
        "",
        find_model("uses_alibi"),
    ),
    refused_row(
        _AREA,
        "diffusion models",
        "they draft and verify in their own way",
        "",
        find_model("is_diffusion"),
    ),
    refused_row(
        _AREA,
        "pooling models",
        "they generate nothing to verify",
        "",
        find_other_task,
    ),
)
