# SPDX-License-Identifier: Apache-2.0
"""Every environment variable of the plugin, read when it is used.

A user's wishes go into `speculative_config`; these are for the CPU set-up, the demo and
a closer look at trees.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"", "0", "false", "no", "off"})


def _read_bool(name: str) -> bool:
    raw = os.environ.get(name, "")
    value = raw.strip().lower()
    if value in _TRUE:
        return True
    if value in _FALSE:
        return False
    raise ValueError(
        f"{name} is not a switch (got {raw!r}). Allowed are 0 and 1. "
        f"Type {name}=1 to turn it on."
    )


environment_variables: dict[str, Callable[[], Any]] = {
    # Serve on the CPU: run vLLM's Model Runner V2 through Triton's interpreter.
    # Makes V2 the default of every model in that environment.
    "VLLM_DFLASH_CPU": lambda: _read_bool("VLLM_DFLASH_CPU"),
    # Where the demo keeps its model and logs, and calibrate its schedules.
    "VLLM_DFLASH_CACHE": lambda: os.environ.get("VLLM_DFLASH_CACHE") or None,
    # Time the stages of every round: vllm_dflash:stage_time_seconds.
    "VLLM_DFLASH_STAGE_TIMES": lambda: _read_bool("VLLM_DFLASH_STAGE_TIMES"),
    # Append every verified tree to this file; a round then waits for the device.
    "VLLM_DFLASH_DUMP_TREES": lambda: os.environ.get("VLLM_DFLASH_DUMP_TREES") or None,
}


def any_is_set() -> bool:
    """Tell whether the environment names one of the variables."""
    return any(name in os.environ for name in environment_variables)


def cache_dir() -> Path:
    """Return the cache: ``$VLLM_DFLASH_CACHE``, or ``~/.cache/vllm-dflash``."""
    folder = environment_variables["VLLM_DFLASH_CACHE"]()
    return Path(folder or "~/.cache/vllm-dflash").expanduser()


def keep_engine_in_process() -> None:
    """Tell vLLM to run its next engine in this process, before vLLM is imported."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"


def prometheus_multiproc_dir() -> str | None:
    """Return the folder of prometheus_client's multiprocess mode, None if it is off."""
    return os.environ.get("PROMETHEUS_MULTIPROC_DIR") or None


def __getattr__(name: str) -> Any:
    if name in environment_variables:
        return environment_variables[name]()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(environment_variables)
