# SPDX-License-Identifier: Apache-2.0
"""The attention backend is settled before the workers exist."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_configs import engine, named, pretend_cuda

from vllm_dflash import support
from vllm_dflash.selection import select_backend


@pytest.fixture
def cuda(monkeypatch):
    """A GPU's platform, whatever this machine is."""
    return pretend_cuda(monkeypatch)


def candidates(*names):
    """What the platform's ranking returns, worst first."""
    return [
        SimpleNamespace(backend=named(name), priority=place)
        for place, name in reversed(list(enumerate(names)))
    ]


@pytest.fixture
def ranking(cuda, monkeypatch):
    """Let vLLM rank backends without a GPU; returns a setter of the ranking."""
    import contextlib

    import torch
    import vllm.config

    cuda.get_device_capability = lambda: (9, 0)
    asked = []

    def set_ranking(*names):
        def get_valid_backends(device_capability, attn_selector_config, num_heads):
            asked.append(attn_selector_config)
            return candidates(*names), {}

        cuda.get_valid_backends = get_valid_backends
        return asked

    monkeypatch.setattr(vllm.config, "set_current_vllm_config", contextlib.nullcontext)
    cuda.config = engine()
    model = cuda.config.model_config
    model.get_head_size = lambda: 128
    model.dtype = torch.bfloat16
    model.get_sliding_window = lambda: 512
    model.get_num_attention_heads = lambda parallel_config: 32
    cache = cuda.config.cache_config
    cache.block_size, cache.user_specified_block_size = 16, False
    return set_ranking


def test_vllms_choice_stands_if_it_has_tree_attention(cuda, ranking):
    asked = ranking("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN")
    assert select_backend(cuda.config) == "FLASH_ATTN"
    assert cuda.config.attention_config.backend is None
    assert (asked[0].head_size, asked[0].has_sliding_window) == (128, True)
    assert asked[0].block_size is None


@pytest.mark.parametrize("better", ["FLASH_ATTN", "TRITON_ATTN"])
def test_best_backend_with_tree_attention_is_named(cuda, ranking, better):
    ranking("FLASHINFER", better, "FLEX_ATTENTION")
    assert select_backend(cuda.config) == better
    assert cuda.config.attention_config.backend.name == better


@pytest.mark.parametrize("names", [(), ("FLASHINFER", "FLEX_ATTENTION")])
def test_no_backend_with_tree_attention(cuda, ranking, names):
    ranking(*names)
    refusal = select_backend(cuda.config)
    assert isinstance(refusal, support.Refusal)
    assert "TRITON_ATTN" in refusal.reason
    assert cuda.config.attention_config.backend is None


def test_named_backend_is_not_ranked(cuda):
    config = engine(attention_config__backend=named("TRITON_ATTN"))
    assert select_backend(config) == "TRITON_ATTN"


def test_ranking_that_fails_is_left_to_the_workers(cuda, ranking):
    cuda.get_valid_backends = None
    assert select_backend(cuda.config) is None


def test_backend_of_the_cpu(cuda):
    cuda.is_cpu = lambda: True
    assert select_backend(engine()) == "CPU_ATTN"


def test_ranking_asks_vllm_with_words_it_knows():
    import ast

    import vllm

    path = Path(vllm.__file__).parent / "platforms/cuda.py"
    functions = {
        node.name: [argument.arg for argument in node.args.args]
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef)
    }
    assert functions["get_valid_backends"] == [
        "cls",
        "device_capability",
        "attn_selector_config",
        "num_heads",
    ]
