# SPDX-License-Identifier: Apache-2.0
"""`vllm/v1/worker/gpu/cudagraph_utils.py`: every width finds its graph."""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_dflash.config import get_ddtree_config

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager


def wrap_init_candidates(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `_init_candidates` that looks further than the next captured size."""

    @functools.wraps(original)
    def _init_candidates(self: CudaGraphManager) -> None:
        original(self)
        if get_ddtree_config(self.vllm_config) is not None:
            complete_candidates(self)

    return _init_candidates


def complete_candidates(manager: CudaGraphManager) -> None:
    """Add to each number of tokens the smallest graph of every width that holds it.

    vLLM lists the graphs of the next captured number of tokens only. With one width all
    of them have that width; with several, that number may be captured for another width
    alone, and the batch would run without its graph.
    """
    from vllm.config.compilation import CUDAGraphMode

    by_width: dict[tuple[int, int], list[Any]] = {}
    for desc in manager._capture_descs.get(CUDAGraphMode.FULL, ()):
        if desc.uniform_token_count is not None and desc.num_ubatches == 1:
            key = (desc.num_active_loras, desc.uniform_token_count)
            by_width.setdefault(key, []).append(desc)
    for (num_loras, _), descs in by_width.items():
        descs.sort(key=lambda desc: desc.num_tokens)
        sizes = [desc.num_tokens for desc in descs]
        for num_tokens in range(1, sizes[-1] + 1):
            desc = descs[bisect_left(sizes, num_tokens)]
            known = manager._candidates.setdefault((num_tokens, num_loras), [])
            if desc not in known:
                # In front of the piecewise graphs, which would take any batch.
                known.insert(0, desc)
