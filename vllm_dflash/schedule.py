# SPDX-License-Identifier: Apache-2.0
"""How many nodes a tree has at which load: `ddtree.budget_per_batch_size`.

A verify step reads the target's weights once, whatever its number of rows, until the
rows are so many that arithmetic takes longer. So wide trees are nearly free for a few
requests and cost their full share for many: the automatic schedule keeps the rows of a
batch within what costs little. Its two constants fit step times of an H200 at
Qwen3-8B's shape (docs/performance.md). Any prefix of the node list is the best tree of
its size, so a smaller budget is a truncation.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm_dflash.errors import option_error

BudgetSchedule = tuple[tuple[int, int, int], ...]

AUTO = "auto"
FIXED = "fixed"

# Whole tiles of the matrix units; the first is the default budget and its root.
WIDTHS = (48, 32, 16, 8, 4)
# Rows of a batch up to which more of them cost little. The first part is what the read
# of the weights hides (the ratio of arithmetic to bandwidth, which is alike on current
# GPUs); the second what a step's fixed work hides, which small models have more of.
_ROWS_OF_WEIGHTS = 80
_ROW_PARAMETERS_OF_OVERHEAD = 0.45e12
# Past this multiple even the narrowest tree costs more than its tokens save.
_MOST_ROWS = 3
DEFAULT_PARAMETERS = 8e9


@dataclass(frozen=True)
class Measurement:
    """What `vllm-dflash calibrate` has measured beside the schedule that it chose.

    Attributes:
        step_ms: `(batch size, nodes, milliseconds)` of steps; 0 nodes is no drafts.
        tokens: `(nodes, mean tokens of a step)`.
    """

    step_ms: tuple[tuple[int, int, float], ...]
    tokens: tuple[tuple[int, float], ...]

    @classmethod
    def from_values(cls, step_ms: Any, tokens_by_nodes: Any) -> Measurement:
        """Read JSON values: a list of triples, and a dict with numbers as strings.

        Raises:
            ValueError: They are no step times with their tokens.
        """
        try:
            found = cls(
                tuple((_whole(b), _whole(n), float(ms)) for b, n, ms in step_ms),
                tuple((int(n), float(mean)) for n, mean in tokens_by_nodes.items()),
            )
        except (AttributeError, TypeError) as error:
            raise ValueError(f"it holds no step times ({error})") from error
        tokens = dict(found.tokens)
        if (
            all(ms > 0 and math.isfinite(ms) for _, _, ms in found.step_ms)
            and all(mean >= 1 and math.isfinite(mean) for mean in tokens.values())
            and all(b >= 1 and n in tokens for b, n, _ in found.step_ms)
            and (1, 0) in {(b, n) for b, n, _ in found.step_ms}
        ):
            return found
        raise ValueError("its step times or tokens are out of range")

    def to_values(self) -> dict[str, Any]:
        """Return the arguments of `from_values`, as JSON has them."""
        return {
            "step_ms": [list(entry) for entry in self.step_ms],
            "tokens_by_nodes": {str(nodes): mean for nodes, mean in self.tokens},
        }


def _whole(value: Any) -> int:
    if type(value) is not int:
        raise TypeError(f"got {value!r} for a whole number")
    return value


def by_batch_size(schedule: BudgetSchedule, largest: int) -> list[int]:
    """Return the nodes of each batch size, as vLLM's scheduler keeps them: 0 first.

    The last range holds for all larger batches.
    """
    nodes = [0] * (largest + 1)
    for first, last, count in schedule:
        for batch in range(first, min(last, largest) + 1):
            nodes[batch] = count
    for batch in range(schedule[-1][1] + 1, largest + 1):
        nodes[batch] = schedule[-1][2]
    return nodes


def to_ranges(nodes_by_batch_size: list[int]) -> BudgetSchedule:
    """Return the schedule of a list that `by_batch_size` made."""
    schedule: list[tuple[int, int, int]] = []
    for batch, nodes in enumerate(nodes_by_batch_size[1:], 1):
        if schedule and schedule[-1][2] == nodes:
            schedule[-1] = (schedule[-1][0], batch, nodes)
        else:
            schedule.append((batch, batch, nodes))
    return tuple(schedule)


def estimate_parameters(hf_config: Any, tensor_parallel_size: int) -> float:
    """Parameters that one token of a decoder-only model multiplies with, on one GPU.

    Read from the usual names of a Hugging Face config; a mixture of experts counts the
    experts of one token. Unknown layouts count as ``DEFAULT_PARAMETERS``.
    """
    try:
        layers = layer_configs(hf_config)
        total = sum(map(_layer_parameters, layers))
        if len(layers) == 1:
            total *= hf_config.num_hidden_layers
        total += hf_config.hidden_size * hf_config.vocab_size
    except (AttributeError, TypeError, ZeroDivisionError):
        return DEFAULT_PARAMETERS
    return total / tensor_parallel_size


def layer_configs(hf_config: Any) -> list[Any]:
    """Return the config of each layer, or the one that all of them have.

    Where layers differ (Gemma 4), transformers refuses to name one value for all.
    """
    if getattr(hf_config, "is_heterogeneous", False):
        return list(hf_config.per_layer_config)
    return [hf_config]


def _layer_parameters(config: Any) -> float:
    hidden, heads = config.hidden_size, config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_size = getattr(config, "head_dim", None) or hidden // heads
    experts = getattr(config, "num_experts_per_tok", None)
    width = getattr(config, "moe_intermediate_size", None)
    if not experts or not width:
        experts, width = experts or 1, config.intermediate_size
    return 2 * hidden * head_size * (heads + kv_heads) + 3 * hidden * width * experts


def auto_schedule(budget: int, parameters: float) -> BudgetSchedule:
    """Return the automatic schedule of a model under a budget.

    From the last range on a batch is decoded without drafts.
    """
    rows = _ROWS_OF_WEIGHTS + _ROW_PARAMETERS_OF_OVERHEAD / parameters
    schedule: list[tuple[int, int, int]] = []
    first = 1
    for index, width in enumerate(WIDTHS):
        is_narrowest = index == len(WIDTHS) - 1
        last = int(rows * (_MOST_ROWS if is_narrowest else 1) // width)
        nodes = budget if index == 0 else min(budget, width - 1)
        if index == 0:
            # One request always gets the whole tree.
            last = max(last, 1)
        if last < first:
            continue
        if schedule and schedule[-1][2] == nodes:
            schedule[-1] = (schedule[-1][0], last, nodes)
        else:
            schedule.append((first, last, nodes))
        first = last + 1
    return (*schedule, (first, first, 0))


def parse_schedule(
    value: Any,
    budget: int,
    *,
    is_cpu: bool,
    parameters: float = DEFAULT_PARAMETERS,
    find_measured: Callable[[], BudgetSchedule | None] | None = None,
) -> BudgetSchedule | None:
    """Turn the option into inclusive `(first, last, nodes)` ranges; None is fixed.

    Args:
        value: The option, None if it was not given.
        budget: The largest number of nodes.
        is_cpu: The default is `fixed` there and `auto` on a GPU.
        parameters: Of the target, for `auto`.
        find_measured: Looks up what `vllm-dflash calibrate` has measured; `auto` takes
            that before the formula.

    Raises:
        ValueError: The value, a range or a number of nodes is wrong.
    """
    if value is None:
        value = FIXED if is_cpu else AUTO
    if value == FIXED:
        return None
    if value == AUTO:
        measured = None if find_measured is None else find_measured()
        return measured or auto_schedule(budget, parameters)
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
