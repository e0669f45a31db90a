# SPDX-License-Identifier: Apache-2.0
"""Held-out prompts stay out of the training data: compared by hash."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from vllm_dflash.errors import option_error

Messages = list[dict[str, str]]
_NO_WORD = re.compile(r"[\W_]+", re.UNICODE)


def prompt_hash(messages: Messages) -> str:
    """Hash what the user says, regardless of case, spaces and punctuation.

    A system message or an earlier turn doesn't make another prompt of the same
    question, so only the last message counts.
    """
    return _hash(messages[-1]["content"])


def conversation_hash(messages: Messages) -> str:
    """Hash all turns: two conversations that end alike are two.

    Of a single turn it is `prompt_hash`.
    """
    turns = [m["content"] for m in messages if m["role"] != "system"]
    return _hash("\n".join(turns))


def _hash(text: str) -> str:
    words = _NO_WORD.sub(" ", text.casefold()).strip()
    return hashlib.sha256(words.encode()).hexdigest()[:24]


def load_prompt_rows(path: Path) -> list[dict[str, Any]]:
    """Read a JSONL file of prompts.

    Raises:
        ValueError: The file can't be read, or a line is no prompt.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise option_error(
            f"the prompts {path} can't be read ({error})",
            'JSON lines {"messages": [...]}, relative to the repository, are allowed',
            "prompts.files: [training/prompts/everyday.jsonl]",
        ) from error
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            assert row["messages"][-1]["content"]
        except (ValueError, KeyError, IndexError, TypeError, AssertionError):
            raise option_error(
                f"line {number} of {path} is no prompt (got {line[:80]!r})",
                'Rows {"messages": [{"role": "user", "content": "..."}]} are allowed',
                f"the prompts of {path.name} in this form",
            ) from None
        rows.append(row)
    return rows


class HeldOut:
    """The prompts that must not be trained on."""

    def __init__(self, path: Path):
        self.path = path
        self.rows = load_prompt_rows(path)
        self.hashes = {prompt_hash(row["messages"]) for row in self.rows}

    def is_leak(self, messages: Messages) -> bool:
        """Whether these messages ask what a held-out prompt asks."""
        return prompt_hash(messages) in self.hashes

    def refuse(self, hashes: Iterable[str], where: str) -> None:
        """Stop if training data holds a held-out prompt.

        Raises:
            ValueError: It does.
        """
        leaked = sorted(self.hashes & set(hashes))
        if leaked:
            raise option_error(
                f"{where} holds {len(leaked)} of the {len(self.hashes)} held-out "
                f"prompts of {self.path} (hashes {', '.join(leaked[:4])})",
                "Prompts that are not held out are allowed",
                "prompts.files without those prompts, and a new work_dir",
            )
