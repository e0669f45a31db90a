# SPDX-License-Identifier: Apache-2.0
"""Reasons in vLLM for what the support table refuses: failing, a row can change."""

import pytest
import torch

pytestmark = pytest.mark.compat


def test_graphs_by_adapters_leave_out_requests_without_one():
    """With --specialize-active-lora a kernel of a graph visits as many groups of rows.

    Rows without an adapter are a group, the first one, and are not counted when the
    graph is chosen: the last adapter of the batch is left out.
    """
    from vllm.lora.ops.triton_ops.lora_kernel_metadata import LoRAKernelMeta
    from vllm.lora.request import LoRARequest
    from vllm.v1.worker.gpu.lora_utils import (
        LoraState,
        get_num_active_loras_for_dispatch,
    )

    state = LoraState(4)
    state.add_request("adapted", 0, LoRARequest("adapter", 1, "/a/path"))
    state.add_request("plain", 1, None)
    chosen = get_num_active_loras_for_dispatch(
        object(), state, ["adapted", "plain"], dummy_run=False
    )
    meta = LoRAKernelMeta.make(4, 8, "cpu", captured_lora_counts=[1, 2, 4, 5])
    meta.prepare_tensors(torch.tensor([0, -1]))
    assert meta.active_lora_ids[0] == -1
    assert (chosen, int(meta.num_active_loras_cpu)) == (1, 2)
