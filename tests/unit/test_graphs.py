# SPDX-License-Identifier: Apache-2.0
"""CUDA-graph sizes cover the verify batches and stay few."""

from types import SimpleNamespace

import pytest
from fake_configs import engine, tree_of

from vllm_dflash.config import DDTreeConfig
from vllm_dflash.graphs import cover_verify_widths, draft_sizes, verify_sizes


def test_verify_sizes_cover_the_batches_of_a_step():
    sizes = verify_sizes(tree_of(48), 256, 8192, None)
    assert all(size % 49 == 0 for size in sizes)
    # 8192 // (49 + 15) requests fit a step.
    assert sizes[-1] == 128 * 49
    assert sizes[:8] == [49 * n for n in range(1, 9)]
    assert len(sizes) < 30
    gaps = [b / a for a, b in zip(sizes[7:], sizes[8:], strict=False)]
    assert max(gaps) <= 1.25


def test_verify_sizes_stop_at_the_number_of_requests_and_of_tokens():
    assert verify_sizes(tree_of(48), 4, 8192, None) == [49, 98, 147, 196]
    assert verify_sizes(tree_of(48), 256, 8192, 2048)[-1] == 41 * 49


def test_verify_sizes_of_a_schedule():
    tree = tree_of(64, [[1, 4, 64], [5, 8, 15], [9, 16, 0]])
    assert verify_sizes(tree, 16, 8192, None) == sorted(
        [65, 130, 195, 260] + [16 * n for n in (5, 6, 7, 8)]
    )


def test_last_range_of_a_schedule_goes_on():
    tree = tree_of(64, [[1, 4, 64], [5, 8, 15]])
    assert 12 * 16 in verify_sizes(tree, 12, 8192, None)
    assert 13 * 16 not in verify_sizes(tree, 12, 8192, None)


def compilation(sizes, full=True):
    return SimpleNamespace(
        cudagraph_capture_sizes=sizes,
        max_cudagraph_capture_size=max(sizes, default=0),
        cudagraph_mode=SimpleNamespace(has_full_cudagraphs=lambda: full),
    )


@pytest.mark.parametrize(("user_max_num_seqs", "largest"), [(True, 64), (False, 41)])
def test_capture_sizes_cover_the_verify_widths(user_max_num_seqs, largest):
    config = engine(
        compilation_config=compilation([1, 2, 4, 512]),
        scheduler_config__max_num_batched_tokens=8192,
    )
    cover_verify_widths(
        config, tree_of(48), user_sizes=False, user_max_num_seqs=user_max_num_seqs
    )
    sizes = config.compilation_config.cudagraph_capture_sizes
    assert {1, 2, 4, 512, 49, 98} <= set(sizes)
    assert sizes == sorted(sizes)
    assert sizes[-1] == largest * 49
    assert config.compilation_config.max_cudagraph_capture_size == sizes[-1]


@pytest.mark.parametrize(
    ("sizes", "full", "user_sizes"),
    [([1, 2, 4], True, True), ([1, 2, 4], False, False), ([], True, False)],
)
def test_capture_sizes_that_stay(sizes, full, user_sizes):
    config = engine(compilation_config=compilation(list(sizes), full))
    cover_verify_widths(
        config, tree_of(48), user_sizes=user_sizes, user_max_num_seqs=False
    )
    assert config.compilation_config.cudagraph_capture_sizes == sizes


def test_draft_graphs_cover_every_batch_that_verifies_in_a_graph():
    tree = tree_of(47, [[1, 2, 47], [3, 4, 31], [5, 96, 3], [97, 97, 0]])
    sizes = verify_sizes(tree, 256, 8192, 2048)
    draft = draft_sizes(tree, 256, 8192, [1, 2, 4, *sizes])
    assert all(size % 16 == 0 for size in draft)
    # 96 requests of 4 rows verify in a graph, so 96 drafts do.
    assert draft[0] == 16 and draft[-1] == 96 * 16
    assert max(b / a for a, b in zip(draft[7:], draft[8:], strict=False)) <= 1.25


def test_draft_graphs_of_one_width():
    assert draft_sizes(tree_of(48), 4, 8192, [49, 98, 147, 196]) == [16, 32, 48, 64]
    # 16 rows a request, so 512 hold 32 drafts, be it a verify batch or not.
    assert draft_sizes(tree_of(48), 64, 8192, [512])[-1] == 32 * 16
    assert draft_sizes(tree_of(48), 64, 8192, [1, 2]) == [16]


def test_draft_graphs_of_more_requests_than_verify_in_a_graph():
    """42 requests of 48 rows fill the largest graph; their drafts are a third of it."""
    sizes = [1, 2, 4, 512, *verify_sizes(tree_of(47), 1024, 8192, 2048)]
    assert max(sizes) == 42 * 48
    assert draft_sizes(tree_of(47), 1024, 8192, sizes)[-1] == 126 * 16


@pytest.mark.parametrize("max_num_batched_tokens", [512, 1024, 2048, 8192])
@pytest.mark.parametrize("depth", [7, 15])
def test_no_draft_graph_has_more_rows_than_a_step(max_num_batched_tokens, depth):
    """Of narrow trees more requests fit into a step than their drafts do."""
    tree = DDTreeConfig(
        budget=47,
        depth=depth,
        budget_per_batch_size=((1, 4, 47), (5, 16, 7), (17, 256, 3)),
    )
    largest = [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]
    own = verify_sizes(tree, 256, max_num_batched_tokens, 2048)
    draft = draft_sizes(tree, 256, max_num_batched_tokens, sorted({*largest, *own}))
    assert max(draft) <= max_num_batched_tokens
    # As many as fit, or as are verified.
    most = min(max_num_batched_tokens // (depth + 1), max(512, max(own)) // 4, 256)
    assert max(draft) == most * (depth + 1)
