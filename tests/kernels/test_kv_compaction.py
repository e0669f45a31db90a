# SPDX-License-Identifier: Apache-2.0
"""compact_kv against copying single entries of a snapshot."""

import gc
import weakref

import pytest
import torch

from vllm_dflash_kernels.kv_compaction import KVCacheTable, compact_kv

NUM_BLOCKS = 24


def make_caches(layout, dtype, heads, block_size, content, num_layers, device):
    """Caches [blocks, heads, block_size, content] and the storage behind them."""
    shapes = {
        "NHD": (NUM_BLOCKS, block_size, heads, content),
        "HND": (NUM_BLOCKS, heads, block_size, content),
        # content is a slice of wider entries: no stride is a product of the shape
        "padded": (NUM_BLOCKS, heads, block_size + 1, content + 3),
    }
    shape = shapes[layout]
    item_bytes = torch.empty(0, dtype=dtype).element_size()
    storages, caches = [], []
    for layer in range(num_layers):
        generator = torch.Generator().manual_seed(layer)
        data = torch.randint(
            0, 256, (*shape[:-1], shape[-1] * item_bytes), generator=generator
        )
        storage = data.to(torch.uint8).to(device).view(dtype)
        storages.append(storage)
        if layout == "NHD":
            caches.append(storage.permute(0, 2, 1, 3))
        else:
            caches.append(storage[:, :, :block_size, :content])
    return storages, caches


def run(caches, paths, tree_lens, slot_rows, impl, *, num_sampled=None, max_rows=6):
    """Compact; returns nothing, changes the caches."""
    device = caches[0].device
    lens = [len(row) for row in slot_rows]

    def ints(values):
        return torch.tensor(values, dtype=torch.int32, device=device)

    compact_kv(
        # The reference needs them on a GPU too.
        KVCacheTable(caches, keeps_caches=True),
        torch.tensor(sum(slot_rows, []), device=device),
        ints([sum(lens[:i]) for i in range(len(lens) + 1)]),
        ints(tree_lens),
        ints([path + [0] * (max_rows - len(path)) for path in paths]),
        ints(num_sampled or [len(path) for path in paths]),
        num_reqs=len(paths),
        impl=impl,
    )


def expect(storages, caches, moves, block_size):
    """Bytes of the storages after (source, destination) moves of the old content."""
    before = [cache.clone().view(torch.uint8) for cache in caches]
    copies = [storage.clone() for storage in storages]
    for storage, cache, old in zip(copies, caches, before, strict=True):
        view = storage.as_strided(cache.shape, cache.stride()).view(torch.uint8)
        for source, destination in moves:
            for head in range(cache.shape[1]):
                view[destination // block_size, head, destination % block_size] = old[
                    source // block_size, head, source % block_size
                ]
    return [copy.view(torch.uint8) for copy in copies]


def check(storages, expected):
    for storage, copy in zip(storages, expected, strict=True):
        assert torch.equal(storage.view(torch.uint8), copy)


@pytest.mark.parametrize("layout", ["NHD", "HND", "padded"])
@pytest.mark.parametrize(
    ("dtype", "content", "block_size"),
    [
        (torch.bfloat16, 16, 16),
        (torch.float32, 5, 15),
        (torch.uint8, 7, 17),
        (torch.float8_e4m3fn, 24, 4),
        (torch.float16, 300, 2),  # several chunks
    ],
)
def test_moves_bytes_of_every_layout(layout, dtype, content, block_size, impl, device):
    storages, caches = make_caches(layout, dtype, 3, block_size, content, 2, device)
    # A tree of 9 rows across block borders, behind one row of its own.
    first = block_size * 3 - 2
    slots = list(range(first, first + 10))
    path = [0, 2, 3, 4, 8]
    moves = [(slots[1 + node], slots[1 + i]) for i, node in enumerate(path) if i]
    expected = expect(storages, caches, moves, block_size)
    run(caches, [path], [9], [slots], impl)
    check(storages, expected)


@pytest.mark.parametrize(
    "path",
    [
        [0],
        [0, 1, 2, 3],
        [0, 2, 3, 4, 5, 6],  # every source is the next destination
        [0, 1, 3, 4, 5, 7],
        [0, 5],
        [0, 3, 4, 7],
    ],
)
def test_sources_that_are_destinations_give_their_old_content(path, impl, device):
    storages, caches = make_caches("NHD", torch.bfloat16, 2, 4, 8, 1, device)
    slots = [41, 40, 7, 12, 13, 2, 3, 30]  # blocks in no order
    moves = [(slots[node], slots[i]) for i, node in enumerate(path) if node != i]
    expected = expect(storages, caches, moves, 4)
    run(caches, [path], [8], [slots], impl)
    check(storages, expected)


def test_only_tree_requests_move_and_only_in_their_slots(impl, device):
    storages, caches = make_caches("HND", torch.float16, 2, 4, 6, 3, device)
    rows = [[0, 1, 2, 3], [20, 21, 22], [40, 41, 42, 43, 44], [60, 61, 62]]
    moves = [(2, 1), (43, 42)]
    expected = expect(storages, caches, moves, 4)
    run(
        caches,
        # the second request has no tree; what its path says is stale
        [[0, 2], [0, 2], [0, 1, 3], [0, 1]],
        [4, 0, 5, 3],
        rows,
        impl,
    )
    check(storages, expected)


def test_path_entries_past_its_length_are_stale(impl, device):
    storages, caches = make_caches("NHD", torch.float32, 1, 4, 2, 1, device)
    expected = expect(storages, caches, [(9, 8)], 4)
    run(caches, [[0, 2, 3, 4]], [5], [[7, 8, 9, 10, 11]], impl, num_sampled=[2])
    check(storages, expected)
    run(caches, [[0, 2, 3, 4]], [5], [[7, 8, 9, 10, 11]], impl, num_sampled=[0])
    check(storages, expected)


def test_rows_that_are_not_stored_are_skipped(impl, device):
    storages, caches = make_caches("NHD", torch.float32, 1, 4, 2, 1, device)
    expected = expect(storages, caches, [(22, 21)], 4)
    run(caches, [[0, 2, 3]], [4], [[20, 21, 22, -1]], impl)
    check(storages, expected)


def test_second_head_half_of_an_allocation_is_its_own_cache(impl, device):
    # Keys and values stored apart in one allocation: two caches of one table.
    storage = torch.randn(2, NUM_BLOCKS, 4, 3, 8, device=device)
    caches = [half.permute(0, 2, 1, 3) for half in storage]
    before = storage.clone()
    run(caches, [[0, 3]], [4], [[5, 6, 7, 8]], impl)
    before[:, 1, 2] = before[:, 2, 0]
    assert torch.equal(storage, before)


def test_widest_word_divides_every_stride_and_address(device):
    storage = torch.zeros(4, 2, 4, 8, dtype=torch.bfloat16, device=device)
    assert KVCacheTable([storage]).word_bytes == 8
    assert KVCacheTable([storage[..., 2:6]]).word_bytes == 4
    assert KVCacheTable([storage[..., 1:5]]).word_bytes == 2
    assert KVCacheTable([storage.view(torch.uint8)[..., :7]]).word_bytes == 1


def test_caches_of_different_geometry_are_refused():
    with pytest.raises(ValueError, match="one table for each geometry"):
        KVCacheTable([torch.zeros(4, 2, 4, 8), torch.zeros(4, 2, 8, 8)])
    with pytest.raises(ValueError, match="contiguous content"):
        KVCacheTable([torch.zeros(4, 2, 8, 4).transpose(2, 3)])


@pytest.mark.parametrize("keeps_caches", [None, False, True])
def test_a_table_lets_go_of_a_gpus_caches(device, keeps_caches):
    """An engine gives them back before it makes others: when it sleeps, or profiles."""
    cache = torch.zeros(4, 2, 4, 8, device=device)
    table = KVCacheTable([cache], keeps_caches=keeps_caches)
    held = weakref.ref(cache)
    del cache
    gc.collect()
    expected = device.type == "cpu" if keeps_caches is None else keeps_caches
    assert (held() is not None) is expected
    assert table.num_layers == 1
