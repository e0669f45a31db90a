# SPDX-License-Identifier: Apache-2.0
"""The tests' count of replayed graphs, on a manager of vLLM's without a GPU."""

from types import SimpleNamespace
from typing import Any

import graph_replays
import pytest
from graph_managers import make_manager
from graph_replays import GraphReplays
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu import cudagraph_utils

from vllm_dflash.config import DDTreeConfig

SCHEDULE = ((1, 2, 8), (3, 4, 0))


@pytest.fixture
def runner(monkeypatch) -> Any:
    """A runner of at most four requests whose target's graphs replay nothing."""
    tree = DDTreeConfig(budget=8, depth=4, budget_per_batch_size=SCHEDULE)
    offloader = SimpleNamespace(sync_prev_onload=lambda: None)
    monkeypatch.setattr(cudagraph_utils, "get_offloader", lambda: offloader)
    manager = make_manager(monkeypatch, tree, 4, 1024, [1, 2, 4])
    graph = SimpleNamespace(replay=lambda: None)
    for desc in manager._capture_descs[CUDAGraphMode.FULL]:
        manager.graphs[desc] = graph
    made = SimpleNamespace(
        vllm_config=manager.vllm_config,
        cudagraph_manager=manager,
        speculator=SimpleNamespace(),
    )
    monkeypatch.setattr(graph_replays, "model_runner", lambda llm: made)
    return made


def replay(runner: Any, num_reqs: int, width: int) -> None:
    manager = runner.cudagraph_manager
    manager.run_fullgraph(manager.dispatch(num_reqs, num_reqs * width, width, 0))


def test_sizes_that_are_due_and_those_that_were_missed(runner):
    replays = GraphReplays(None)
    # Three requests have no tree, so they take the graph of four single rows.
    assert replays.due == [(4, 1), (9, 9), (18, 9)]
    assert (27, 9) not in replays.due
    assert set(replays.due) < set(replays.captured)
    replay(runner, 3, 1)
    replay(runner, 2, 9)
    replay(runner, 2, 9)
    assert replays.verify == {(4, 1): 1, (18, 9): 2}
    assert replays.missing == [(9, 9)]
    assert str(replays) == (
        "verify graphs: 2 of 3 sizes replayed; tokens x rows of a request, times: "
        "4 x 1: 1, 18 x 9: 2; NEVER 9 x 9"
    )


def test_engines_without_graphs_or_trees_say_nothing(runner):
    runner.cudagraph_manager.graphs.clear()
    assert str(GraphReplays(None)) == ""
    runner.vllm_config.additional_config = {}
    replays = GraphReplays(None)
    assert str(replays) == "" and replays.due == replays.missing == []
