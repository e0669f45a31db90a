# SPDX-License-Identifier: Apache-2.0
"""Explicit attention masks of one request's rows, for the CPU backend."""

from typing import Any

import torch

from vllm_dflash.tree.draft_tree import BITS_PER_WORD


def unpack_ancestors(
    # [num_nodes, num_words], int64
    words: torch.Tensor,
    num_nodes: int,
) -> torch.Tensor:
    """Ancestor bits as a [num_nodes, num_nodes] bool mask."""
    node = torch.arange(num_nodes)
    bits = words[:, node // BITS_PER_WORD] >> (node % BITS_PER_WORD)
    return (bits & 1).bool()


def attention_mask(
    metadata: Any,
    req: int,
    starts: list[int],
    seq_lens: list[int],
    sliding_window: int,
) -> torch.Tensor:
    """Rows of one request against its keys, [num_rows, seq_len] bool.

    The window counts visible keys, the row's own included, by rotary position: in a
    tree that is the depth, not the node index. ``sliding_window`` -1 means none.
    """
    num_rows, seq_len = starts[req + 1] - starts[req], seq_lens[req]
    first_row = seq_len - num_rows
    keys = torch.arange(seq_len)
    row_positions = keys[first_row:].clone()
    key_positions = keys
    if not metadata.causal:
        mask = torch.ones(num_rows, seq_len, dtype=torch.bool)
    else:
        mask = keys[None, :] <= row_positions[:, None]
        tree = getattr(metadata, "tree", None)
        num_nodes = 0
        if tree is not None and req < tree.num_verify_reqs:
            num_nodes = int(tree.tree_len[req])
        if num_nodes:
            ancestors = unpack_ancestors(
                tree.batch_ancestors[req, :num_nodes], num_nodes
            )
            base = seq_len - num_nodes
            mask[-num_nodes:, base:] = ancestors
            # A node's ancestors, itself included, number depth + 1.
            key_positions = keys.clone()
            key_positions[base:] = base + ancestors.sum(dim=1) - 1
            row_positions = key_positions[first_row:]
    if sliding_window > 0:
        distance = row_positions[:, None] - key_positions[None, :]
        # A non-causal row looks as far ahead as it looks back.
        mask = mask & (distance.abs() < sliding_window)
    return mask
