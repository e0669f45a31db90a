# SPDX-License-Identifier: Apache-2.0
"""Verified trees and vLLM's counters -> acceptance by task, depth, rank and budget."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_dflash.calibrate.choose import tokens_by_nodes
from vllm_dflash.demo.compare import acceptance_length
from vllm_dflash.metrics.tree_dump import TreeRound

_NUM_DRAFTS = "vllm:spec_decode_num_drafts_total"
_PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
# Budgets of a printed curve; the JSON has all.
CURVE = (1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 64, 80, 96, 128, 160, 192, 224, 255)


@dataclass(frozen=True)
class RankCount:
    """Children of one rank on accepted paths.

    Attributes:
        offered: Nodes of a path that had a child of this rank.
        accepted: How many of these children were accepted.
    """

    offered: int
    accepted: int


def rounds_by_wave(
    rounds: Iterable[TreeRound], waves: Mapping[str, Mapping[str, Any]]
) -> dict[str, list[TreeRound]]:
    """Sort the rounds of a dump by the wave of their request; drop the warm-up's."""
    wave_of = {
        request: name for name, wave in waves.items() for request in wave["requests"]
    }
    found: dict[str, list[TreeRound]] = {name: [] for name in waves}
    for item in rounds:
        # vLLM appends a suffix to the id that the client sees.
        name = wave_of.get(item.request.rpartition("-")[0])
        if name is not None:
            found[name].append(item)
    return found


def budget_curve(rounds: Sequence[TreeRound], budget: int, depth: int) -> list[float]:
    """Acceptance length of trees of 0 to ``budget`` nodes, from trees of ``budget``.

    A prefix of a node list is the best tree of its size, so an accepted path counts up
    to its first node beyond it. In greedy decoding a run with the smaller trees would
    visit the same text; it only would start its rounds at other places of it.
    """
    return tokens_by_nodes([item.path[1:] for item in rounds], budget, depth)


def reached_depths(rounds: Sequence[TreeRound], depth: int) -> list[float]:
    """Share of the rounds whose path reached each depth, from 1."""
    return [
        sum(len(item.path) > level for item in rounds) / max(1, len(rounds))
        for level in range(1, depth + 1)
    ]


def reached_by_chain(counters: Mapping[str, Any], depth: int) -> list[float]:
    """The same of a chain, from vLLM's counters by position."""
    num_drafts = counters.get(_NUM_DRAFTS, 0)
    return [n / max(1, num_drafts) for n in counters[_PER_POSITION][:depth]]


def rank_counts(rounds: Sequence[TreeRound]) -> list[RankCount]:
    """Count children on accepted paths by their rank among their siblings, from 0."""
    offered: list[int] = []
    accepted: list[int] = []
    for item in rounds:
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(item.parents):
            children.setdefault(parent, []).append(node)
        for node, chosen in zip(item.path, [*item.path[1:], None], strict=True):
            for rank, child in enumerate(children.get(node, [])):
                if rank == len(offered):
                    offered.append(0)
                    accepted.append(0)
                offered[rank] += 1
                accepted[rank] += child == chosen
    return [RankCount(*pair) for pair in zip(offered, accepted, strict=True)]


def counts_agree(rounds: Sequence[TreeRound], counters: Mapping[str, Any]) -> bool:
    """Whether the dump and vLLM's counters are about the same rounds."""
    if len(rounds) != counters.get(_NUM_DRAFTS, 0):
        return False
    mean = sum(len(item.path) for item in rounds) / max(1, len(rounds))
    length = acceptance_length({}, dict(counters))
    return length is None or abs(length - mean) < 1e-6


def format_tasks(summary: Mapping[str, Mapping[str, Any]]) -> str:
    """Acceptance length by task: a row for each, and the unweighted mean of tasks.

    Args:
        summary: Configurations of one temperature; the first has no drafts, the second
            is the chain, the others are trees.
    """
    _, chain, *trees = summary
    tasks = [name for name in summary[chain]["acceptance_length"] if name != "all"]
    head = ["task", chain, *trees, "best tree / chain"]
    lines = ["| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(head) - 1)]
    columns = [
        [summary[name]["acceptance_length"][task] for task in (*tasks, "all")]
        for name in (chain, *trees)
    ]
    for index, label in enumerate((*tasks, "all tokens")):
        lines.append(_length_row(label, [column[index] for column in columns]))
    means = [
        sum(found) / len(found) if (found := _known(column[:-1])) else None
        for column in columns
    ]
    lines.insert(-1, _length_row(f"*mean of {len(tasks)}*", means))
    equal = [
        "other draws"
        if summary[name].get("has_other_draws")
        else f"{summary[name]['num_equal']} of {summary[name]['num_prompts']}"
        for name in (chain, *trees)
    ]
    lines.append(f"| answers equal | {' | '.join(equal)} | |")
    return "\n".join(lines)


def format_depths(reached: Mapping[str, Sequence[float]]) -> str:
    """Share of rounds that reached each depth, by configuration."""
    depths = range(1, len(next(iter(reached.values()))) + 1)
    lines = [
        "| depth | " + " | ".join(map(str, depths)) + " |",
        "|---|" + "---:|" * len(depths),
    ]
    for name, shares in reached.items():
        cells = " | ".join(f"{100 * share:.0f}%" for share in shares)
        lines.append(f"| {name} | {cells} |")
    return "\n".join(lines)


def format_ranks(ranks: Mapping[str, Sequence[RankCount]]) -> str:
    """How often a child of each rank was accepted, and its share of all accepted."""
    size = max(map(len, ranks.values()))
    lines = [
        "| rank among siblings | " + " | ".join(map(str, range(size))) + " |",
        "|---|" + "---:|" * size,
    ]
    for name, counts in ranks.items():
        total = max(1, sum(count.accepted for count in counts))
        padded = [*counts, *[RankCount(0, 0)] * (size - len(counts))]
        shares = [f"{100 * c.accepted / total:.1f}%" for c in padded]
        chances = [
            f"{100 * c.accepted / c.offered:.1f}%" if c.offered else "-" for c in padded
        ]
        lines.append(f"| {name}: of the accepted nodes | {' | '.join(shares)} |")
        lines.append(f"| {name}: accepted if offered | {' | '.join(chances)} |")
    return "\n".join(lines)


def format_curve(
    curves: Mapping[str, Sequence[float]], measured: Mapping[str, Mapping[int, float]]
) -> str:
    """Acceptance length by budget, and what runs with smaller trees gave.

    Args:
        curves: Label -> acceptance length by number of nodes, from 0.
        measured: Label -> budget -> acceptance length of a run with that budget.
    """
    largest = max(map(len, curves.values())) - 1
    budgets = [budget for budget in CURVE if budget <= largest]
    if largest not in budgets:
        budgets.append(largest)
    lines = [
        "| nodes | " + " | ".join(map(str, budgets)) + " |",
        "|---|" + "---:|" * len(budgets),
    ]
    for name, curve in curves.items():
        cells = " | ".join(f"{curve[b]:.2f}" for b in budgets if b < len(curve))
        lines.append(f"| {name} | {cells} |")
        runs = measured.get(name, {})
        if runs:
            cells = " | ".join(f"{runs[b]:.2f}" if b in runs else "" for b in budgets)
            lines.append(f"| {name}, a run of its own | {cells} |")
    return "\n".join(lines)


def _known(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _length_row(label: str, lengths: Sequence[float | None]) -> str:
    cells = ["-" if length is None else f"{length:.2f}" for length in lengths]
    chain, *trees = lengths
    best = max(_known(trees), default=None)
    gain = "-" if chain is None or best is None else f"{best / chain:.2f}"
    return f"| {label} | {' | '.join(cells)} | {gain} |"
