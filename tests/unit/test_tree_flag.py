# SPDX-License-Identifier: Apache-2.0
"""Which attention gets a tree: our builders, and nothing that vLLM makes of them."""

import importlib

import pytest
from vllm.model_executor.layers.attention.chunked_local_attention import (
    create_chunked_local_attention_backend,
)
from vllm.model_executor.layers.attention.static_sink_attention import (
    create_static_sink_attention_backend,
)

from vllm_dflash.attention.metadata import TreeModelAttnMetadata
from vllm_dflash.attention.registry import CPU_TREE_BACKENDS, GPU_TREE_BACKENDS

BACKENDS = {**GPU_TREE_BACKENDS, **CPU_TREE_BACKENDS}


def backend_of(name):
    module, _, attribute = BACKENDS[name].rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def extra_arguments(builder_cls):
    """What the runner would hand to build(), for a step with a tree."""
    builder = object.__new__(builder_cls)
    return TreeModelAttnMetadata("tree").get_extra_attn_kwargs(builder, 1)


@pytest.mark.parametrize("name", BACKENDS)
def test_our_builders_get_the_tree(name):
    assert extra_arguments(backend_of(name).get_builder_cls()) == {"tree": "tree"}


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize(
    "wrap",
    [
        lambda backend: create_chunked_local_attention_backend(backend, 128),
        lambda backend: create_static_sink_attention_backend(backend, 16),
    ],
    ids=["chunked", "sinks"],
)
def test_what_vllm_makes_of_them_does_not(name, wrap):
    """Their build() takes no tree."""
    builder_cls = wrap(backend_of(name)).get_builder_cls()
    assert issubclass(builder_cls, backend_of(name).get_builder_cls())
    assert extra_arguments(builder_cls) == {}
    assert not builder_cls.takes_tree


@pytest.mark.parametrize("name", BACKENDS)
def test_no_backend_claims_batch_invariance(name):
    assert not backend_of(name).supports_batch_invariance()
