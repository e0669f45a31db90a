# SPDX-License-Identifier: Apache-2.0
"""What vLLM's scheduler sees of a step -> the running schedule of its engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_dflash.calibrate.running import RunningSchedule
from vllm_dflash.config import DDTreeConfig
from vllm_dflash.logger import init_logger
from vllm_dflash.schedule import by_batch_size

logger = init_logger(__name__)


class StepWatch:
    """Reads finished steps in the order in which they were scheduled.

    Args:
        running: Gets what the steps have accepted.
        needs_chain: Whether a request with such sampling parameters is verified as a
            chain, which says nothing about trees.
    """

    def __init__(self, running: RunningSchedule, needs_chain: Callable[[Any], bool]):
        self.running = running
        self._needs_chain = needs_chain
        self._chains: set[str] = set()
        # Of the drafts made in the step before, which this one verifies.
        self._nodes = 0
        self._has_failed = False

    def observe(self, scheduled: Any, result: Any) -> None:
        """Read a step; must come before vLLM cuts answers at their stops, in place.

        Args:
            scheduled: vLLM's `SchedulerOutput`.
            result: Its `ModelRunnerOutput`.
        """
        if self._has_failed:
            return
        try:
            self._observe(scheduled, result)
        except Exception:
            # An engine must not end because of its statistics.
            self._has_failed = True
            logger.exception("vllm-dflash stays with the budget schedule there is")

    def _observe(self, scheduled: Any, result: Any) -> None:
        chains = self._chains
        if scheduled.finished_req_ids:
            chains -= scheduled.finished_req_ids
        for request in scheduled.scheduled_new_reqs:
            if self._needs_chain(request.sampling_params):
                chains.add(request.req_id)
        if not scheduled.num_scheduled_tokens:
            return
        nodes, self._nodes = self._nodes, scheduled.num_spec_tokens_to_schedule
        drafts = scheduled.scheduled_spec_decode_tokens
        if not drafts:
            self.running.step(0, 0, 0, is_verifying=False)
            return
        sampled, places = result.sampled_token_ids, result.req_id_to_index
        invalid = scheduled.num_invalid_spec_tokens or ()
        trees = accepted = 0
        for name, tokens in drafts.items():
            # Another number: cut by a limit of the step or of the request, by its
            # grammar, or drafted before the step that came last.
            if len(tokens) == nodes and name not in chains and name not in invalid:
                emitted = len(sampled[places[name]]) if name in places else 0
                if emitted:
                    trees += 1
                    accepted += emitted - 1
        self.running.step(nodes, trees, accepted, is_verifying=True)


def make_watch(
    vllm_config: Any,
    tree: DDTreeConfig,
    table: list[int],
    needs_chain: Callable[[Any], bool],
) -> StepWatch:
    """Return the watch over an engine whose schedule was calibrated.

    Args:
        vllm_config: Of the engine.
        tree: Its trees, with a measurement.
        table: The scheduler's numbers of nodes by batch size, as vLLM made it: the
            engine has captured their widths. Set to the calibrated schedule.
        needs_chain: See `StepWatch`.
    """
    schedule = tree.budget_per_batch_size
    assert tree.measurement is not None and schedule is not None
    # Without drafts any engine can decode, at worst with piecewise graphs.
    started = {0, *table[1:]}
    largest = len(table) - 1
    calibrated = by_batch_size(schedule, largest)
    batched = vllm_config.scheduler_config.max_num_batched_tokens
    compilation = vllm_config.compilation_config
    captured = compilation.max_cudagraph_capture_size
    if not compilation.cudagraph_mode or not captured:
        captured = batched

    def largest_batch(nodes: int) -> int:
        """Up to here there is room in a step, and a graph as in the measurement."""
        if nodes == 0:
            return largest
        own = (b for b in range(1, largest + 1) if calibrated[b] >= nodes)
        rows = nodes + 1
        fitting = min(captured // rows, batched // (rows + tree.depth), largest)
        return max(fitting, *own, 0)

    running = RunningSchedule(tree.measurement, schedule, table, started, largest_batch)
    return StepWatch(running, needs_chain)
