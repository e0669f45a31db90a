# SPDX-License-Identifier: Apache-2.0
"""A kept schedule that follows the acceptance of the traffic there is.

A calibration knows what steps cost, which stays true, and how much its own prompts
accepted, which other traffic need not. ``r`` says how they compare: accepted nodes over
those that the calibration expects of as many trees of the same size. A tree of ``n``
nodes is then taken to commit ``1 + r * (tokens[n] - 1)`` tokens, and the schedule is
chosen again when ``r`` has moved.

Without drafts nothing is accepted and nothing is learnt, so now and then the calibrated
schedule is served for a few steps, and these decide.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from vllm_dflash.calibrate.choose import choose_schedule, interpolate_ms
from vllm_dflash.logger import init_logger
from vllm_dflash.schedule import (
    BudgetSchedule,
    Measurement,
    by_batch_size,
    to_ranges,
)

logger = init_logger(__name__)

MAX_RATIO = 2.0
# Below this share of the calibrated acceptance a relative change is noise.
_LEAST_RATIO = 0.1


@dataclass(frozen=True)
class Pace:
    """How fast the schedule follows.

    Attributes:
        half_life: Trees after which one counts half.
        prior: Trees that the calibration itself counts for at the start.
        check_every: Trees between two looks at the ratio.
        change: Move of the ratio, relative to the one that the schedule was chosen
            with, that lets it be chosen again.
        probe_after: Steps without a verified draft until a probe.
        probe_steps: Steps of a probe.
        carried: Trees that everything before a probe counts for beside its own.
        log_interval_s: Least time between two lines in the log.
    """

    half_life: float = 2000
    prior: float = 300
    check_every: int = 512
    change: float = 0.1
    probe_after: int = 4096
    probe_steps: int = 64
    carried: float = 16
    log_interval_s: float = 60


PACE = Pace()


class AcceptanceRatio:
    """Accepted nodes over expected ones, the latest trees weighing most."""

    def __init__(self, tokens: Mapping[int, float], largest: int, pace: Pace):
        self._tokens = tokens
        self._half_life = pace.half_life
        self._trees = pace.prior
        self._expected = self._accepted = pace.prior * (tokens[largest] - 1)

    @property
    def value(self) -> float:
        """0 to ``MAX_RATIO``; 1 is what was calibrated."""
        if self._expected <= 0:
            return 1.0
        return min(self._accepted / self._expected, MAX_RATIO)

    def observe(self, nodes: int, trees: int, accepted: int) -> None:
        """Count trees of so many nodes, and the nodes that all of them accepted."""
        keep = 0.5 ** (trees / self._half_life)
        self._trees = keep * self._trees + trees
        self._accepted = keep * self._accepted + accepted
        self._expected = keep * self._expected + trees * (self._tokens[nodes] - 1)

    def fade(self, trees: float) -> None:
        """Let all that was counted weigh no more than so many trees."""
        if self._trees > trees:
            share = trees / self._trees
            self._trees *= share
            self._accepted *= share
            self._expected *= share


def within(
    step_ms: Mapping[tuple[int, int], float],
    nodes: Collection[int],
    largest_batch: Callable[[int], int],
) -> dict[tuple[int, int], float]:
    """Step times of some numbers of nodes, each up to its largest batch size."""
    found = {}
    for count in nodes:
        limit = largest_batch(count)
        sizes = [b for b, n in step_ms if n == count and b <= limit]
        found.update({(b, count): step_ms[b, count] for b in sizes})
        # The last size may lie between two that were measured.
        at_limit = interpolate_ms(step_ms, limit, count)
        if at_limit is not None:
            found[limit, count] = at_limit
    return found


class RunningSchedule:
    """Nodes by batch size, in the scheduler's own table, kept up to date in place.

    Args:
        measurement: What was calibrated.
        calibrated: The schedule chosen then.
        table: The scheduler's: nodes at the index of the batch size.
        nodes: Numbers of nodes that the engine can serve, those of ``calibrated`` at
            batch sizes up to the largest among them.
        largest_batch: The largest batch size for a number of nodes.
        pace: See there.
        clock: Seconds.
    """

    def __init__(
        self,
        measurement: Measurement,
        calibrated: BudgetSchedule,
        table: list[int],
        nodes: Collection[int],
        largest_batch: Callable[[int], int],
        pace: Pace | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.pace = pace or PACE
        self._table = table
        self._max_num_seqs = len(table) - 1
        self._calibrated = by_batch_size(calibrated, self._max_num_seqs)
        self._current = self._calibrated
        table[:] = self._current
        tokens = dict(measurement.tokens)
        known = sorted(count for count in nodes if count in tokens)
        self._step_ms = within(
            {(b, n): ms for b, n, ms in measurement.step_ms}, known, largest_batch
        )
        # By number of nodes; those that are no candidates are never read.
        self._tokens = [tokens.get(n, 1.0) for n in range(known[-1] + 1)]
        self._observable = frozenset(n for n in known if tokens[n] > 1)
        self.ratio = AcceptanceRatio(tokens, known[-1], self.pace)
        self._chosen_with = 1.0
        self._unchecked = self._idle_steps = self._probe_left = 0
        self._is_first_of_probe = False
        self._clock = clock
        self._logged = self._current
        self._logged_at = -float("inf")
        self._is_log_due = False

    @property
    def schedule(self) -> BudgetSchedule:
        """The schedule in use; during a probe the one to go back to."""
        return to_ranges(self._current)

    @property
    def is_probing(self) -> bool:
        """Whether the calibrated schedule is being tried again."""
        return self._probe_left > 0

    def step(self, nodes: int, trees: int, accepted: int, is_verifying: bool) -> None:
        """Take a finished step into account; the next one may be scheduled otherwise.

        Args:
            nodes: Of each of the trees.
            trees: Trees of the step that were verified as they were built.
            accepted: Nodes accepted in all of them.
            is_verifying: Whether the step verified any draft.
        """
        if trees and nodes in self._observable:
            if self._is_first_of_probe:
                self._is_first_of_probe = False
                self.ratio.fade(self.pace.carried)
            self.ratio.observe(nodes, trees, accepted)
            self._unchecked += trees
        if self._is_log_due:
            self._log()
        if self._probe_left:
            self._probe_left -= 1
            if not self._probe_left:
                self._end_probe()
        elif self._unchecked >= self.pace.check_every:
            self._unchecked = 0
            chosen_with = self._chosen_with
            moved = abs(self.ratio.value - chosen_with)
            if moved > self.pace.change * max(chosen_with, _LEAST_RATIO):
                self._choose()
        elif is_verifying:
            self._idle_steps = 0
        else:
            self._idle_steps += 1
            if self._idle_steps >= self.pace.probe_after:
                self._begin_probe()

    def _begin_probe(self) -> None:
        self._idle_steps = 0
        if self._current == self._calibrated:
            # It has no drafts at this load either.
            return
        self._probe_left = self.pace.probe_steps
        self._is_first_of_probe = True
        self._table[:] = self._calibrated

    def _end_probe(self) -> None:
        if self._is_first_of_probe:
            # The load has none: nothing was learnt.
            self._is_first_of_probe = False
            self._table[:] = self._current
            return
        self._unchecked = 0
        self._choose()

    def _choose(self) -> None:
        ratio = self._chosen_with = self.ratio.value
        tokens = [1 + ratio * (mean - 1) for mean in self._tokens]
        schedule = choose_schedule(self._step_ms, tokens, self._max_num_seqs)
        self._current = by_batch_size(schedule, self._max_num_seqs)
        self._table[:] = self._current
        self._is_log_due = True
        self._log()

    def _log(self) -> None:
        """Say what has changed since the last line, unless that was just now."""
        if self._current == self._logged:
            self._is_log_due = False
            return
        now = self._clock()
        if now - self._logged_at < self.pace.log_interval_s:
            return
        self._logged, self._logged_at = self._current, now
        self._is_log_due = False
        logger.info(
            "Trees accept %.2f of what was calibrated: budget by batch size is now %s",
            self._chosen_with,
            [list(entry) for entry in self.schedule],
        )
