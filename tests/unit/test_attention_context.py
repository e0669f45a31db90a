# SPDX-License-Identifier: Apache-2.0
"""The scratch of tree attention is enough for every layer of a model."""

import itertools
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm")

from vllm_dflash.attention import metadata
from vllm_dflash_kernels.tree_attention import TreeAttentionWorkspace

# Head size -> rows: small heads have wider tiles.
ROWS = {64: 4000, 128: 2000, 256: 1500}


@pytest.mark.parametrize("order", itertools.permutations(ROWS))
def test_room_for_every_head_size_in_any_order(order, monkeypatch):
    def allocate(head_size, device, *, dtype):
        cpu = torch.device("cpu")
        return TreeAttentionWorkspace.of_rows(ROWS[head_size], head_size, cpu)

    monkeypatch.setattr(metadata.TreeAttentionWorkspace, "allocate", allocate)
    config = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=64),
        compilation_config=SimpleNamespace(static_forward_context={}),
    )
    context = metadata.AttentionContext(config, SimpleNamespace())
    for head_size in order:
        context.reserve_workspace(head_size, torch.bfloat16, torch.device("cuda"))
    assert context.workspace.lse.numel() == max(ROWS.values())
    assert context.workspace.partial.numel() == max(h * n for h, n in ROWS.items())
