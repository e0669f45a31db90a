# SPDX-License-Identifier: Apache-2.0
"""Loggers that vLLM's own logging configuration hears."""

import logging


def init_logger(name: str) -> logging.Logger:
    """Return the logger of a module, as a child of the `vllm` logger.

    vLLM attaches its handlers to the logger named `vllm` only, so a logger named
    `vllm_dflash.x` would have none and its INFO lines would be lost.

    Args:
        name: The module's `__name__`.
    """
    return logging.getLogger("vllm." + name)
