# SPDX-License-Identifier: Apache-2.0
"""Prompts without a network: a seeded generator, files, and the target itself."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from vllm_dflash.errors import option_error
from vllm_dflash_training.config import PromptOptions
from vllm_dflash_training.heldout import (
    HeldOut,
    conversation_hash,
    load_prompt_rows,
    prompt_hash,
)

ROOT = Path(__file__).resolve().parents[2]
MATERIAL = ROOT / "training/prompts/material.yaml"
# Share of each kind among the synthetic prompts.
KINDS = {"chat": 0.35, "code": 0.25, "arithmetic": 0.2, "summarise": 0.2}
SYSTEM_SHARE = 0.08
# Draws in a row that gave nothing new: the material is used up.
_PATIENCE = 2000


@cache
def load_material() -> dict[str, Any]:
    """Return the words that prompts are made of."""
    return yaml.safe_load(MATERIAL.read_text(encoding="utf-8"))


def synthetic_prompts(count: int, seed: int, heldout: HeldOut) -> list[dict[str, Any]]:
    """Make different prompts of all kinds, the same ones for the same seed.

    Raises:
        ValueError: The material does not give so many.
    """
    rng = random.Random(seed)
    makers: dict[str, Callable[[random.Random], str]] = {
        "chat": _chat,
        "code": _code,
        "arithmetic": _arithmetic,
        "summarise": _summarise,
    }
    rows: list[dict[str, Any]] = []
    seen = set(heldout.hashes)
    failures = 0
    while len(rows) < count:
        (kind,) = rng.choices(list(KINDS), list(KINDS.values()))
        messages = [{"role": "user", "content": makers[kind](rng)}]
        if rng.random() < SYSTEM_SHARE:
            system = rng.choice(load_material()["systems"])
            messages.insert(0, {"role": "system", "content": system})
        key = prompt_hash(messages)
        if key in seen:
            failures += 1
            if failures > _PATIENCE:
                raise option_error(
                    f"prompts.synthetic is more than {MATERIAL.name} gives (got "
                    f"{count}, it stopped at {len(rows)})",
                    f"Up to {len(rows)} are allowed",
                    "prompts.synthetic with fewer, and prompts.self_generated",
                )
            continue
        failures = 0
        seen.add(key)
        rows.append({"kind": kind, "messages": messages, "hash": key})
    return rows


def collect_prompts(
    options: PromptOptions,
    seed: int,
    heldout: HeldOut,
    more: Iterable[dict[str, Any]] = (),
) -> list[dict[str, Any]]:
    """Return the prompts of the generator, of the files and some more, shuffled.

    Raises:
        ValueError: A file holds a held-out prompt.
    """
    rows = synthetic_prompts(options.synthetic, seed, heldout)
    found = list(more)
    for name in options.files:
        of_file = load_prompt_rows(ROOT / name)
        hashes = [prompt_hash(row["messages"]) for row in of_file]
        heldout.refuse(hashes, name)
        for row, key in zip(of_file, hashes, strict=True):
            kind = row.get("kind", "file")
            found.append({"kind": kind, "messages": row["messages"], "hash": key})
    seen = {conversation_hash(row["messages"]) for row in rows}
    for row in found:
        # Conversations may well end with the same words.
        key = conversation_hash(row["messages"])
        if key not in seen:
            seen.add(key)
            rows.append(row)
    random.Random(seed).shuffle(rows)
    return rows


def opening_words(seed: int) -> Iterator[str]:
    """Yield openings of a user's turn, often none, for the target to go on from."""
    rng = random.Random(seed)
    openings = load_material()["openings"]
    for _ in itertools.count():
        yield "" if rng.random() < 0.4 else rng.choice(openings)


def _chat(rng: random.Random) -> str:
    words = load_material()
    topic, other = rng.sample(words["topics"], 2)
    return rng.choice(words["chat"]).format(t=topic, u=other)


def _code(rng: random.Random) -> str:
    words = load_material()
    language = rng.choice(words["languages"])
    if rng.random() < 0.8:
        task = rng.choice(words["functions"])
        return rng.choice(words["code"]).format(l=language, f=task)
    code = rng.choice(words["snippets"]).strip()
    return rng.choice(words["code_questions"]).format(c=code)


def _arithmetic(rng: random.Random) -> str:
    words = load_material()
    name, friend = rng.sample(words["names"], 2)
    thing, other = rng.sample(words["things"], 2)
    small = rng.randint(2, 12)
    values = dict(
        n=name,
        m=friend,
        o=thing,
        q=other,
        a=rng.randint(13, 90),
        b=rng.randint(2, 12),
        c=small,
        d=rng.randint(1, 99),
        e=small * rng.randint(3, 40),
        p=rng.choice([5, 10, 15, 20, 25, 30, 40, 50, 75]),
    )
    ending = rng.choice(["", "", " Explain step by step.", " Show your work."])
    return rng.choice(words["arithmetic"]).format(**values) + ending


def _summarise(rng: random.Random) -> str:
    words = load_material()
    name, friend = rng.sample(words["names"], 2)
    slots = dict(
        n=name,
        m=friend,
        place=rng.choice(words["places"]),
        town=rng.choice(words["towns"]),
        year=rng.randint(1890, 2020),
        days=rng.randint(3, 60),
        count=rng.randint(12, 900),
    )
    topic, other = rng.sample(words["topics"], 2)
    sentences = rng.sample(words["sentences"], rng.randint(4, 8))
    text = " ".join(s.format(t=topic, u=other, **slots) for s in sentences)
    return rng.choice(words["text_tasks"]).format(p=text)
