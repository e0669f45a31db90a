# SPDX-License-Identifier: Apache-2.0
"""Rows of the accepted paths, one request at a time."""

from __future__ import annotations

import torch


def path_rows_reference(
    query_start_loc: torch.Tensor,
    tree_len: torch.Tensor,
    path: torch.Tensor,
    num_sampled_walk: torch.Tensor,
    positions: torch.Tensor,
    out_query_start_loc: torch.Tensor,
    num_reqs: int,
    rows: torch.Tensor,
    out_positions: torch.Tensor,
    num_padding: torch.Tensor,
) -> None:
    starts = query_start_loc[: num_reqs + 1].tolist()
    out_starts = out_query_start_loc[: num_reqs + 1].tolist()
    lengths = tree_len[:num_reqs].tolist()
    num_path_rows = num_sampled_walk[:num_reqs].tolist()
    padding = [0] * num_reqs
    for req in range(num_reqs):
        out = slice(out_starts[req], out_starts[req + 1])
        num_rows = out.stop - out.start
        if lengths[req] == 0:
            first = starts[req]
            rows[out] = torch.arange(first, first + num_rows, device=rows.device)
            out_positions[out] = positions[first : first + num_rows]
            continue
        base = starts[req + 1] - lengths[req]
        num_path = num_path_rows[req]
        rows[out] = base
        rows[out][:num_path] += path[req, :num_path]
        out_positions[out] = positions[base]
        out_positions[out][:num_path] += torch.arange(num_path, device=rows.device)
        padding[req] = num_rows - num_path
    num_padding[:num_reqs] = num_padding.new_tensor(padding)
