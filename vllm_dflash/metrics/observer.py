# SPDX-License-Identifier: Apache-2.0
"""What a round tells about itself. Costs it a few attribute look-ups, and no wait."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from vllm_dflash import envs
from vllm_dflash.config import DDTreeConfig
from vllm_dflash.logger import init_logger
from vllm_dflash.metrics.publisher import CounterPublisher
from vllm_dflash.metrics.stage_clock import StageClock
from vllm_dflash.metrics.tree_dumper import TreeDumper

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(__name__)

# Requests that vLLM makes up before it captures graphs and serves.
WARMUP_IDS = ("_warmup_", "_v2_mixed_warmup_")


class RoundObserver:
    """Counters, and the two switches for a closer look, of one engine's worker.

    Silent until the first request that is none of vLLM's warm-up.

    Attributes:
        rank_counts: [C], int64. The walk adds the accepted nodes by rank.
        clock: Set with VLLM_DFLASH_STAGE_TIMES=1.
        dumper: Set with VLLM_DFLASH_DUMP_TREES, in the first worker of an engine.
    """

    def __init__(
        self, vllm_config: VllmConfig, tree: DDTreeConfig, device: torch.device
    ) -> None:
        self.rank_counts = torch.zeros(
            tree.max_children, dtype=torch.int64, device=device
        )
        self.clock = StageClock(device) if envs.VLLM_DFLASH_STAGE_TIMES else None
        self.dumper = self._make_dumper(vllm_config, tree)
        self._publisher = CounterPublisher(vllm_config, self.rank_counts, self.clock)
        self._is_serving = False

    @staticmethod
    def _make_dumper(vllm_config: VllmConfig, tree: DDTreeConfig) -> TreeDumper | None:
        path = envs.VLLM_DFLASH_DUMP_TREES
        if path is None:
            return None
        from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

        # All ranks of a tensor-parallel group walk the same trees.
        if get_tensor_model_parallel_rank() != 0:
            return None
        logger.warning(
            "VLLM_DFLASH_DUMP_TREES=%s writes every tree and makes every step wait for "
            "the device. Unset it to serve.",
            path,
        )
        return TreeDumper(Path(path), vllm_config, tree)

    def request_added(self, req_id: str) -> None:
        """A request came to this worker; the first real one starts the counting."""
        if self._is_serving or req_id.startswith(WARMUP_IDS):
            return
        self._is_serving = True
        self.rank_counts.zero_()
        self._publisher.start()

    def begin(self) -> None:
        """A step that verifies starts here."""
        if self.clock is not None and self._is_serving:
            self.clock.begin()

    def mark(self, stage: str) -> None:
        """A stage of the round ends here."""
        if self.clock is not None:
            self.clock.mark(stage)

    def walked(
        self,
        input_batch: Any,
        step: Any,
        node_tokens: torch.Tensor,
        positions: torch.Tensor,
        sampled: torch.Tensor,
        num_sampled: torch.Tensor,
    ) -> None:
        """The paths of the step are known, on the device."""
        self._publisher.round_done()
        if self.dumper is not None and self._is_serving:
            num_reqs = input_batch.num_reqs
            self.dumper.write_step(
                input_batch,
                node_tokens,
                step.trees.parents,
                step.tree_len[:num_reqs],
                step.path[:num_reqs],
                sampled,
                num_sampled,
                positions,
            )

    def drafted(self, input_batch: Any, builder: Any) -> None:
        """The trees of the next step are built; the round ends here."""
        if self.clock is not None:
            self.clock.mark("draft")
            self.clock.end()
        if self.dumper is not None and self._is_serving:
            self.dumper.keep_candidates(
                input_batch.idx_mapping_np, builder.cand_tokens, builder.cand_logprobs
            )
