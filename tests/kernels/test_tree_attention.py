# SPDX-License-Identifier: Apache-2.0
"""tree_attention against an oracle that works from parent lists, not from bits."""

import random

import pytest
import torch
from attention_batches import (
    CHAIN5,
    TREE7,
    Batch,
    Request,
    check,
    random_requests,
    tree,
)

from vllm_dflash_kernels.testing import (
    ancestor_matrix,
    assert_close,
    pack_bits,
    random_tree,
)


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


@pytest.mark.parametrize("softcap", [0.0, 3.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_given_the_prefix_only_own_keys_are_read(dtype, softcap, impl, device):
    requests = [
        *random_requests(19, [(130, 21), (1, 7), (0, 9), (16, 64)]),
        Request(63, causal=5),
        tree(40, TREE7, causal=3),
    ]
    batch = Batch(requests, device, dtype=dtype, width=64, padding=2)
    sinks = torch.randn(4, device=device)
    expected = batch.expected(softcap=softcap, sinks=sinks)
    known = batch.prefix_state(softcap)
    out = batch.run(impl, prefix_state=known, softcap=softcap, sinks=sinks)
    check("prefix given", expected, out)


def test_rows_beyond_max_query_len_are_left_alone(impl, device):
    batch = Batch([Request(5, causal=12), tree(9, CHAIN5)], device)
    expected = batch.expected(max_rows=5)
    check("bounded", expected, batch.run(impl, max_query_len=5, num_splits=2))


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
