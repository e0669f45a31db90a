# SPDX-License-Identifier: Apache-2.0
"""`vllm/v1/core/sched/scheduler.py`: a calibrated schedule follows the acceptance."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_dflash.config import get_ddtree_config

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def wrap_scheduler(original: Callable[..., None]) -> Callable[..., None]:
    """Return `Scheduler.__init__` that has calibrated engines watched."""

    @functools.wraps(original)
    def __init__(self: Any, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        original(self, vllm_config, *args, **kwargs)
        tree = get_ddtree_config(vllm_config)
        # vLLM has no table under data parallelism.
        if tree is not None and tree.measurement is not None and self.dynamic_sd_lookup:
            _watch(self, vllm_config, tree)

    return __init__


def _watch(scheduler: Any, vllm_config: VllmConfig, tree: Any) -> None:
    """Read every step of this scheduler before it does, whoever wants statistics."""
    from vllm_dflash.calibrate.watch import make_watch
    from vllm_dflash.sample.history import linear_history_reason

    watch = make_watch(
        vllm_config,
        tree,
        scheduler.dynamic_sd_lookup,
        lambda params: linear_history_reason(params) is not None,
    )
    update_from_output = scheduler.update_from_output

    @functools.wraps(update_from_output)
    def watched(scheduler_output: Any, model_runner_output: Any) -> Any:
        watch.observe(scheduler_output, model_runner_output)
        return update_from_output(scheduler_output, model_runner_output)

    scheduler.update_from_output = watched
