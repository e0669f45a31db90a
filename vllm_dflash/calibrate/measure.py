# SPDX-License-Identifier: Apache-2.0
"""Step times and accepted paths of an engine in this process.

One engine captures the CUDA graphs of every width. The scheduler looks the number of
drafts up by batch size in a table, which is overwritten here, so all widths are timed
on the same running requests.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import Any

from vllm_dflash.runner.runtime import find_runtime

# Multiples of one another: vLLM captures each size for every width, rounded up.
WIDTHS = (1, 4, 8, 16, 32, 48, 64, 96)
MAX_ROWS = 4096
WARM_STEPS = 4
TIMED_STEPS = 10
PASSES = 4
# Over all batch sizes, so that a busy spell of the machine meets one time of several.
ROUNDS = 4


def candidate_nodes(budget: int, depth: int) -> list[int]:
    """Numbers of nodes worth measuring under a budget, 0 (no drafts) first."""
    nodes = {width - 1 for width in WIDTHS if width - 1 <= budget}
    return sorted(nodes | {depth, budget})


def batch_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes worth measuring: powers of two, and the largest."""
    powers = itertools.takewhile(
        lambda size: size < max_num_seqs, (1 << i for i in range(32))
    )
    return [*powers, max_num_seqs]


def schedule_of_all(nodes: Sequence[int]) -> list[list[int]]:
    """A schedule that makes vLLM capture every width."""
    ordered = sorted(nodes, reverse=True)
    return [[i, i, count] for i, count in enumerate(ordered, 1)]


def capture_sizes(nodes: Sequence[int], sizes: Sequence[int], most: int) -> list[int]:
    """Rows of every batch to be timed."""
    rows = {size * (count + 1) for size in sizes for count in nodes}
    return sorted(r for r in rows if r <= most)


class Bench:
    """An engine whose number of nodes is set from outside."""

    def __init__(self, engine: Any):
        self.engine = engine
        core = engine.engine_core.engine_core
        self.scheduler = core.scheduler
        runtime = find_runtime(engine.vllm_config)
        assert runtime is not None, "the engine has no trees"
        self.runtime = runtime
        self._ids = itertools.count()

    def set_nodes(self, nodes: int) -> None:
        """Trees of so many nodes from the next step on, whatever the batch size."""
        lookup = self.scheduler.dynamic_sd_lookup
        lookup[:] = [nodes] * len(lookup)

    def add(self, prompts: Sequence[list[int]], **sampling: Any) -> list[str]:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        names = []
        for prompt in prompts:
            params = SamplingParams(
                detokenize=False, output_kind=RequestOutputKind.DELTA, **sampling
            )
            name = f"calibrate-{next(self._ids)}"
            self.engine.add_request(name, {"prompt_token_ids": prompt}, params)
            names.append(name)
        return names

    def drain(self) -> None:
        while self.engine.has_unfinished_requests():
            self.engine.step()

    def _run_all(self, size: int) -> None:
        """Step until all run at once, or are done: the KV cache may hold fewer."""
        while self.engine.has_unfinished_requests() and (
            len(self.scheduler.running) < size or self.scheduler.waiting
        ):
            self.engine.step()

    def time_sizes(
        self,
        prompts: Sequence[list[int]],
        sizes: Sequence[int],
        nodes: Sequence[int],
        room: int,
        rounds: int,
    ) -> dict[tuple[int, int], float]:
        """Milliseconds of a step by (batch size, nodes), the least of all rounds.

        Left out is what has more than ``MAX_ROWS`` rows; the rest as ``time_steps``.
        """
        best: dict[tuple[int, int], float] = {}
        for _ in range(rounds):
            for size in sizes:
                fitting = [n for n in nodes if size * (n + 1) <= MAX_ROWS]
                for count, ms in self.time_steps(prompts, size, fitting, room).items():
                    best[size, count] = min(ms, best.get((size, count), ms))
        return best

    def time_steps(
        self,
        prompts: Sequence[list[int]],
        size: int,
        nodes: Sequence[int],
        room: int,
    ) -> dict[int, float]:
        """Milliseconds of a step of ``size`` requests by number of nodes.

        Empty if the KV cache can't hold so many.

        Args:
            prompts: Token ids; taken in turn.
            size: Requests that run at once.
            nodes: Numbers of nodes to time.
            room: Tokens that a request may grow by.
        """
        import torch

        taken = list(itertools.islice(itertools.cycle(prompts), size))
        times: dict[int, list[float]] = {count: [] for count in nodes}
        names: list[str] = []
        # Forwards and back: a drift of the machine meets all alike.
        order = [*nodes, *reversed(nodes)] * (PASSES // 2)
        for count in order:
            self.set_nodes(count)
            if len(self.scheduler.running) < size:
                self.engine.abort_request(names)
                self.drain()
                names = self.add(taken, ignore_eos=True, max_tokens=room, temperature=0)
                self._run_all(size)
            for _ in range(WARM_STEPS):
                self.engine.step()
            start = time.perf_counter()
            for _ in range(TIMED_STEPS):
                self.engine.step()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if len(self.scheduler.running) == size:
                elapsed = time.perf_counter() - start
                times[count].append(1e3 * elapsed / TIMED_STEPS)
        self.engine.abort_request(names)
        self.drain()
        # Other work on the machine only ever adds time.
        return {n: min(t) for n, t in times.items() if t}

    def accepted_paths(
        self,
        prompts: Sequence[list[int]],
        budget: int,
        max_tokens: int,
        temperature: float,
    ) -> list[list[int]]:
        """Accepted nodes (root left out) of every verified tree of ``budget`` nodes."""
        compact = self.runtime.compactor.compact
        paths: list[list[int]] = []

        def record(step: Any, starts: Any, num_sampled: Any, num_reqs: int) -> None:
            lengths = step.tree_len[:num_reqs].tolist()
            rows = step.path[:num_reqs].tolist()
            for length, row, count in zip(
                lengths, rows, num_sampled.tolist(), strict=False
            ):
                # A shorter tree has met a limit of the request or of the step.
                if length == budget + 1:
                    paths.append(row[1:count])
            compact(step, starts, num_sampled, num_reqs)

        self.runtime.compactor.compact = record
        try:
            self.set_nodes(budget)
            self.add(prompts, max_tokens=max_tokens, temperature=temperature, seed=0)
            self.drain()
        finally:
            del self.runtime.compactor.compact
        return paths
