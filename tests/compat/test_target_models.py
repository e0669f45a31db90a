# SPDX-License-Identifier: Apache-2.0
"""vLLM's models with other attention, or more state, than a tree can be verified with.

The support table finds them by what their config says, or by name. A model that this
file does not know fails here: read its layers, then give it a row or a name.
"""

import ast
from functools import cache
from pathlib import Path

import pytest
import vllm

from vllm_dflash.support_targets import OWN_ATTENTION, OWN_STATE

pytestmark = pytest.mark.compat

PACKAGE = Path(vllm.__file__).parent
MODELS = ("vllm.models", "vllm.model_executor.models")
# Layers of vLLM that wrap a backend, or have one of their own.
OTHER_LAYERS = {
    "ChunkedLocalAttention",
    "CrossAttention",
    "MLAAttention",
    "MultiHeadLatentAttentionWrapper",
    "PrefillPrefixLMAttention",
    "RSWAAttention",
    "StaticSinkAttention",
}
MLA = "use_mla"
HYBRID = "is_hybrid"
# Text models with such layers that need no name: what of their config is refused.
FOUND_BY_CONFIG = {
    "AXK1ForCausalLM": MLA,
    "BailingMoeV2_5ForCausalLM": HYBRID,
    "BailingMoeV3ForCausalLM": HYBRID,
    "DeepseekForCausalLM": "rswa_window",
    "DeepseekV2ForCausalLM": MLA,
    "DeepseekV32ForCausalLM": MLA,
    "DeepseekV3ForCausalLM": MLA,
    "DeepseekV4ForCausalLM": MLA,
    "Glm4MoeLiteForCausalLM": MLA,
    "Glm5NextForCausalLM": MLA,
    "GlmMoeDsaForCausalLM": MLA,
    "HYV4ForCausalLM": MLA,
    "KimiLinearForCausalLM": MLA,
    "Llama4ForCausalLM": "attention_chunk_size",
    "LongcatFlashForCausalLM": MLA,
    "MiMoV2FlashForCausalLM": "v_head_dim",
    "MiMoV2ForCausalLM": "v_head_dim",
    "MistralLarge3ForCausalLM": MLA,
    "PanguEmbeddedForCausalLM": "param_sink_number",
    "PanguProMoEV2ForCausalLM": "param_sink_number",
    "PanguUltraMoEForCausalLM": MLA,
}
# Plain layers, in a module that has other ones too.
PLAIN = {"SarvamMoEForCausalLM"}


@cache
def tree_of(path):
    return ast.parse(path.read_text(encoding="utf-8"))


def path_of(module):
    path = PACKAGE.parent.joinpath(*module.split("."))
    for each in (path.with_suffix(".py"), path / "__init__.py"):
        if each.exists():
            return each
    return None


@cache
def imports_of(path):
    """Files of other models that a file imports from."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    package = parts[:-1]
    found = set()
    for node in ast.walk(tree_of(path)):
        if not isinstance(node, ast.ImportFrom):
            continue
        base = node.module or ""
        if node.level:
            above = package[: len(package) - node.level + 1]
            base = ".".join([*above, *filter(None, [node.module])])
        for module in (base, *(f"{base}.{name.name}" for name in node.names)):
            # Other platforms have models of the same names.
            if module.startswith(MODELS) and not {"amd", "xpu"} & {*module.split(".")}:
                found.add(path_of(module))
    return found - {None, path}


@cache
def marks_of(path):
    """What of a file is not plain attention over a KV cache."""
    found = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.FunctionDef):
            found |= {node.name} & {"get_attn_backend", "get_model_state_cls"}
        elif isinstance(node, ast.Name):
            found |= {node.id} & OTHER_LAYERS
        elif isinstance(node, ast.Call):
            found |= {k.arg for k in node.keywords} & {"attn_backend"}
    return found


@cache
def marks_of_model(module):
    todo, seen = [path_of(module)], set()
    while todo:
        path = todo.pop()
        if path not in seen:
            seen.add(path)
            todo += imports_of(path)
    return set().union(*map(marks_of, seen))


def models(*tables):
    """Yield the architectures of vLLM's registry and the modules that have them."""
    registry = tree_of(PACKAGE / "model_executor/models/registry.py")
    for node in registry.body:
        if not isinstance(node, ast.Assign) or node.targets[0].id not in tables:
            continue
        for name, place in zip(node.value.keys, node.value.values, strict=True):
            if isinstance(place, ast.Tuple):
                module = place.elts[0].value
                prefix = "" if module.startswith("vllm.") else MODELS[1] + "."
                yield name.value, prefix + module


def test_every_text_model_with_other_attention_is_known():
    found = {
        name
        for name, module in models("_TEXT_GENERATION_MODELS")
        if marks_of_model(module) - {"get_model_state_cls"}
    }
    assert found - {*OWN_STATE} == {*OWN_ATTENTION, *FOUND_BY_CONFIG, *PLAIN}


def test_every_model_with_a_state_of_its_own_is_known():
    found = {
        name
        for name, module in models("_TEXT_GENERATION_MODELS", "_MULTIMODAL_MODELS")
        if "get_model_state_cls" in marks_of_model(module)
    }
    assert found == {*OWN_STATE}


def test_states_are_chosen_by_what_the_table_asks_for():
    """vLLM may choose another state by something else than a method of the model."""
    source = (PACKAGE / "v1/worker/gpu/model_states/__init__.py").read_text()
    function = next(
        node
        for node in ast.parse(source).body
        if getattr(node, "name", None) == "resolve_model_state_cls"
    )
    conditions = [
        ast.unparse(node.test)
        for node in ast.walk(function)
        if isinstance(node, ast.If)
    ]
    assert len(conditions) == 4
    for word, condition in zip(
        ("get_model_state_cls", "CrossAttention", "ENCODER_ONLY", "is_hybrid"),
        conditions,
        strict=True,
    ):
        assert word in condition
