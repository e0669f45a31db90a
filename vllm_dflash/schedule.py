# SPDX-License-Identifier: Apache-2.0
"""How many nodes a tree has at which load: `ddtree.budget_per_batch_size`.

A verify step reads the target's weights once, whatever its number of rows, until the
rows are so many that arithmetic takes longer. So wide trees are nearly free for a few
requests and cost their full share for many: the automatic schedule keeps the rows of a
batch within what the weights' read hides. Any prefix of the node list is the best tree
of its size, so a smaller budget is a truncation.
"""

from __future__ import annotations

from typing import Any

from vllm_dflash.errors import option_error

BudgetSchedule = tuple[tuple[int, int, int], ...]

AUTO = "auto"
FIXED = "fixed"

# Last number of running requests and verify width there. Widths fill whole tiles of
# the matrix units. Measured on an H200 at Qwen3-8B's shape (docs/performance.md).
AUTO_WIDTHS = ((2, 48), (4, 32), (12, 16), (32, 8), (96, 4))


def auto_schedule(budget: int) -> BudgetSchedule | None:
    """Return the automatic schedule under a budget; None if it never varies.

    From the last range on a batch is decoded without drafts: verifying even three
    nodes a request then takes longer than the accepted tokens save.
    """
    schedule: list[tuple[int, int, int]] = []
    first = 1
    for index, (last, width) in enumerate(AUTO_WIDTHS):
        nodes = budget if index == 0 else min(budget, width - 1)
        if schedule and schedule[-1][2] == nodes:
            schedule[-1] = (schedule[-1][0], last, nodes)
        else:
            schedule.append((first, last, nodes))
        first = last + 1
    return (*schedule, (first, first, 0))


def parse_schedule(value: Any, budget: int, *, is_cpu: bool) -> BudgetSchedule | None:
    """Turn the option into inclusive `(first, last, nodes)` ranges; None is fixed.

    Raises:
        ValueError: The value, a range or a number of nodes is wrong.
    """
    if value is None:
        value = FIXED if is_cpu else AUTO
    if value == FIXED:
        return None
    if value == AUTO:
        return auto_schedule(budget)
    example = (
        f'"ddtree": {{"budget": {budget}, "budget_per_batch_size": '
        f"[[1, 8, {budget}], [9, 256, {min(budget, 7)}]]}}"
    )
    if not isinstance(value, list | tuple) or not value:
        raise option_error(
            f"ddtree.budget_per_batch_size is not a schedule (got {value!r})",
            f'"{AUTO}", "{FIXED}" and a list of [first, last, nodes] are allowed',
            example,
        )
    schedule = []
    next_first = 1
    for entry in value:
        if (
            not isinstance(entry, list | tuple)
            or len(entry) != 3
            or not all(type(item) is int for item in entry)
        ):
            raise option_error(
                f"ddtree.budget_per_batch_size has a wrong entry (got {entry!r})",
                "Each entry is [first, last, nodes], three integers",
                example,
            )
        first, last, nodes = entry
        if first != next_first or last < first:
            raise option_error(
                "ddtree.budget_per_batch_size has a gap, an overlap or an empty range "
                f"(got {entry!r}, expected a range that starts at {next_first})",
                "Ranges start at 1 and each continues the one before",
                example,
            )
        if not 0 <= nodes <= budget:
            raise option_error(
                "ddtree.budget_per_batch_size has a number of nodes out of range "
                f"(got {entry!r})",
                f"0 (no drafts) to {budget} (budget) is allowed",
                example,
            )
        schedule.append((first, last, nodes))
        next_first = last + 1
    if all(nodes == 0 for _, _, nodes in schedule):
        raise option_error(
            f"ddtree.budget_per_batch_size never drafts (got {value!r})",
            "At least one range needs nodes",
            example,
        )
    return tuple(schedule)
