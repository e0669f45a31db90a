# SPDX-License-Identifier: Apache-2.0
"""Reasons in vLLM for what the support table refuses: failing, a row can change."""

import numpy as np
import pytest

pytestmark = pytest.mark.compat


def test_lora_is_told_of_one_row_of_logits_a_request():
    """Of a verify it would have to know every row; vLLM's chain fails on the CPU."""
    from vllm.v1.worker.gpu.lora_utils import LoraState

    state = LoraState(4)
    num_tokens = np.array([17, 17], dtype=np.int32)
    of_logits, of_tokens, _ = state.make_lora_inputs(
        ["a", "b"], np.array([0, 1]), num_tokens
    )
    assert len(of_tokens) == 34
    assert len(of_logits) == 2
