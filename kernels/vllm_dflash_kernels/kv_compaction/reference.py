# SPDX-License-Identifier: Apache-2.0
"""KV compaction with torch indexing: gather all moved entries, then scatter them."""

from __future__ import annotations

import torch

from .table import KVCacheTable


def moved_slots(
    slot_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    tree_len: torch.Tensor,
    path: torch.Tensor,
    num_sampled_walk: torch.Tensor,
    num_reqs: int,
) -> tuple[list[int], list[int]]:
    """Return the (source, destination) slots of all moves."""
    ends = query_start_loc[1 : num_reqs + 1].tolist()
    lengths = tree_len[:num_reqs].tolist()
    counts = num_sampled_walk[:num_reqs].tolist()
    sources: list[int] = []
    destinations: list[int] = []
    for req, length in enumerate(lengths):
        if length == 0:
            continue
        nodes = path[req, : counts[req]].tolist()
        slots = slot_mapping[ends[req] - length : ends[req]].tolist()
        for place, node in enumerate(nodes):
            if place > 0 and node != place and min(slots[node], slots[place]) >= 0:
                sources.append(slots[node])
                destinations.append(slots[place])
    return sources, destinations


def compact_kv_reference(
    table: KVCacheTable,
    slot_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    tree_len: torch.Tensor,
    path: torch.Tensor,
    num_sampled_walk: torch.Tensor,
    num_reqs: int,
) -> None:
    sources, destinations = moved_slots(
        slot_mapping, query_start_loc, tree_len, path, num_sampled_walk, num_reqs
    )
    if not sources:
        return
    device, size = slot_mapping.device, table.block_size
    source = torch.tensor(sources, device=device)
    destination = torch.tensor(destinations, device=device)
    for cache in table.caches:
        entries = cache.view(torch.uint8)  # indexing knows no fp8
        moved = entries[source // size, :, source % size]
        entries[destination // size, :, destination % size] = moved
