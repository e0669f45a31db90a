# SPDX-License-Identifier: Apache-2.0
"""vLLM's periodic `SpecDecoding metrics` line for trees, and a line of our own.

vLLM is told N drafts a round, the nodes. Its line would show N positions, of which no
path reaches more than K, and a rate of accepted nodes per node. Here positions are
depths and the rate is of depths that a path could have reached, as with a chain of K.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.v1.spec_decode.metrics import SpecDecodingLogging, SpecDecodingStats

from vllm_dflash.logger import init_logger
from vllm_dflash.metrics.step_counts import StepCounts

logger = init_logger(__name__)

_MAX_WIDTHS = 4


class TreeSpecDecodingLogging(SpecDecodingLogging):
    """Counts depths where vLLM's counts nodes."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        super().__init__()

    def reset(self) -> None:
        super().reset()
        self.nodes = 0
        self.widths: dict[int, int] = {}

    def observe(self, spec_decoding_stats: SpecDecodingStats) -> None:
        super().observe(spec_decoding_stats)
        counts = StepCounts.of(spec_decoding_stats, self.depth)
        self.num_draft_tokens[-1] = counts.depth_slots
        self.accepted_tokens_per_pos_lists[-1] = counts.accepted_by_depth
        self.nodes += counts.nodes
        for width, rounds in counts.widths.items():
            self.widths[width] = self.widths.get(width, 0) + rounds

    def log(self, log_fn: Callable[..., Any] = logger.info) -> None:
        rounds, accepted = sum(self.num_drafts), sum(self.num_accepted_tokens)
        nodes, widths = self.nodes, self.widths
        super().log(log_fn=log_fn)
        if rounds:
            log_fn(
                "DDTree metrics: Mean acceptance length: %.2f, "
                "Mean nodes per round: %.1f, Rounds: %d, Verify width: %s",
                1 + accepted / rounds,
                nodes / rounds,
                rounds,
                format_widths(widths),
            )


def format_widths(widths: dict[int, int]) -> str:
    """Return the most frequent widths and their share of the rounds."""
    total = sum(widths.values())
    frequent = sorted(widths.items(), key=lambda item: (-item[1], item[0]))
    parts = [
        f"{width} rows ({rounds / total:.0%})"
        for width, rounds in frequent[:_MAX_WIDTHS]
    ]
    if len(frequent) > _MAX_WIDTHS:
        rest = sum(rounds for _, rounds in frequent[_MAX_WIDTHS:])
        parts.append(f"others ({rest / total:.0%})")
    return ", ".join(parts)
