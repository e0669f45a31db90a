# SPDX-License-Identifier: Apache-2.0
"""Verified trees as text: a tree of box characters, the accepted path marked."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from vllm_dflash.metrics.tree_dump import TreeRound

# Shows a token; gets its id.
TokenText = Callable[[int], str]

_BOLD_GREEN = "\x1b[1;32m"
_BOLD_CYAN = "\x1b[1;36m"
_DIM = "\x1b[2m"
_RESET = "\x1b[0m"
_SPECIAL = {"\n": "⏎", "\t": "⇥", "\r": "␍"}


def visible(text: str) -> str:
    """Return a token's text with its white space and control characters in sight."""
    if not text:
        return "∅"
    shown = "".join(
        _SPECIAL.get(c) or (c if c.isprintable() else f"\\u{ord(c):04x}") for c in text
    )
    stripped = shown.strip(" ")
    leading = len(shown) - len(shown.lstrip(" "))
    trailing = len(shown) - leading - len(stripped)
    return "·" * leading + stripped + "·" * (trailing if stripped else 0)


def render_round(
    item: TreeRound, number: int, token_text: TokenText, *, colour: bool
) -> str:
    """Return one round: a headline, the tree, the token that the target added."""

    def paint(code: str, text: str) -> str:
        return f"{code}{text}{_RESET}" if colour else text

    accepted = set(item.path)
    nodes = len(item.tokens) - 1
    lines = [
        paint(
            _BOLD_CYAN,
            f"round {number} · position {item.position} · {nodes} nodes · "
            f"{len(item.path) - 1} accepted · {len(item.emitted)} tokens",
        )
    ]
    lines.append(f"● {visible(token_text(item.tokens[0]))}  (root)")
    for node, prefix in _walk(item):
        probability = item.probability(node)
        percent = "" if probability is None else f"  {_percent(probability)}"
        label = f"{visible(token_text(item.tokens[node]))}{percent}"
        if node in accepted:
            lines.append(paint(_DIM, prefix) + paint(_BOLD_GREEN, f"● {label}"))
        else:
            lines.append(paint(_DIM, f"{prefix}○ {label}"))
    emitted = "".join(token_text(token) for token in item.emitted[:-1])
    lines.append(
        f"accepted {paint(_BOLD_GREEN, visible(emitted))}, then the target's own "
        f"{paint(_BOLD_CYAN, visible(token_text(item.bonus)))}"
    )
    return "\n".join(lines)


def _walk(item: TreeRound) -> Iterator[tuple[int, str]]:
    """Yield each node but the root with what precedes it on its line."""
    pending = [(child, "") for child in reversed(item.children(0))]
    while pending:
        node, indent = pending.pop()
        siblings = item.children(item.parents[node])
        is_last = node == siblings[-1]
        yield node, indent + ("└─ " if is_last else "├─ ")
        below = indent + ("   " if is_last else "│  ")
        pending += [(child, below) for child in reversed(item.children(node))]


def _percent(probability: float) -> str:
    return f"{probability:.0%}" if probability >= 0.01 else "<1%"


def summarise(rounds: list[TreeRound]) -> str:
    """Return a sentence about the rounds of a request."""
    tokens = sum(len(item.emitted) for item in rounds)
    nodes = sum(len(item.tokens) - 1 for item in rounds)
    ranks: dict[int, int] = {}
    for item in rounds:
        for parent, node in zip(item.path, item.path[1:], strict=False):
            rank = item.children(parent).index(node)
            ranks[rank] = ranks.get(rank, 0) + 1
    accepted = sum(ranks.values())
    text = (
        f"{len(rounds)} rounds, {tokens} tokens, mean acceptance length "
        f"{tokens / len(rounds):.2f}, {nodes / len(rounds):.1f} nodes a round"
    )
    if accepted:
        text += (
            f"; {ranks.get(0, 0) / accepted:.0%} of the accepted nodes were the "
            "draft's first choice"
        )
    return text
