# SPDX-License-Identifier: Apache-2.0
"""tree_attention against an oracle that works from parent lists, not from bits."""

import mmap
import random
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from vllm_dflash_kernels.testing import (
    POISON_INT,
    ancestor_matrix,
    assert_close,
    pack_bits,
    poisoned,
    random_tree,
)
from vllm_dflash_kernels.tree_attention import TreeAttentionWorkspace, tree_attention
from vllm_dflash_kernels.tree_attention.tiles import SplitPlan, Tile

# RMS error over RMS value: accumulation order (fp32), rounding of P and of the output.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 5e-3}
CHAIN5 = [-1, 0, 1, 2, 3]
#      0
#    1   2
#   3 4   6
#   5
TREE7 = [-1, 0, 0, 1, 1, 3, 2]


@dataclass
class Request:
    """``prefix`` committed keys, ``causal`` plain rows, then a tree (or none)."""

    prefix: int
    causal: int = 0
    parents: tuple[int, ...] = ()

    @property
    def query_len(self) -> int:
        return self.causal + len(self.parents)

    @property
    def seq_len(self) -> int:
        return self.prefix + self.query_len

    def positions(self) -> list[int]:
        start = self.prefix + self.causal
        depths = [sum(row) - 1 for row in ancestor_matrix(list(self.parents))]
        return [*range(start), *(start + depth for depth in depths)]

    def visible(self, row: int, window: int) -> list[int]:
        """Slots that a query row sees."""
        start = self.prefix + self.causal
        slots = list(range(min(self.prefix + row + 1, start)))
        node = row - self.causal
        while node >= 0:
            slots.append(start + node)
            node = self.parents[node]
        at = self.positions()
        here = at[self.prefix + row]
        return sorted(s for s in slots if window <= 0 or here - at[s] < window)


def tree(prefix, parents, causal=0):
    return Request(prefix, causal, tuple(parents))


class Batch:
    """Random queries and a paged cache with NaN in every slot that nobody owns."""

    def __init__(
        self, requests, device, *, num_heads=4, num_kv_heads=2, head_size=64,
        block_size=16, layout="NHD", dtype=torch.float32, fp8=False, width=None,
        padding=0, seed=0,
    ):  # fmt: skip
        generator = torch.Generator().manual_seed(seed)
        self.requests = requests
        self.shape = (num_heads, num_kv_heads, head_size)
        self.width = width or max(r.query_len for r in requests)
        num_rows = len(requests) + padding
        counts = [-(-r.seq_len // block_size) for r in requests]
        num_blocks = sum(counts) + 2
        # Block 0 belongs to nobody, as in vLLM.
        ids = (torch.randperm(num_blocks - 1, generator=generator) + 1).tolist()
        table = torch.full((num_rows, max(counts) + 3), POISON_INT, dtype=torch.int32)
        order = {"NHD": (0, 2, 1, 3), "HND": (0, 1, 2, 3)}[layout]
        size = [num_blocks, num_kv_heads, block_size, 2 * head_size]
        storage = torch.full([size[i] for i in order], torch.nan, dtype=torch.float32)
        kv = storage.permute(order)
        self.keys, self.values = [], []
        for r, request in enumerate(requests):
            mine = [ids.pop() for _ in range(counts[r])]
            table[r, : counts[r]] = torch.tensor(mine)
            rows = torch.randn(
                request.seq_len, num_kv_heads, 2 * head_size, generator=generator
            )
            for slot in range(request.seq_len):
                kv[mine[slot // block_size], :, slot % block_size] = rows[slot]
        if fp8:
            storage = storage.to(torch.float8_e4m3fn)
        elif dtype != torch.float32:
            storage = storage.to(dtype)
        storage = storage.to(device)
        kv = storage.permute(order)
        self.k_scale = torch.tensor(0.5, device=device) if fp8 else None
        self.v_scale = torch.tensor(1.75, device=device) if fp8 else None
        self.key_cache = kv[..., :head_size]
        self.value_cache = kv[..., head_size:]
        starts = np.cumsum([0, *(r.query_len for r in requests), *[0] * padding])
        lengths = [r.seq_len for r in requests] + [0] * padding
        words = -(-self.width // 64)
        self.ancestors = poisoned(num_rows, self.width, words, dtype=torch.int64)
        for r, request in enumerate(requests):
            if request.parents:
                bits = pack_bits(ancestor_matrix(list(request.parents)))
                self.ancestors[r, : bits.shape[0], : bits.shape[1]] = bits
                self.ancestors[r, : bits.shape[0], bits.shape[1] :] = 0
        self.ancestors = self.ancestors.to(device)
        tree_lens = [len(r.parents) for r in requests] + [0] * padding
        self.block_table = table.to(device)
        ints = dict(dtype=torch.int32, device=device)
        self.query_start_loc = torch.tensor(starts, **ints)
        self.seq_lens = torch.tensor(lengths, **ints)
        self.tree_len = torch.tensor(tree_lens, **ints)
        total = int(starts[-1]) + 3
        query = torch.randn(total, num_heads, head_size, generator=generator)
        # A slice of a fused projection: the token stride exceeds the row.
        fused = torch.zeros(total, num_heads + num_kv_heads, head_size, dtype=dtype)
        fused[:, :num_heads] = query.to(dtype)
        self.query = fused.to(device)[:, :num_heads]
        self.out = poisoned(total, num_heads, head_size, dtype=dtype, device=device)

    def run(self, impl="triton", max_query_len=None, refused=False, **options):
        bf16_on_cpu = self.out.dtype == torch.bfloat16 and not self.out.is_cuda
        if impl == "triton" and bf16_on_cpu and not refused:
            pytest.skip("Triton's interpreter cannot multiply bf16")
        self.out.fill_(torch.nan)
        result = tree_attention(
            self.query, self.key_cache, self.value_cache,
            block_table=self.block_table, seq_lens=self.seq_lens,
            query_start_loc=self.query_start_loc, ancestors=self.ancestors,
            tree_len=self.tree_len, max_query_len=max_query_len or self.width,
            scale=self.shape[2] ** -0.5, out=self.out, k_scale=self.k_scale,
            v_scale=self.v_scale, impl=impl, **options,
        )  # fmt: skip
        assert result is self.out
        return self.out.clone()

    def cached(self, cache, scale, r):
        """Keys or values of request ``r``, fp64 [seq_len, num_kv_heads, D]."""
        size = cache.shape[2]
        table = self.block_table[r].tolist()
        slots = range(self.requests[r].seq_len)
        rows = torch.stack([cache[table[s // size], :, s % size] for s in slots])
        return rows.double() * (1.0 if scale is None else scale.double())

    def expected(self, *, sliding_window=-1, softcap=0.0, sinks=None, max_rows=None):
        """Row by row over the visible slots; NaN where nothing may be written."""
        num_heads, num_kv_heads, head_size = self.shape
        out = torch.full_like(self.query, torch.nan, dtype=torch.float64)
        for r, request in enumerate(self.requests):
            keys = self.cached(self.key_cache, self.k_scale, r)
            values = self.cached(self.value_cache, self.v_scale, r)
            keys = keys.repeat_interleave(num_heads // num_kv_heads, 1)
            values = values.repeat_interleave(num_heads // num_kv_heads, 1)
            start = int(self.query_start_loc[r])
            for row in range(min(request.query_len, max_rows or request.query_len)):
                slots = request.visible(row, sliding_window)
                q = self.query[start + row].double()
                logits = torch.einsum("hd,shd->hs", q, keys[slots]) * head_size**-0.5
                if softcap > 0:
                    logits = softcap * torch.tanh(logits / softcap)
                if sinks is not None:
                    logits = torch.cat([logits, sinks.double()[:, None]], 1)
                probs = torch.softmax(logits, 1)[:, : len(slots)]
                out[start + row] = torch.einsum("hs,shd->hd", probs, values[slots])
        return out


def check(name, expected, actual):
    """Written rows agree, and no other row was written."""
    written = ~torch.isnan(expected[:, 0, 0])
    assert torch.isnan(actual[~written]).all(), f"{name}: wrote a row it must not"
    assert_close(name, expected[written], actual[written], TOLERANCE[actual.dtype])


def random_requests(seed, sizes):
    rng = random.Random(seed)
    return [tree(prefix, random_tree(n, rng)) for prefix, n in sizes]


@pytest.mark.parametrize("prefix", [0, 1, 15, 16, 17, 127])
def test_odd_contexts_match_oracle(prefix, impl, device):
    batch = Batch([tree(prefix, TREE7)], device)
    check("odd", batch.expected(), batch.run(impl))


@pytest.mark.parametrize(
    ("dtype", "head_size"),
    [
        (torch.bfloat16, 64),
        (torch.float16, 80),
        (torch.bfloat16, 96),
        (torch.float16, 128),
        (torch.bfloat16, 192),
        (torch.float32, 256),
    ],
)
def test_dtypes_and_head_sizes_match_oracle(dtype, head_size, impl, device):
    requests = random_requests(1, [(40, 9), (3, 5)])
    batch = Batch(requests, device, dtype=dtype, head_size=head_size)
    check("dtype", batch.expected(), batch.run(impl))


def test_every_path_equals_causal_attention_over_the_path(impl, device):
    parents = random_tree(12, random.Random(3))
    request = tree(21, parents)
    batch = Batch([request], device)
    out = batch.run(impl)
    keys = batch.cached(batch.key_cache, None, 0).transpose(0, 1)
    values = batch.cached(batch.value_cache, None, 0).transpose(0, 1)
    for leaf in set(range(12)) - set(parents):
        path = [leaf]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        slots = [*range(21), *(21 + node for node in path)]
        q = batch.query[path].double().transpose(0, 1)
        causal = torch.ones(len(path), len(slots), dtype=torch.bool, device=device)
        causal = causal.tril(len(slots) - len(path))
        expected = torch.nn.functional.scaled_dot_product_attention(
            q, keys[:, slots], values[:, slots], attn_mask=causal, enable_gqa=True
        )
        assert_close(f"path to {leaf}", expected.transpose(0, 1), out[path], 1e-4)


def test_chain_tree_is_bitwise_causal(impl, device):
    batch = Batch([tree(30, CHAIN5), tree(2, CHAIN5)], device)
    as_tree = batch.run(impl)
    batch.tree_len.zero_()
    assert torch.equal(as_tree[:10], batch.run(impl)[:10])


def test_unequal_trees_chains_and_prompt_rows_in_one_batch(impl, device):
    requests = [
        tree(33, TREE7),
        Request(18, causal=9),
        tree(5, random_tree(11, random.Random(5)), causal=4),
        tree(64, [-1]),
        Request(7, causal=1),
    ]
    batch = Batch(requests, device, width=17)
    check("mixed", batch.expected(), batch.run(impl))


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("block_size", [16, 32, 128, 24])
def test_block_sizes_and_layouts_match_oracle(block_size, layout, impl, device):
    requests = random_requests(block_size, [(70, 9), (block_size, 3)])
    batch = Batch(requests, device, block_size=block_size, layout=layout)
    check("layout", batch.expected(), batch.run(impl, num_splits=2))


def test_separate_key_and_value_caches(impl, device):
    batch = Batch([tree(20, TREE7)], device)
    expected = batch.expected()
    batch.key_cache = batch.key_cache.contiguous()
    batch.value_cache = batch.value_cache.contiguous()
    check("separate", expected, batch.run(impl))


def test_padded_requests_of_a_replayed_graph_write_nothing(impl, device):
    batch = Batch([tree(20, TREE7)], device, padding=3)
    check("padded", batch.expected(), batch.run(impl, num_splits=2))


def test_stale_ancestors_of_a_larger_batch_are_ignored(impl, device):
    big = Batch(random_requests(7, [(9, 17), (9, 17)]), device)
    small = Batch([tree(9, TREE7), Request(9, causal=1)], device, width=17)
    expected = small.run(impl)
    small.ancestors[:, 7:] = big.ancestors[:, 7:]
    small.ancestors[1:] = big.ancestors[1:]
    # A cut tree keeps its nodes' rows, and no row points behind its node.
    assert torch.equal(expected[:8], small.run(impl)[:8])


def test_cut_tree_equals_the_smaller_tree(impl, device):
    parents = random_tree(17, random.Random(11))
    small = Batch([tree(25, parents[:6])], device, width=17)
    expected = small.run(impl)
    small.ancestors[0] = pack_bits(ancestor_matrix(parents)).to(device)
    assert torch.equal(expected[:6], small.run(impl)[:6])


@pytest.mark.parametrize("window", [1, 3, 16, 40, 1000])
def test_sliding_window_counts_depth_not_slots(window, impl, device):
    requests = [*random_requests(13, [(150, 13), (6, 9)]), Request(50, causal=6)]
    requests.append(tree(90, TREE7, causal=3))
    batch = Batch(requests, device, width=13)
    out = batch.run(impl, sliding_window=window, num_splits=2)
    check("window", batch.expected(sliding_window=window), out)


@pytest.mark.parametrize("num_splits", [1, 2, 7])
def test_splits_match_oracle(num_splits, device):
    requests = [*random_requests(17, [(300, 9), (1, 7)]), Request(64, causal=2)]
    batch = Batch(requests, device)
    check("splits", batch.expected(), batch.run(num_splits=num_splits))


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("window", [-1, 20])
def test_softcap_and_sinks_match_oracle(num_splits, window, impl, device):
    batch = Batch(random_requests(19, [(130, 7), (4, 5)]), device)
    options = dict(
        softcap=1.5,
        sinks=torch.tensor([0.5, 4.0, -30.0, 2.0], device=device),
        sliding_window=window,
    )
    out = batch.run(impl, num_splits=num_splits, **options)
    check("softcap and sinks", batch.expected(**options), out)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("raw_bytes", [False, True])
def test_fp8_cache_matches_oracle(dtype, raw_bytes, impl, device):
    batch = Batch(random_requests(23, [(37, 9)]), device, dtype=dtype, fp8=True)
    expected = batch.expected()
    if raw_bytes:
        batch.key_cache = batch.key_cache.view(torch.uint8)
        batch.value_cache = batch.value_cache.view(torch.uint8)
    check("fp8", expected, batch.run(impl, num_splits=2))


def test_every_finite_e4m3_value_is_read_exactly(device):
    """Softmax over one key returns its value: all 254 bytes, subnormals included."""
    values = torch.arange(256, dtype=torch.uint8)
    values = values[(values & 0x7F) != 0x7F][None].expand(2, -1)
    values = torch.nn.functional.pad(values, (0, 2))
    batch = Batch([Request(0, causal=1)], device, head_size=256, fp8=True)
    batch.k_scale.fill_(1.0)
    batch.v_scale.fill_(1.0)
    batch.value_cache.view(torch.uint8)[batch.block_table[0, 0], :, 0] = values.to(
        device
    )
    out = batch.run("triton")
    expected = values.view(torch.float8_e4m3fn).float().repeat_interleave(2, 0)
    assert torch.equal(out[0].cpu(), expected)


@pytest.mark.parametrize("num_nodes", [64, 65, 130, 200])
def test_more_than_one_word_of_ancestors(num_nodes, impl, device):
    requests = random_requests(29, [(10, num_nodes), (3, 7)])
    batch = Batch(requests, device, num_heads=2, num_kv_heads=1)
    check("words", batch.expected(), batch.run(impl))
    if num_nodes == 130:
        out = batch.run(impl, sliding_window=8)
        check("words, window", batch.expected(sliding_window=8), out)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(9, 3), (3, 3), (8, 1)])
def test_head_groups_match_oracle(num_heads, num_kv_heads, impl, device):
    requests = random_requests(31, [(19, 7), (40, 3)])
    batch = Batch(requests, device, num_heads=num_heads, num_kv_heads=num_kv_heads)
    check("groups", batch.expected(), batch.run(impl, num_splits=2))


def test_rows_beyond_max_query_len_are_left_alone(impl, device):
    batch = Batch([Request(5, causal=12), tree(9, CHAIN5)], device)
    expected = batch.expected(max_rows=5)
    check("bounded", expected, batch.run(impl, max_query_len=5, num_splits=2))


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
    "plan",
    [
        SplitPlan(num_splits=8, fill_splits=2, min_tiles=1, long_tiles=2),
        SplitPlan(num_splits=4, fill_splits=1, min_tiles=1, long_tiles=3),
        SplitPlan(num_splits=8, fill_splits=8, min_tiles=3, long_tiles=1),
    ],
)
def test_long_and_short_requests_split_differently(plan, device):
    requests = random_requests(41, [(280, 5), (20, 5), (90, 5)])
    batch = Batch(requests, device)
    sinks = torch.randn(4, device=device)
    out = launch(batch, plan=plan, tile=Tile(16, 32, 4, 2), sinks=sinks)
    check("plan", batch.expected(sinks=sinks), out)


def test_workspace_is_reused_and_checked(device):
    batch = Batch([tree(200, TREE7)], device)
    heads = batch.shape
    workspace = TreeAttentionWorkspace.allocate(
        4, batch.width, *heads, 4096, device, dtype=torch.float32
    )
    first = batch.run(workspace=workspace, max_seq_len=4096)
    check("workspace", batch.expected(), first)
    assert torch.isfinite(workspace.lse).any(), "the splits did not use it"
    workspace.partial.fill_(torch.nan)
    workspace.lse.fill_(torch.nan)
    assert torch.equal(first[:7], batch.run(workspace=workspace, max_seq_len=4096)[:7])
    small = TreeAttentionWorkspace.of_rows(8, heads[2], device)
    with pytest.raises(ValueError, match="workspace is too small"):
        batch.run(workspace=small, num_splits=4)


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


def test_wrong_arguments_are_refused(device):
    batch = Batch([tree(3, TREE7)], device)
    with pytest.raises(ValueError, match="num_splits=33"):
        batch.run(num_splits=33)
    with pytest.raises(ValueError, match="max_query_len=257"):
        batch.run(max_query_len=257)
    batch.k_scale = torch.ones(1, device=device)
    with pytest.raises(ValueError, match="given together"):
        batch.run()
    batch.k_scale = None
    batch.value_cache = batch.value_cache.contiguous()
    with pytest.raises(ValueError, match="equal strides"):
        batch.run()
    batch = Batch([tree(3, TREE7)], device, dtype=torch.bfloat16)
    if device.type == "cpu":
        with pytest.raises(ValueError, match="interpreter multiplies bf16"):
            batch.run(refused=True)
    batch.query = batch.query.half()
    with pytest.raises(ValueError, match="KV cache dtype"):
        batch.run("reference")


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
