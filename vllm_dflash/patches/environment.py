# SPDX-License-Identifier: Apache-2.0
"""`vllm/envs.py`: our variables among the ones that vLLM knows."""

import os
from collections.abc import Callable
from typing import Any

from vllm_dflash import envs


class KnownVariables(dict[str, Callable[[], Any]]):
    """vLLM's table of variables and those of ours that are set.

    An unset one stays out: it would change the key of vLLM's compile cache.
    """


def extend_environment_variables(
    original: dict[str, Callable[[], Any]],
) -> KnownVariables:
    """Return vLLM's table with the variables of ours that are set."""
    known = KnownVariables(original)
    for name, read in envs.environment_variables.items():
        if name in os.environ:
            known.setdefault(name, read)
    return known
