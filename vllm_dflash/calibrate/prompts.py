# SPDX-License-Identifier: Apache-2.0
"""What a calibration asks: the user's prompts, or sixteen of several kinds."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from pathlib import Path
from typing import Any

from vllm_dflash.errors import option_error

Messages = list[dict[str, str]]

_QUESTIONS = (
    "Explain in three sentences why the sky is blue.",
    "Write a Python function that returns the n-th Fibonacci number, with a docstring.",
    "A train leaves at 9:40 and arrives at 12:15. How long is the journey? Explain.",
    "Give me five tips for a first-time speaker at a conference.",
    "What is the difference between a process and a thread?",
    "Write a short polite e-mail that asks a colleague to move a meeting to Thursday.",
    "List the planets of the solar system with one fact each.",
    "Write a SQL query that counts orders per customer in the last 30 days.",
    "Summarise the plot of Romeo and Juliet in four sentences.",
    "Translate to French: The weather is nice today, so we will walk to the market.",
    "What is 17 times 23? Show the steps.",
    "Write a shell one-liner that finds the ten largest files below a directory.",
    "Describe how photosynthesis works to a ten-year-old.",
    "Return a JSON object with the name, age and city of three invented people.",
    "What are the advantages and the disadvantages of electric cars?",
    "Write a haiku about the sea and explain its form.",
)


def read_messages(path: Path | None) -> list[Messages]:
    """Conversations of a JSON-lines file (``messages`` or ``prompt``), or our own.

    Raises:
        ValueError: A line holds neither.
    """
    if path is None:
        return [[{"role": "user", "content": text}] for text in _QUESTIONS]
    found = [messages for _, _, messages in read_prompt_lines(path)]
    if not found:
        raise ValueError(f"{path} holds no prompt. One JSON object a line is allowed.")
    return found


def read_prompt_lines(path: Path) -> Iterator[tuple[int, dict[str, Any], Messages]]:
    """Yield (line number, object, its conversation) of a JSON-lines file.

    Raises:
        ValueError: A line holds neither ``messages`` nor ``prompt``.
    """
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            item = json.loads(line)
            messages = item.get("messages") or [
                {"role": "user", "content": item["prompt"]}
            ]
        except (ValueError, KeyError, AttributeError) as error:
            raise option_error(
                f"{path}:{number} is no prompt (got {line[:60]!r})",
                'A JSON object with "messages" or "prompt" is allowed',
                '{"prompt": "Hello!"}',
            ) from error
        yield number, item, messages


def in_turn(kinds: Sequence[Hashable]) -> list[int]:
    """Return the places of a list with the kinds in turn: the first of each, …"""
    seen: Counter[Hashable] = Counter()
    keyed = []
    for place, kind in enumerate(kinds):
        keyed.append((seen[kind], place))
        seen[kind] += 1
    return [place for _, place in sorted(keyed)]


def tokenize(tokenizer: Any, conversations: list[Messages]) -> list[list[int]]:
    """Token ids, through the chat template where the model has one."""
    prompts = []
    for messages in conversations:
        if getattr(tokenizer, "chat_template", None):
            text = tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
            ids = tokenizer.encode(text, add_special_tokens=False)
        else:
            ids = tokenizer.encode("\n".join(m["content"] for m in messages))
        prompts.append(list(ids))
    return prompts


def lengthen(prompt: list[int], length: int) -> list[int]:
    """The prompt, repeated in front until it has ``length`` tokens."""
    copies = -(-length // len(prompt))
    return (prompt * max(copies, 1))[-max(length, len(prompt)) :]
