# SPDX-License-Identifier: Apache-2.0
"""Tiles, key splits, workspace, addresses and graph replay of tree attention."""

import mmap
import random

import numpy as np
import pytest
import torch
from attention_batches import TREE7, Batch, check, random_requests, tree

from vllm_dflash_kernels.testing import ancestor_matrix, pack_bits, random_tree
from vllm_dflash_kernels.tree_attention import TreeAttentionWorkspace, tree_attention
from vllm_dflash_kernels.tree_attention import workspace as workspace_module
from vllm_dflash_kernels.tree_attention.tiles import (
    HEAD_SIZES,
    MAX_SPLITS,
    SHARED_KB,
    SplitPlan,
    Tile,
    estimate_shared_bytes,
    plan_splits,
    select_tile,
)


def launch(batch, **options):
    """The launcher below the dispatch, where tile and plan can be forced."""
    from vllm_dflash_kernels.tree_attention.launch import launch_tree_attention

    batch.out.fill_(torch.nan)
    defaults = dict(
        sliding_window=-1, softcap=0.0, sinks=None, k_scale=None, v_scale=None,
        max_seq_len=4096, workspace=None, num_splits=None,
    )  # fmt: skip
    launch_tree_attention(
        batch.query, batch.key_cache, batch.value_cache,
        block_table=batch.block_table, seq_lens=batch.seq_lens,
        query_start_loc=batch.query_start_loc, ancestors=batch.ancestors,
        tree_len=batch.tree_len, max_query_len=batch.width,
        scale=batch.shape[2] ** -0.5, out=batch.out, **(defaults | options),
    )  # fmt: skip
    return batch.out.clone()


@pytest.mark.parametrize(
    "tile",
    [
        Tile(32, 32, 4, 2, tail_m=16),
        Tile(32, 32, 4, 2),
        Tile(16, 64, 4, 2),
        Tile(64, 16, 4, 2, tail_m=32),
        Tile(128, 32, 4, 2),
    ],
)
def test_row_tiles_and_narrow_tails_match_oracle(tile, device):
    # 9 heads over 3: 3 rows a token, 39 and 27 rows, tiles that cut tokens apart.
    requests = random_requests(37, [(45, 13), (70, 9)])
    batch = Batch(requests, device, num_heads=9, num_kv_heads=3)
    check("tiles", batch.expected(), launch(batch, tile=tile, num_splits=2))


@pytest.mark.parametrize(
    ("plan", "num_splits"),
    [
        # 285, 25 and 95 keys are 9, 1 and 3 tiles of 32.
        (SplitPlan(num_splits=8, fill_splits=2, min_tiles=1, long_tiles=2), [5, 0, 2]),
        (SplitPlan(num_splits=4, fill_splits=1, min_tiles=1, long_tiles=3), [3, 0, 0]),
        (SplitPlan(num_splits=8, fill_splits=8, min_tiles=3, long_tiles=1), [3, 0, 0]),
    ],
)
def test_long_and_short_requests_split_differently(plan, num_splits, device):
    requests = random_requests(41, [(280, 5), (20, 5), (90, 5)])
    batch = Batch(requests, device)
    sinks = torch.randn(4, device=device)
    rows = 3 * plan.num_splits * 5 * 4
    workspace = TreeAttentionWorkspace.of_rows(rows, 64, device)
    out = launch(
        batch, plan=plan, tile=Tile(16, 32, 4, 2), sinks=sinks, workspace=workspace
    )
    check("plan", batch.expected(sinks=sinks), out)
    # A request with one share bypasses the workspace.
    written = torch.isfinite(workspace.lse).view(3, 2, plan.num_splits, 10).all(3)
    assert written.sum(2).tolist() == [[n, n] for n in num_splits]


@pytest.mark.parametrize("shared_kb", sorted(set(SHARED_KB.values())))
@pytest.mark.parametrize("head_size", HEAD_SIZES)
def test_tiles_cover_the_rows_without_excess(head_size, shared_kb):
    for rows in (1, 3, 16, 51, 68, 132, 196, 260, 1024):
        tile = select_tile(rows, head_size, shared_kb)
        used = estimate_shared_bytes(tile, head_size, 2, 2)
        assert used <= shared_kb * 1024
        full, count = tile.num_full_tiles(rows), tile.num_row_tiles(rows)
        assert count - full in (0, 1)
        covered = full * tile.block_m + (count - full) * tile.tail_m
        # A tail is the smallest power of two of at least 16 that fits.
        assert rows <= covered < rows + max(16, (covered - full * tile.block_m) or 128)


def test_splits_fill_the_machine_and_fall_with_the_batch():
    tile = Tile(128, 64, 8, 3, 1)
    plans = [plan_splits(r, 8, 132, tile, 40960, 132) for r in range(1, 33)]
    assert plans[0].fill_splits == 8  # 2 tiles x 8 heads x 8 splits = 128 programs
    assert all(p.fill_splits == 1 for p in plans[8:])  # one tile an SM already
    for num_reqs, plan in enumerate(plans, 1):
        assert 1 <= plan.fill_splits <= plan.num_splits <= MAX_SPLITS
        # Empty programs of spare splits stay below one wave.
        assert plan.num_splits == 1 or num_reqs * 16 * plan.num_splits <= 2 * 132
    assert plan_splits(1, 8, 132, tile, 100, 132).num_splits <= 2
    assert plan_splits(7, 8, 132, tile, 100, 132, num_splits=3) == SplitPlan(3, 3)


@pytest.mark.parametrize("head_size", [64, 128, 192])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(9, 3), (32, 8), (64, 1)])
def test_workspace_holds_every_batch_and_width(
    head_size, num_heads, num_kv_heads, monkeypatch
):
    limits = (90, 227, 132)
    monkeypatch.setattr(workspace_module, "device_limits", lambda device: limits)
    held = TreeAttentionWorkspace.allocate(head_size, "meta").lse.numel()
    for width in (1, 2, 4, 5, 16, 17, 33, 48, 65, 256):
        rows = width * (num_heads // num_kv_heads)
        tile = select_tile(rows, head_size, 227)
        for num_reqs in (*range(1, 70), 128, 256):
            for max_seq_len in (100, 4096, 131072):
                plan = plan_splits(num_reqs, num_kv_heads, rows, tile, max_seq_len, 132)
                if plan.num_splits > 1:
                    needed = num_reqs * num_kv_heads * plan.num_splits * rows
                    assert needed <= held


def test_workspace_is_reused_and_checked(device):
    batch = Batch([tree(200, TREE7)], device)
    heads = batch.shape
    workspace = TreeAttentionWorkspace.allocate(heads[2], device, dtype=torch.float32)
    first = batch.run(workspace=workspace, max_seq_len=4096)
    check("workspace", batch.expected(), first)
    assert torch.isfinite(workspace.lse).any(), "the splits did not use it"
    workspace.partial.fill_(torch.nan)
    workspace.lse.fill_(torch.nan)
    assert torch.equal(first[:7], batch.run(workspace=workspace, max_seq_len=4096)[:7])
    small = TreeAttentionWorkspace.of_rows(8, heads[2], device)
    with pytest.raises(ValueError, match="workspace is too small"):
        batch.run(workspace=small, num_splits=4)


def test_one_split_is_no_other_kernel(device, monkeypatch):
    """Triton compiles a kernel for the dtypes of its pointers."""
    from vllm_dflash_kernels.tree_attention import launch as launch_module

    kernel, seen = launch_module.tree_attention_kernel, []

    class Recorder:
        def __getitem__(self, grid):
            def run(*args, **options):
                pointers = [arg.dtype for arg in args if isinstance(arg, torch.Tensor)]
                seen.append((grid[1], pointers))
                return kernel[grid](*args, **options)

            return run

    monkeypatch.setattr(launch_module, "tree_attention_kernel", Recorder())
    batch = Batch([tree(200, TREE7)], device, dtype=torch.float16)
    workspace = TreeAttentionWorkspace.allocate(batch.shape[2], device)
    for num_splits in (1, 3):
        out = batch.run("triton", workspace=workspace, num_splits=num_splits)
        check(f"{num_splits} splits", batch.expected(), out)
    (one, pointers_of_one), (three, pointers_of_three) = seen
    assert (one, three) == (1, 3)
    assert pointers_of_one == pointers_of_three


def test_offsets_beyond_int32(device):
    """Block 2101 of 1 MiB blocks starts behind 2**31 elements; memory is untouched."""
    batch = Batch([tree(3, TREE7)], device, head_size=64, fp8=True)
    expected = batch.run("triton")
    blocks, stride = 2102, 2**20
    if device.type == "cuda":
        flat = torch.zeros(blocks * stride, dtype=torch.uint8, device=device)
    else:
        flat = torch.from_numpy(
            np.frombuffer(mmap.mmap(-1, blocks * stride), dtype=np.uint8)
        )
    old = int(batch.block_table[0, 0])
    shape = (blocks, *batch.key_cache.shape[1:3], 128)
    far = flat.as_strided(shape, (stride, *batch.key_cache.stride()[1:]))
    far[-1, ..., :64] = batch.key_cache[old].view(torch.uint8)
    far[-1, ..., 64:] = batch.value_cache[old].view(torch.uint8)
    batch.block_table[0, 0] = blocks - 1
    batch.key_cache, batch.value_cache = far[..., :64], far[..., 64:]
    assert torch.equal(expected[:7], batch.run("triton")[:7])


@pytest.mark.gpu
@pytest.mark.parametrize("num_splits", [1, None])
def test_graph_replay_serves_other_lengths_and_trees(num_splits, device):
    """Capture with one batch, replay with others: fewer requests, other trees."""
    big = Batch(
        random_requests(43, [(500, 49), (900, 49), (33, 49)]), device,
        num_heads=32, num_kv_heads=8, head_size=128, dtype=torch.bfloat16,
    )  # fmt: skip
    options = dict(max_seq_len=4096, num_splits=num_splits)
    big.run(**options)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tree_attention(
            big.query, big.key_cache, big.value_cache, block_table=big.block_table,
            seq_lens=big.seq_lens, query_start_loc=big.query_start_loc,
            ancestors=big.ancestors, tree_len=big.tree_len, max_query_len=49,
            scale=128**-0.5, out=big.out, impl="triton", **options,
        )  # fmt: skip
    graph.replay()
    check("captured", big.expected(), big.out.clone())
    big.requests = [tree(700, random_tree(49, random.Random(47)))]
    bits = pack_bits(ancestor_matrix(list(big.requests[0].parents)))
    big.ancestors[0] = bits.to(device)
    # Request 1's blocks under another tree; the rest of the batch is padding.
    big.block_table[0] = big.block_table[1]
    big.seq_lens.copy_(torch.tensor([749, 0, 0]))
    big.query_start_loc.copy_(torch.tensor([0, 49, 49, 49]))
    big.tree_len.copy_(torch.tensor([49, 0, 0]))
    big.out.fill_(torch.nan)
    graph.replay()
    check("replayed", big.expected(), big.out.clone())
