# SPDX-License-Identifier: Apache-2.0
"""`vllm/v1/worker/lora_model_runner_mixin.py`: an adapter for every row of logits."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.worker.lora_model_runner_mixin import LoRAModelRunnerMixin


def wrap_set_active_loras(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `_set_active_loras` that knows how many rows of logits a request has."""

    @functools.wraps(original)
    def _set_active_loras(
        self: LoRAModelRunnerMixin,
        # One adapter for each request
        prompt_lora_mapping: tuple[int, ...],
        # One adapter for each token
        token_lora_mapping: tuple[int, ...],
        lora_requests: set[Any],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        from vllm_dflash.runner.runtime import find_runtime

        runtime = find_runtime(self.vllm_config)
        if runtime is not None:
            prompt_lora_mapping = runtime.spread_over_logits(prompt_lora_mapping)
        return original(
            self,
            prompt_lora_mapping,
            token_lora_mapping,
            lora_requests,
            *args,
            **kwargs,
        )

    return _set_active_loras
