# SPDX-License-Identifier: Apache-2.0
"""JSONL files that are there entirely or not at all."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from vllm_dflash.errors import option_error


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write a shard; an interrupted write leaves nothing under its name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    with part.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    part.replace(path)


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a shard."""
    with path.open(encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)


def require_same_run(path: Path, facts: dict[str, Any]) -> None:
    """Record what a folder was made from; refuse to go on with something else.

    Raises:
        ValueError: The folder was begun with other facts.
    """
    facts = json.loads(json.dumps(facts))
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(path.name + ".part")
        part.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        part.replace(path)
        return
    before = json.loads(path.read_text(encoding="utf-8"))
    changed = sorted(key for key in facts | before if facts.get(key) != before.get(key))
    if changed:
        key = changed[0]
        raise option_error(
            f"{path.parent} was begun with another config: {', '.join(changed)} "
            f"(got {key} {facts.get(key)!r}, it has {before.get(key)!r})",
            "The config it was begun with is allowed",
            "work_dir: with a new folder",
        )


def require_earlier_run(
    folder: Path, place: str, target: str, is_same: Callable[[str, str], bool]
) -> None:
    """Stop if a folder is no data of an earlier run of this target.

    Args:
        folder: Of the earlier run.
        place: The key of the config that names it.
        target: Of this run.
        is_same: Whether two names are of the same target.

    Raises:
        ValueError: It isn't.
    """
    way_out = f"{place} with the data folder of a run for {target}"
    missing = [
        name
        for name in ("facts.json", "prompts.jsonl", "heldout.jsonl")
        if not (folder / name).is_file()
    ]
    problem = None
    if missing:
        problem = (
            f"{place} is no data folder of a run (got {folder}, without "
            f"{', '.join(missing)})"
        )
    elif not any(folder.glob("responses-*.jsonl")):
        problem = f"{place} holds no answers (got {folder})"
    if problem is not None:
        raise option_error(
            problem,
            "The data folder of an earlier run that has generated is allowed",
            way_out,
        )
    facts = json.loads((folder / "facts.json").read_text(encoding="utf-8"))
    other = facts.get("target")
    if not isinstance(other, str) or not is_same(other, target):
        raise option_error(
            f"{place} holds answers of another target (got {other!r} in {folder}, "
            f"this run's is {target!r})",
            "Answers of the target that the draft is for are allowed",
            way_out,
        )
