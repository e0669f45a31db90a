# SPDX-License-Identifier: Apache-2.0
"""`vllm/v1/metrics/loggers.py`: a stat logger for trees beside vLLM's own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_dflash.config import get_ddtree_config

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.metrics.loggers import StatLoggerFactory


def wrap_stat_logger_manager(original: Callable[..., None]) -> Callable[..., None]:
    """Return `StatLoggerManager.__init__` that adds the loggers of a tree."""

    @functools.wraps(original)
    def __init__(
        self: Any,
        vllm_config: VllmConfig,
        engine_idxs: list[int] | None = None,
        custom_stat_loggers: list[StatLoggerFactory] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        tree = get_ddtree_config(vllm_config)
        if tree is None:
            original(
                self, vllm_config, engine_idxs, custom_stat_loggers, *args, **kwargs
            )
            return

        from vllm_dflash.metrics.front_end import (
            TreeStatLogger,
            count_trees_in_log_lines,
        )

        factories = [*(custom_stat_loggers or ()), TreeStatLogger]
        original(self, vllm_config, engine_idxs, factories, *args, **kwargs)
        count_trees_in_log_lines(self, tree.depth)

    return __init__
