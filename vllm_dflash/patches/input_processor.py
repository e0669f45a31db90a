# SPDX-License-Identifier: Apache-2.0
"""`vllm/v1/engine/input_processor.py`: what the front end lets through to a tree.

vLLM refuses min_p and logit_bias with speculation, because draft probabilities do not
know them. A tree needs no draft probabilities: every node's token is drawn from that
node's own processed logits, in which both are rows like any other.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_dflash.config import get_ddtree_config

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def wrap_input_processor(original: Callable[..., None]) -> Callable[..., None]:
    """Return `InputProcessor.__init__` that checks a tree's requests as if alone."""

    @functools.wraps(original)
    def __init__(self: Any, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        original(self, vllm_config, *args, **kwargs)
        if get_ddtree_config(vllm_config) is not None:
            # Its only reader is SamplingParams.verify, which refuses two options
            # for it, and trace replay, which engines with trees do not have.
            self.speculative_config = None

    return __init__
