# SPDX-License-Identifier: Apache-2.0
"""Prompts of the acceptance evaluation: the held-out ones, or files of one's own."""

from pathlib import Path
from typing import Any

from vllm_dflash.calibrate.prompts import in_turn, read_prompt_lines
from vllm_dflash.errors import option_error

HELD_OUT = Path(__file__).parent / "prompts" / "heldout.jsonl"

Prompt = dict[str, Any]


def load_prompts(
    files: list[Path] | None = None, limit: int | None = None
) -> list[Prompt]:
    """Return the prompts, or ``limit`` of them with the tasks in turn.

    Args:
        files: JSON lines with ``messages`` or ``prompt``; the held-out prompts if there
            are none. The task of a prompt is its ``kind``, otherwise the file's name.
        limit: How many, None: all.

    Raises:
        ValueError: A line is no prompt, or two have the same id.
    """
    prompts = [prompt for path in files or [HELD_OUT] for prompt in _read(path)]
    ids = [prompt["id"] for prompt in prompts]
    twice = sorted({name for name in ids if ids.count(name) > 1})
    if twice:
        raise option_error(
            f"two prompts have the same id (got {', '.join(twice[:3])})",
            "An id stands for one prompt of all files",
            'another "id", or none: then it is made from the file and the line',
        )
    if limit is None:
        return prompts
    chosen = in_turn([prompt["kind"] for prompt in prompts])[:limit]
    return [prompts[index] for index in sorted(chosen)]


def tasks(prompts: list[Prompt]) -> list[str]:
    """Names of the tasks, in order of their first prompt."""
    return list(dict.fromkeys(prompt["kind"] for prompt in prompts))


def _read(path: Path) -> list[Prompt]:
    return [
        {
            "id": str(item.get("id", f"{path.stem}-{number}")),
            "kind": item.get("kind", path.stem),
            "messages": messages,
        }
        for number, item, messages in read_prompt_lines(path)
    ]
