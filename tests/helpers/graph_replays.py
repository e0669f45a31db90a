# SPDX-License-Identifier: Apache-2.0
"""Which CUDA graphs an in-process engine with trees has replayed, and how often."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

from engines import model_runner

from vllm_dflash.config import DDTreeConfig, get_ddtree_config

# Tokens of a graph, padding included, and rows of each of its requests.
Size = tuple[int, int]


class GraphReplays:
    """Counts from now on; an engine without graphs or without trees has no sizes.

    Attributes:
        verify: Replays of the target's FULL graphs for batches of equal widths.
        draft: Replays of the draft's.
        captured: Sizes for which the target has such a graph.
        due: Those among them that a batch of verifies of the engine's schedule can use.
            vLLM captures every width for every number of requests.
        draft_due: Sizes of the draft's graphs for a batch of up to ``max_num_seqs``.
    """

    def __init__(self, llm: Any):
        runner = model_runner(llm)
        self.verify: Counter[Size] = Counter()
        self.draft: Counter[Size] = Counter()
        self.captured: list[Size] = []
        self.due: list[Size] = []
        self.draft_due: list[Size] = []
        tree = get_ddtree_config(runner.vllm_config)
        if tree is None:
            return
        batches = _verify_batches(tree, runner.vllm_config.scheduler_config)
        manager = runner.cudagraph_manager
        if manager is not None and manager.graphs:
            self.captured = sorted(filter(None, map(_size, manager.graphs)))
            self.due = _sizes_of(manager, batches)
            _count(manager, self.verify)
        manager = getattr(runner.speculator, "query_cudagraph_manager", None)
        if manager is not None and manager.graphs:
            drafts = [(count, tree.depth + 1) for count, width in batches if width > 1]
            self.draft_due = _sizes_of(manager, drafts)
            _count(manager, self.draft)

    @property
    def missing(self) -> list[Size]:
        """Sizes of verify batches whose graph was never replayed."""
        return [size for size in self.due if not self.verify[size]]

    @property
    def missing_drafts(self) -> list[Size]:
        return [size for size in self.draft_due if not self.draft[size]]

    def __str__(self) -> str:
        """A line for the verify and one for the draft; empty without graphs."""
        kinds = (
            ("verify", self.verify, self.due, self.missing),
            ("draft", self.draft, self.draft_due, self.missing_drafts),
        )
        return "\n".join(
            f"{name} graphs: {len(due) - len(missing)} of {len(due)} sizes replayed; "
            f"tokens x rows of a request, times: {_listed(counts)}"
            + (f"; NEVER {_names(missing)}" if missing else "")
            for name, counts, due, missing in kinds
            if due
        )


def _verify_batches(tree: DDTreeConfig, scheduling: Any) -> list[tuple[int, int]]:
    """(requests, rows of each) of the batches of whole trees that can come."""
    largest = scheduling.max_num_seqs
    tiers = tree.budget_per_batch_size or ((1, largest, tree.budget),)
    # The last range goes on to the largest batch.
    ends = [*(last for _, last, _ in tiers[:-1]), largest]
    return [
        (count, nodes + 1)
        for (first, _, nodes), end in zip(tiers, ends, strict=True)
        for count in range(first, min(end, largest) + 1)
        # A step keeps room for the draft beside the rows of a request.
        if count * (nodes + 1 + tree.depth) <= scheduling.max_num_batched_tokens
    ]


def _size(desc: Any) -> Size | None:
    """None for a graph of batches of mixed widths."""
    width = desc.uniform_token_count
    return None if width is None else (desc.num_tokens, width)


def _sizes_of(manager: Any, batches: Iterable[tuple[int, int]]) -> list[Size]:
    """Sizes of the graphs that the manager chooses for (requests, rows of each)."""
    from vllm.config.compilation import CUDAGraphMode

    descs = [
        manager.dispatch(count, count * width, width, 0) for count, width in batches
    ]
    sizes = {_size(desc) for desc in descs if desc.cg_mode == CUDAGraphMode.FULL}
    return sorted(size for size in sizes if size is not None)


def _count(manager: Any, counts: Counter[Size]) -> None:
    replay = manager.run_fullgraph

    def counted(desc: Any) -> Any:
        size = _size(desc)
        if size is not None:
            counts[size] += 1
        return replay(desc)

    manager.run_fullgraph = counted


def _names(sizes: Iterable[Size]) -> str:
    return ", ".join(f"{tokens} x {width}" for tokens, width in sizes)


def _listed(counts: Counter[Size]) -> str:
    by_size = sorted(counts.items(), key=lambda item: (item[0][1], item[0][0]))
    return ", ".join(f"{_names([size])}: {count}" for size, count in by_size) or "none"
