# SPDX-License-Identifier: Apache-2.0
"""Step times and acceptance by number of nodes -> the budget schedule.

A step of ``b`` requests with trees of ``n`` nodes commits ``b * tokens[n]`` tokens in
``ms(b, n)``. Every prefix of a node list is the best tree of its size, so one run with
the largest tree gives ``tokens`` for all smaller ones: an accepted path counts up to
its first node beyond ``n``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vllm_dflash.schedule import BudgetSchedule, by_batch_size, to_ranges

# Each width brings its own CUDA graphs.
MAX_BUDGETS = 5
# A difference in speed that is not worth another range.
TOLERANCE = 0.02


def tokens_by_nodes(
    paths: Sequence[Sequence[int]], budget: int, depth: int
) -> list[float]:
    """Mean tokens a step commits with trees of 0 to ``budget`` nodes.

    Args:
        paths: Accepted nodes of each verified tree, root left out, ascending. The trees
            had ``budget`` nodes.
        budget: Nodes of the largest tree.
        depth: Tokens that a draft can hold; bounds a path.

    Raises:
        ValueError: No tree was verified, or a path can't be one of such a tree.
    """
    if not paths:
        raise ValueError("no tree was verified (got no paths)")
    accepted = [0] * (budget + 1)
    for path in paths:
        if len(path) > depth or any(not 1 <= node <= budget for node in path):
            raise ValueError(f"not a path of a tree of {budget} nodes (got {path})")
        for node in path:
            accepted[node] += 1
    tokens, total = [], 0
    for nodes in range(budget + 1):
        total += accepted[nodes]
        tokens.append(1 + total / len(paths))
    return tokens


def interpolate_ms(
    measured: Mapping[tuple[int, int], float], batch: int, nodes: int
) -> float | None:
    """Step time between measured batch sizes, linear; None outside of them.

    A number of nodes may lack the larger batch sizes: they had too many rows.
    """
    known = sorted(b for b, n in measured if n == nodes)
    if not known or not known[0] <= batch <= known[-1]:
        return None
    high = next(b for b in known if b >= batch)
    low = max(b for b in known if b <= batch)
    if low == high:
        return measured[low, nodes]
    share = (batch - low) / (high - low)
    return (1 - share) * measured[low, nodes] + share * measured[high, nodes]


def choose_schedule(
    measured: Mapping[tuple[int, int], float],
    tokens: Sequence[float],
    max_num_seqs: int,
) -> BudgetSchedule:
    """The number of nodes with the most tokens per second, by batch size.

    More requests never get larger trees, which keeps noise out, and a range must gain
    ``TOLERANCE`` over all batch sizes, weighted by ``1 / batch`` (loads of 1 to 2 and
    of 32 to 64 requests count alike).

    Args:
        measured: Milliseconds of a step by (batch size, nodes); 0 nodes is a step
            without drafts. Batch size 1 must be there.
        tokens: Mean tokens of a step by number of nodes, from ``tokens_by_nodes``.
        max_num_seqs: Largest batch size to decide for.
    """
    candidates = sorted({nodes for _, nodes in measured}, reverse=True)
    gains: list[dict[int, float]] = []
    for batch in range(1, max_num_seqs + 1):
        row = {}
        for nodes in candidates:
            ms = interpolate_ms(measured, batch, nodes)
            if ms is not None and ms > 0:
                row[nodes] = math.log(tokens[nodes] / ms) / batch
        if not row:
            # Nothing was measured for so many: the last range holds for them.
            break
        gains.append(row)
    price = TOLERANCE
    while True:
        schedule = to_ranges([0, *_best_descent(gains, price)])
        if len(schedule) <= MAX_BUDGETS:
            return schedule
        price *= 1.1


@dataclass(frozen=True)
class Comparison:
    """A schedule's choice at one batch size beside the best that was measured.

    Attributes:
        nodes: What the schedule chooses.
        best: The number of nodes with the most tokens per second.
    """

    batch: int
    nodes: int
    tokens_per_s: float
    best: int
    best_tokens_per_s: float

    @property
    def ratio(self) -> float:
        """Of the schedule to the best."""
        return self.tokens_per_s / self.best_tokens_per_s


def compare(
    schedule: BudgetSchedule,
    # Milliseconds of a step by (batch size, nodes)
    measured: Mapping[tuple[int, int], float],
    # Mean tokens of a step by number of nodes
    tokens: Sequence[float],
) -> list[Comparison]:
    """Compare a schedule with every fixed number of nodes, by measured batch size.

    Batch sizes at which the schedule's own choice was not measured are left out.
    """
    found = []
    batches = sorted({b for b, _ in measured})
    chosen = by_batch_size(schedule, batches[-1])
    for batch in batches:
        speeds = {
            nodes: 1e3 * batch * tokens[nodes] / ms
            for (b, nodes), ms in measured.items()
            if b == batch
        }
        own = chosen[batch]
        if own in speeds:
            best = max(speeds, key=speeds.__getitem__)
            found.append(Comparison(batch, own, speeds[own], best, speeds[best]))
    return found


def _best_descent(gains: list[dict[int, float]], price: float) -> list[int]:
    """Numbers of nodes by batch size, never rising, with the largest sum of gains.

    Dynamic programming: the best way to each (batch size, nodes) comes from the same
    number of nodes, or for a price from a larger one.
    """
    best = {nodes: (gain, [nodes]) for nodes, gain in gains[0].items()}
    for row in gains[1:]:
        step = {}
        for nodes, gain in row.items():
            ways = [
                (value - (price if last != nodes else 0.0), way)
                for last, (value, way) in best.items()
                if last >= nodes
            ]
            if ways:
                value, way = max(ways, key=lambda entry: entry[0])
                step[nodes] = (value + gain, [*way, nodes])
        best = step
    return max(best.values(), key=lambda entry: entry[0])[1]
