# SPDX-License-Identifier: Apache-2.0
"""Preparation of a verify step, one request at a time."""

from __future__ import annotations

import torch


def prepare_tree_step_reference(
    slots: torch.Tensor,
    query_start_loc: torch.Tensor,
    cu_num_logits: torch.Tensor,
    num_reqs: int,
    num_reqs_padded: int,
    depths: torch.Tensor,
    ancestors: torch.Tensor,
    num_nodes: torch.Tensor,
    positions: torch.Tensor,
    batch_ancestors: torch.Tensor,
    tree_len: torch.Tensor,
    prefix_len: torch.Tensor,
) -> None:
    slot_list = slots[:num_reqs].tolist()
    query_ends = query_start_loc[1 : num_reqs + 1].tolist()
    logits_starts = cu_num_logits[: num_reqs + 1].tolist()
    slot_nodes = num_nodes.tolist()
    lengths = [0] * num_reqs_padded
    prefix_len[:num_reqs_padded] = 0
    first_rows = query_start_loc[:num_reqs].long()
    prefix_len[:num_reqs] = positions[first_rows].to(torch.int32)
    for req, slot in enumerate(slot_list):
        num_logits = logits_starts[req + 1] - logits_starts[req]
        if num_logits <= 1 or slot < 0 or slot_nodes[slot] == 0:
            continue
        lengths[req] = num_logits
        base = query_ends[req] - num_logits
        # The root's depth is 0: row base keeps its position.
        rows = positions[base : base + num_logits]
        rows.copy_(rows[0].clone() + depths[slot, :num_logits])
        batch_ancestors[req] = ancestors[slot]
    tree_len[:num_reqs_padded] = tree_len.new_tensor(lengths)
