# SPDX-License-Identifier: Apache-2.0
"""The `ddtree` option of `speculative_config`: parse, validate, freeze.

Travels to the workers as a plain dict in `vllm_config.additional_config["ddtree"]`,
because vLLM's own config classes refuse new fields.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm_dflash.errors import option_error
from vllm_dflash.schedule import (
    DEFAULT_PARAMETERS,
    BudgetSchedule,
    Measurement,
    parse_schedule,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig

OPTION_KEY = "ddtree"

# With the root 48 rows: whole tiles of the matrix units, at any batch size.
DEFAULT_BUDGET = 47
DEFAULT_BUDGET_CPU = 16
MAX_BUDGET = 255
DEFAULT_MAX_CHILDREN = 8
MAX_MAX_CHILDREN = 32

OPTION_NAMES = (
    "budget",
    "budget_per_batch_size",
    "max_children",
    "scale_by_temperature",
    "use_noise",
)
_EXAMPLE = '"ddtree": {"budget": 47}'


@dataclass(frozen=True)
class DDTreeConfig:
    """What one engine's trees look like.

    Attributes:
        budget: Nodes of a tree, root excluded; what vLLM is told as
            `num_speculative_tokens`.
        depth: Draft depth, the mask tokens of the DFlash block.
        max_children: Candidates per depth.
        scale_by_temperature: Whether the tree scores of a request at T > 0 are
            log-probabilities at that temperature.
        use_noise: Whether candidates of a request at T > 0 are ranked with the noise of
            the target's draw, which its seed gives away.
        budget_per_batch_size: `(first, last, nodes)` of inclusive ranges of the number
            of running requests, contiguous from 1; None is `budget` everywhere.
        demanded: The user typed `ddtree`: refuse instead of serving a chain.
        measurement: What the schedule was chosen from, if `vllm-dflash calibrate` did
            and "auto" took it; it then follows the running acceptance.
    """

    budget: int
    depth: int
    max_children: int = DEFAULT_MAX_CHILDREN
    scale_by_temperature: bool = False
    use_noise: bool = True
    budget_per_batch_size: BudgetSchedule | None = None
    demanded: bool = False
    measurement: Measurement | None = None

    @property
    def width(self) -> int:
        """Rows of one verify: the root and its nodes."""
        return self.budget + 1

    @property
    def widths(self) -> tuple[int, ...]:
        """Every verify width in use, ascending."""
        if self.budget_per_batch_size is None:
            return (self.width,)
        return tuple(sorted({nodes + 1 for _, _, nodes in self.budget_per_batch_size}))

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-like values, for `additional_config`."""
        values = dataclasses.asdict(self)
        if self.budget_per_batch_size is not None:
            values["budget_per_batch_size"] = [
                list(entry) for entry in self.budget_per_batch_size
            ]
        del values["measurement"]
        if self.measurement is not None:
            values["measurement"] = self.measurement.to_values()
        return values

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> DDTreeConfig:
        """Restore what `to_dict` returned."""
        schedule = values["budget_per_batch_size"]
        if schedule is not None:
            schedule = tuple((first, last, nodes) for first, last, nodes in schedule)
        measurement = values.get("measurement")
        if measurement is not None:
            measurement = Measurement.from_values(**measurement)
        restored = {"budget_per_batch_size": schedule, "measurement": measurement}
        return cls(**{**values, **restored})


def get_ddtree_config(vllm_config: VllmConfig) -> DDTreeConfig | None:
    """Return the tree options of an engine; None is vLLM's own behaviour."""
    speculative_config = vllm_config.speculative_config
    if speculative_config is None or speculative_config.method != "dflash":
        return None
    additional_config = vllm_config.additional_config
    if not isinstance(additional_config, dict):
        return None
    values = additional_config.get(OPTION_KEY)
    return None if values is None else DDTreeConfig.from_dict(values)


def parse_ddtree_option(
    value: Any,
    *,
    num_speculative_tokens: int | None,
    block_size: int | None,
    is_cpu: bool,
    parameters: float = DEFAULT_PARAMETERS,
    find_measured: Callable[[int, int], BudgetSchedule | None] | None = None,
) -> DDTreeConfig | None:
    """Turn the value of the key `ddtree` into options.

    Args:
        value: None (key absent), a bool or a dict.
        num_speculative_tokens: The user's draft depth; None is the draft's largest.
        block_size: The draft checkpoint's block size; None if it names none.
        is_cpu: Whether the CPU's default budget applies.
        parameters: Of the target on one GPU, for the automatic schedule.
        find_measured: Looks up a measured schedule by (budget, depth).

    Returns:
        The options, or None if the user has switched trees off.

    Raises:
        ValueError: A key, type or range is wrong, or the draft can't have that depth.
    """
    if value is False:
        return None
    if value is None or value is True:
        options: dict[str, Any] = {}
    elif isinstance(value, dict):
        options = value
    else:
        raise option_error(
            f"ddtree is neither a switch nor a set of options (got {value!r})",
            "true, false and an object are allowed",
            _EXAMPLE,
        )
    unknown = sorted(str(key) for key in options if key not in OPTION_NAMES)
    if unknown:
        raise option_error(
            f"ddtree has no option {', '.join(unknown)} (got {options!r})",
            f"The options are {', '.join(OPTION_NAMES)}",
            _EXAMPLE,
        )

    depth = resolve_depth(num_speculative_tokens, block_size)
    default_budget = max(DEFAULT_BUDGET_CPU if is_cpu else DEFAULT_BUDGET, depth)
    budget = _int_in_range(
        options, "budget", default_budget, depth, MAX_BUDGET, floor_is_depth=True
    )
    max_children = _int_in_range(
        options, "max_children", DEFAULT_MAX_CHILDREN, 1, MAX_MAX_CHILDREN
    )
    return DDTreeConfig(
        budget=budget,
        depth=depth,
        max_children=max_children,
        scale_by_temperature=_switch(options, "scale_by_temperature", False),
        use_noise=_switch(options, "use_noise", True),
        budget_per_batch_size=parse_schedule(
            options.get("budget_per_batch_size"),
            budget,
            is_cpu=is_cpu,
            parameters=parameters,
            find_measured=(
                None
                if find_measured is None
                else functools.partial(find_measured, budget, depth)
            ),
        ),
        demanded=value is not None,
    )


def _switch(options: dict[str, Any], name: str, default: bool) -> bool:
    value = options.get(name, default)
    if not isinstance(value, bool):
        raise option_error(
            f"ddtree.{name} is not a switch (got {value!r})",
            "true and false are allowed",
            f'"ddtree": {{"{name}": {str(not default).lower()}}}',
        )
    return value


def resolve_depth(num_speculative_tokens: int | None, block_size: int | None) -> int:
    """Return the draft depth `K`.

    Raises:
        ValueError: The draft checkpoint can't draft that many tokens.
    """
    if block_size is not None and not (_is_int(block_size) and block_size >= 2):
        raise option_error(
            "the draft has no mask token to draft with (got block_size "
            f"{block_size!r})",
            "A DFlash draft has a block_size of at least 2",
            '"model": with another draft',
        )
    if num_speculative_tokens is None:
        if block_size is None:
            raise option_error(
                "the draft checkpoint names no block_size (got none)",
                "Without it num_speculative_tokens, the draft depth, has no default",
                '"num_speculative_tokens": 15',
            )
        return block_size - 1
    limit = MAX_BUDGET if block_size is None else min(block_size - 1, MAX_BUDGET)
    if not _is_int(num_speculative_tokens) or not 1 <= num_speculative_tokens <= limit:
        named = f", for the draft's block_size {block_size}" if block_size else ""
        raise option_error(
            "num_speculative_tokens is not a depth this draft can reach "
            f"(got {num_speculative_tokens!r})",
            f"1 to {limit} is allowed{named}",
            f'"num_speculative_tokens": {limit}',
        )
    return num_speculative_tokens


def _int_in_range(
    options: dict[str, Any],
    name: str,
    default: int,
    low: int,
    high: int,
    floor_is_depth: bool = False,
) -> int:
    value = options.get(name, default)
    if not _is_int(value) or not low <= value <= high:
        reason = (
            ", at least one node for each of the num_speculative_tokens"
            if floor_is_depth
            else ""
        )
        raise option_error(
            f"ddtree.{name} is out of range (got {value!r})",
            f"{low} to {high} is allowed{reason}",
            f'"ddtree": {{"{name}": {default}}}',
        )
    return value


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
