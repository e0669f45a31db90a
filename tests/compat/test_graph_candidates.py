# SPDX-License-Identifier: Apache-2.0
"""Every verify batch that the schedule allows finds a FULL graph of its width."""

import pytest
from graph_managers import make_manager
from vllm.config.compilation import CUDAGraphMode

from vllm_dflash.config import DDTreeConfig
from vllm_dflash.graphs import cover_no_drafts
from vllm_dflash.patches.cudagraph_utils import complete_candidates
from vllm_dflash.schedule import auto_schedule

pytestmark = pytest.mark.compat

SCHEDULES = {
    "8B": auto_schedule(47, 8e9),
    "1.7B": auto_schedule(47, 1.7e9),
    "measured": ((1, 1, 47), (2, 24, 31), (25, 32, 47), (33, 64, 31)),
}


def manager(monkeypatch, schedule, max_num_seqs=64, may_have_none=False):
    """vLLM's own manager over the sizes that an engine with this schedule captures."""
    return make_manager(
        monkeypatch,
        DDTreeConfig(budget=47, depth=15, budget_per_batch_size=schedule),
        max_num_seqs,
        16384,
        [1, 2, 4, *range(8, 257, 8), *range(272, 513, 16)],
        2048,
        cover_no_drafts if may_have_none else lambda config: None,
    )


def batches(schedule, max_num_seqs=64, most_tokens=2048):
    for first, last, nodes in schedule:
        if schedule[-1] == (first, last, nodes):
            last = max_num_seqs
        for num_reqs in range(first, min(last, max_num_seqs) + 1):
            if num_reqs * (nodes + 1) <= most_tokens:
                yield num_reqs, nodes + 1


def without_graph(made, schedule):
    return [
        (num_reqs, width)
        for num_reqs, width in batches(schedule)
        if made.dispatch(num_reqs, num_reqs * width, width, 0).cg_mode
        != CUDAGraphMode.FULL
    ]


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_batch_of_the_schedule_has_a_graph(monkeypatch, name):
    made = manager(monkeypatch, SCHEDULES[name])
    complete_candidates(made)
    assert without_graph(made, SCHEDULES[name]) == []
    for num_reqs, width in batches(SCHEDULES[name]):
        found = made.dispatch(num_reqs, num_reqs * width, width, 0)
        assert found.uniform_token_count == width
        assert found.num_reqs >= num_reqs
        # Padding stays within a quarter, as the captured sizes are chosen.
        assert found.num_reqs <= max(num_reqs + 1, num_reqs * 1.25)


def test_schedule_that_moves_has_graphs_wherever_it_may_go(monkeypatch):
    """Any of its widths, or none, at any batch size within the captured tokens."""
    schedule = ((1, 4, 47), (5, 12, 15), (13, 64, 7))
    assert 0 not in {nodes for _, _, nodes in schedule}
    made = manager(monkeypatch, schedule, may_have_none=True)
    complete_candidates(made)
    largest = made.compilation_config.max_cudagraph_capture_size
    for width in (48, 16, 8, 1):
        for num_reqs in range(1, min(64, largest // width) + 1):
            found = made.dispatch(num_reqs, num_reqs * width, width, 0)
            assert found.cg_mode == CUDAGraphMode.FULL, (num_reqs, width)
            assert found.uniform_token_count == width
    assert (
        manager(monkeypatch, schedule).dispatch(4, 4, 1, 0).cg_mode
        != CUDAGraphMode.FULL
    )


def test_vllms_own_lists_are_incomplete(monkeypatch):
    # The day that this fails, the patch can go.
    missing = without_graph(
        manager(monkeypatch, SCHEDULES["measured"]), SCHEDULES["measured"]
    )
    assert missing


def test_mixed_batches_keep_their_piecewise_graphs(monkeypatch):
    made = manager(monkeypatch, SCHEDULES["8B"])
    before = {
        key: [d for d in descs if d.cg_mode == CUDAGraphMode.PIECEWISE]
        for key, descs in made._candidates.items()
    }
    complete_candidates(made)
    for key, expected in before.items():
        descs = made._candidates[key]
        assert [d for d in descs if d.cg_mode == CUDAGraphMode.PIECEWISE] == expected
        # A graph for one width only must never be behind one that takes any batch.
        modes = [d.cg_mode == CUDAGraphMode.PIECEWISE for d in descs]
        assert modes == sorted(modes)
    mixed = made.dispatch(3, 100, None, 0)
    assert mixed.cg_mode == CUDAGraphMode.PIECEWISE
