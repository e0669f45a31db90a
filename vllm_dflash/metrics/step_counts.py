# SPDX-License-Identifier: Apache-2.0
"""vLLM's statistics of a step, read as those of trees.

vLLM counts, for each position of a draft, how many rounds had a token there and how
many accepted one. With a tree "had" counts nodes by index and "accepted" counts the
path, whose positions are depths; both counts fall from one position to the next, so
they hold the exact distribution of widths and of accepted lengths.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any


def exact_counts(total: int, at_least: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Turn "how many reached 1, 2, ..." into "(value, how many were exactly that)".

    Args:
        total: How many there are, those that reached nothing included.
        at_least: `at_least[i]` of them reached `i + 1`; falls.
    """
    reached = total
    for value, further in enumerate([*at_least, 0]):
        if reached > further:
            yield value, reached - further
        if not further:
            return
        reached = further


@dataclass
class StepCounts:
    """What one step, or the sum of some, did.

    Attributes:
        rounds: Drafts that were verified.
        nodes: Nodes in them.
        depth_slots: Depths that they could have reached.
        accepted_by_depth: Accepted nodes of depth 1, 2, ...
        lengths: Tokens emitted -> rounds.
        widths: Rows verified, root included -> rounds.
    """

    rounds: int = 0
    nodes: int = 0
    depth_slots: int = 0
    accepted_by_depth: list[int] = field(default_factory=list)
    lengths: dict[int, int] = field(default_factory=dict)
    widths: dict[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, stats: Any, depth: int) -> StepCounts:
        """Read vLLM's `SpecDecodingStats` of an engine with trees of this depth."""
        accepted = list(stats.num_accepted_tokens_per_pos[:depth])
        nodes = stats.num_draft_tokens_per_pos
        rounds = stats.num_drafts
        return cls(
            rounds=rounds,
            nodes=stats.num_draft_tokens,
            depth_slots=sum(nodes[:depth]),
            accepted_by_depth=accepted,
            lengths={n + 1: count for n, count in exact_counts(rounds, accepted)},
            widths={n + 1: count for n, count in exact_counts(rounds, nodes)},
        )

    @property
    def accepted(self) -> int:
        """Accepted nodes of all depths."""
        return sum(self.accepted_by_depth)
