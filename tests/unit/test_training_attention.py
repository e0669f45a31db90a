# SPDX-License-Identifier: Apache-2.0
"""Both attentions of the training see the same keys."""

import pytest
import torch
import training_runs  # noqa: F401  (puts the package on the path)

from vllm_dflash_training.attention import FlexAttention, SdpaAttention


def test_flex_attention_sees_what_the_dense_mask_says():
    generator = torch.Generator().manual_seed(0)
    seqs, blocks, block, context = 2, 16, 8, 256
    flex = FlexAttention(seqs, blocks, context, block, torch.device("cpu"))
    dense = SdpaAttention(block)
    for low, high in ((0, 256), (0, 3), (200, 256), (127, 130)):
        anchors = torch.randint(low, high, (seqs, blocks), generator=generator)
        anchors = anchors.sort(1).values
        query = torch.randn(seqs, 6, blocks * block, 16, generator=generator)
        key, value = torch.randn(
            2, seqs, 2, context + blocks * block, 16, generator=generator
        )
        got = flex.attend(query, key, value, flex.prepare(anchors, context))
        mask = dense.prepare(anchors, context)
        expected = dense.attend(query, key, value, mask)
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_lengths_that_flex_attention_cannot_tile_are_refused():
    with pytest.raises(ValueError, match="training.attention: sdpa"):
        FlexAttention(1, 16, 100, 8, torch.device("cpu"))
