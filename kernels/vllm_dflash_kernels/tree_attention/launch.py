# SPDX-License-Identifier: Apache-2.0
"""Launches the tree attention kernels and owns their scratch memory."""

from __future__ import annotations

from typing import Any

import torch

from ..dispatch import cdiv, next_power_of_2
from ..relaunch import KeptLaunch, launch
from .kernel import tree_attention_kernel
from .reduce import reduce_splits_kernel
from .tiles import MAX_SPLITS, SplitPlan, Tile, plan_splits, select_tile
from .workspace import TreeAttentionWorkspace, device_limits

# Elements of the partial outputs that one program of the reduction holds.
_REDUCE_ELEMENTS = 8192
_PDL_CAPABILITY = 90
# What differs between the layers of a step.
_OF_A_LAYER = (
    "out_ptr",
    "query_ptr",
    "key_ptr",
    "sinks_ptr",
    "k_scale_ptr",
    "v_scale_ptr",
    "prefix_lse_ptr",
)


def launch_tree_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    *,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    ancestors: torch.Tensor,
    tree_len: torch.Tensor,
    max_query_len: int,
    scale: float,
    out: torch.Tensor,
    sliding_window: int,
    softcap: float,
    sinks: torch.Tensor | None,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    max_seq_len: int,
    workspace: TreeAttentionWorkspace | None,
    num_splits: int | None,
    prefix_lse: torch.Tensor | None = None,
    tile: Tile | None = None,
    plan: SplitPlan | None = None,
    launch_pdl: bool | None = None,
    kept: list[KeptLaunch] | None = None,
) -> torch.Tensor:
    """Checked arguments of ``tree_attention`` in, two launches (or one) out.

    Args:
        tile: Overrides the table; for the benchmark.
        plan: Overrides the split plan; for the benchmark.
        launch_pdl: Start the reduction before the attention has drained
            (programmatic dependent launch); None: from sm_90 on.
        kept: Is given what repeats the launches for other layers (``step.py``).
    """
    num_reqs = seq_lens.shape[0]
    num_heads, head_size = query.shape[1:]
    num_kv_heads, block_size = key_cache.shape[1:3]
    group = num_heads // num_kv_heads
    rows = max_query_len * group
    capability, shared_kb, num_sms = device_limits(query.device)
    full_precision = query.dtype == torch.float32
    if tile is None:
        tile = select_tile(rows, head_size, shared_kb, full_precision=full_precision)
    if prefix_lse is not None:
        plan = SplitPlan(1, 1)
    elif plan is None:
        plan = plan_splits(
            num_reqs, num_kv_heads, rows, tile, max_seq_len, num_sms, num_splits
        )
    if launch_pdl is None:
        launch_pdl = capability >= _PDL_CAPABILITY and query.is_cuda

    num_rows = num_reqs * num_kv_heads * plan.num_splits * rows
    if workspace is None and plan.num_splits > 1:
        workspace = TreeAttentionWorkspace.of_rows(num_rows, head_size, query.device)
    partial = lse = query
    if workspace is not None:
        # With one split too, which does not use it: pointers of another dtype would be
        # another kernel, compiled by the first step without a graph that needs it.
        partial, lse = workspace.partial, workspace.lse
    if plan.num_splits > 1 and (
        lse.numel() < num_rows or partial.numel() < num_rows * head_size
    ):
        raise ValueError(
            f"The workspace is too small (got {lse.numel()} rows, need {num_rows})."
            " Allocate it for this many requests, this width and this max_seq_len."
        )
    fp8 = key_cache.dtype == torch.uint8
    scaled = fp8 and k_scale is not None
    head_pad = next_power_of_2(head_size)
    value_offset = value_cache.data_ptr() - key_cache.data_ptr()
    plan_args = (max_query_len, plan.fill_splits, plan.min_tiles, plan.long_tiles)

    grid = (tile.num_row_tiles(rows), plan.num_splits, num_reqs * num_kv_heads)
    args = (
        out,
        partial,
        lse,
        query,
        key_cache,
        block_table,
        seq_lens,
        query_start_loc,
        ancestors,
        tree_len,
        sinks if sinks is not None else query,
        k_scale if scaled else query,
        v_scale if scaled else query,
        prefix_lse if prefix_lse is not None else query,
        scale,
        softcap,
        tile.num_full_tiles(rows),
        *plan_args,
        out.stride(0),
        out.stride(1),
        query.stride(0),
        query.stride(1),
        key_cache.stride(0),
        key_cache.stride(1),
        key_cache.stride(2),
        value_offset // key_cache.element_size(),
        block_table.stride(0),
        ancestors.stride(0),
        ancestors.stride(1),
        prefix_lse.stride(0) if prefix_lse is not None else 0,
    )
    constants = dict(
        FROM_PREFIX=prefix_lse is not None,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        HEAD_SIZE=head_size,
        HEAD_PAD=head_pad,
        BLOCK_SIZE=block_size,
        WORDS=ancestors.shape[2],
        WINDOW=max(sliding_window, 0),
        USE_SOFTCAP=softcap > 0,
        USE_SINKS=sinks is not None,
        KV_FP8=fp8,
        USE_SCALES=scaled,
        PRECISION="ieee" if full_precision else "tf32",
        LAUNCH_PDL=launch_pdl,
        BLOCK_M=tile.block_m,
        TAIL_M=tile.tail_m,
        BLOCK_N=tile.block_n,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    launch(tree_attention_kernel, grid, args, constants, kept, _OF_A_LAYER)
    if plan.num_splits == 1:
        return out
    args = (
        out,
        partial,
        lse,
        seq_lens,
        query_start_loc,
        sinks if sinks is not None else query,
        plan.num_splits,
        *plan_args,
        out.stride(0),
        out.stride(1),
    )
    constants = dict(
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        HEAD_SIZE=head_size,
        HEAD_PAD=head_pad,
        WINDOW=max(sliding_window, 0),
        USE_SINKS=sinks is not None,
        LAUNCH_PDL=launch_pdl,
        BLOCK_N=tile.block_n,
        num_warps=4,
    )
    if launch_pdl:
        constants["launch_pdl"] = True
    if query.is_cuda:
        _compile_reductions(query.device, query.dtype, args, constants)
    pads = _reduction_block(plan.num_splits, head_pad)
    grid = (cdiv(rows, pads["BLOCK_R"]), num_kv_heads, num_reqs)
    launch(reduce_splits_kernel, grid, args, constants | pads, kept, _OF_A_LAYER)
    return out


def _reduction_block(num_splits: int, head_pad: int) -> dict[str, int]:
    """Constants of the reduction that depend on the number of splits."""
    splits_pad = next_power_of_2(num_splits)
    block_r = max(1, min(8, _REDUCE_ELEMENTS // (splits_pad * head_pad)))
    return dict(BLOCK_R=block_r, SPLITS_PAD=splits_pad)


def _compile_reductions(
    device: torch.device,
    dtype: torch.dtype,
    args: tuple[Any, ...],
    constants: dict[str, Any],
) -> None:
    """Compile the reduction for every number of splits when the first is used.

    More requests mean fewer splits, and a mixed batch may have a number of requests
    that no captured graph had: it would wait for the compiler while serving.
    """
    kind = (device, dtype, *constants.items())
    if kind in _compiled_reductions:
        return
    _compiled_reductions.add(kind)
    num_splits = 2
    while num_splits <= MAX_SPLITS:
        # In the order of the launch: Triton's key holds the options as they stand.
        pads = _reduction_block(num_splits, constants["HEAD_PAD"])
        reduce_splits_kernel.warmup(*args, grid=(1, 1, 1), **constants, **pads)
        num_splits *= 2


_compiled_reductions: set[tuple[Any, ...]] = set()
