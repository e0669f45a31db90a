# SPDX-License-Identifier: Apache-2.0
"""Answers of an earlier run as texts: which folder, which answers, where they end."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from vllm_dflash_training.heldout import HeldOut, Messages
from vllm_dflash_training.shards import read_rows

_FENCE = "```"
# Kinds: the texts of the seeded generator are strung together from a few sentences.
_LEFT_OUT = ("summarise",)
# After a dot that ends no sentence: initials, titles, abbreviations, list numbers.
_SENTENCE_END = re.compile(
    r"(?:(?<!\b[A-Z])(?<!^\d)(?<!^\d\d)(?<!\bMr)(?<!\bMrs)(?<!\bMs)(?<!\bDr)"
    r"(?<!\bSt)(?<!\bvs)(?<!\be\.g)(?<!\bi\.e)\.|[!?…])[\"'”’)*]*(?=\s|$)|[。！？]",
    re.MULTILINE,
)
_WORD = re.compile(r"\w+")
# Longer runs of words than people repeat.
_RUN = 5
_MAX_REPEATED, _MAX_COPIED = 0.08, 0.2


class Tokens(Protocol):
    """What is needed of the target's tokenizer."""

    def prompt(self, messages: Messages) -> list[int]:
        """Return the tokens that serving would see for these messages."""

    def text(self, tokens: list[int]) -> str:
        """Return tokens as text, without special ones."""


@dataclass(frozen=True)
class Answer:
    """What the target said, and to what.

    Attributes:
        messages: The prompt.
        text: The answer, or the part of it that ends with a sentence.
        is_copy: Whether it mostly repeats what the prompt says.
    """

    messages: Messages
    text: str
    is_copy: bool


def load_answers(
    folder: Path,
    count: int,
    rng: random.Random,
    tokens: Tokens,
    stop_ids: Collection[int],
    heldout: HeldOut,
) -> list[Answer]:
    """Draw answers of a data folder, at most `count`, in random order.

    Left out are answers to held-out prompts, of this run and of that one, to the
    generator's texts, answers that repeat themselves, and what follows the last
    sentence of one that was cut off.
    """
    asked = _Asked(folder, tokens)
    found = []
    for row in _draw(folder, count, rng, _HeldOutAnswers(folder, heldout)):
        messages = asked.messages(row)
        is_whole = bool(row["response"]) and row["response"][-1] in stop_ids
        text = tokens.text(row["response"]).strip()
        if not is_whole:
            text = whole_part(text)
        if messages and text and repeated(text) <= _MAX_REPEATED:
            is_copy = copied(text, messages[-1]["content"]) > _MAX_COPIED
            found.append(Answer(messages, text, is_copy))
    return found


def whole_part(text: str) -> str:
    """Return a text that was cut off up to the end of its last whole sentence."""
    if text.count(_FENCE) % 2:
        # In the middle of a block of code, to which the words before it belong.
        text = text[: text.rfind(_FENCE)]
    if text.rstrip().endswith(_FENCE):
        return text.rstrip()
    ends = [match.end() for match in _SENTENCE_END.finditer(text)]
    # A block of code that ended is whole too.
    ends.append(text.rfind(_FENCE) + len(_FENCE) if _FENCE in text else 0)
    return text[: max(ends)].rstrip()


def split_sentences(text: str) -> list[str]:
    """Return the sentences of a paragraph."""
    starts = [0, *(match.end() for match in _SENTENCE_END.finditer(text))]
    parts = [
        text[a:b].strip() for a, b in zip(starts, [*starts[1:], None], strict=True)
    ]
    return [part for part in parts if part]


def repeated(text: str) -> float:
    """Return the share of runs of words that were there before: loops have many."""
    runs = list(_runs(text))
    return 1 - len(set(runs)) / len(runs) if runs else 0.0


def copied(text: str, other: str) -> float:
    """Return the share of runs of words that another text has."""
    runs, others = list(_runs(text)), set(_runs(other))
    return sum(run in others for run in runs) / len(runs) if runs else 0.0


def _runs(text: str) -> Iterator[tuple[str, ...]]:
    words = _WORD.findall(text.casefold())
    return (tuple(words[i : i + _RUN]) for i in range(len(words) - _RUN + 1))


class _HeldOutAnswers:
    """Knows answers to held-out prompts: by hash, by prompt and by what they say."""

    def __init__(self, folder: Path, heldout: HeldOut):
        rows = list(read_rows(folder / "heldout.jsonl"))
        self.hashes = heldout.hashes
        self.prompts = {tuple(row["prompt"]) for row in rows}
        self.starts = [row["response"] for row in rows if row["response"]]

    def __contains__(self, row: dict[str, Any]) -> bool:
        response = row["response"]
        return (
            row["hash"] in self.hashes
            or tuple(row["prompt"]) in self.prompts
            or any(response[: len(start)] == start for start in self.starts)
        )


class _Asked:
    """Finds the messages of a prompt that was answered."""

    def __init__(self, folder: Path, tokens: Tokens):
        self.tokens = tokens
        self.by_hash: dict[str, list[Messages]] = {}
        self.by_tokens: dict[str, dict[tuple[int, ...], Messages]] = {}
        for path in (folder / "prompts.jsonl", folder / "self.jsonl"):
            for row in read_rows(path) if path.exists() else ():
                self.by_hash.setdefault(row["hash"], []).append(row["messages"])

    def messages(self, row: dict[str, Any]) -> Messages | None:
        """Return them. The hash knows the last one only, so it can be that of many."""
        key = row["hash"]
        candidates = self.by_hash.get(key, [])
        if len(candidates) < 2:
            return candidates[0] if candidates else None
        if key not in self.by_tokens:
            self.by_tokens[key] = {tuple(self.tokens.prompt(m)): m for m in candidates}
        return self.by_tokens[key].get(tuple(row["prompt"]))


def _draw(
    folder: Path, count: int, rng: random.Random, left_out: _HeldOutAnswers
) -> Iterator[dict[str, Any]]:
    """Yield rows by where they begin: a large folder need not fit in memory."""
    places = []
    for path in sorted(folder.glob("responses-*.jsonl")):
        start = 0
        with path.open("rb") as file:
            for line in file:
                places.append((path, start))
                start += len(line)
    for path, start in rng.sample(places, min(count, len(places))):
        with path.open("rb") as file:
            file.seek(start)
            row = json.loads(file.readline())
        if row["kind"] not in _LEFT_OUT and row not in left_out:
            yield row
