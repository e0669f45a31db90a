# SPDX-License-Identifier: Apache-2.0
"""Loads and scores the local tasks; named by the YAML files beside it.

The items are read from this folder, whatever the working directory is, and without a
network.
"""

import json
import re
from difflib import SequenceMatcher
from functools import partial
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
_NUMBER = re.compile(r"-?\d+")
_ANSWER = re.compile(r"answer is\D{0,10}?(-?\d+)", re.IGNORECASE)


def load(name: str, **_: Any) -> dict[str, Any]:
    """Return the splits ``examples`` and ``test`` of one task as data sets."""
    import datasets

    splits: dict[str, list[dict[str, str]]] = {"examples": [], "test": []}
    with (FOLDER / f"{name}.jsonl").open(encoding="utf-8") as lines:
        for line in lines:
            item = json.loads(line)
            splits[item["split"]].append(item)
    return {split: datasets.Dataset.from_list(rows) for split, rows in splits.items()}


arithmetic = partial(load, "arithmetic")
copying = partial(load, "copying")
json_extraction = partial(load, "json_extraction")
python_functions = partial(load, "python_functions")


def score_arithmetic(doc: dict[str, str], results: list[str]) -> dict[str, float]:
    """Whether the number after "answer is", else the last number, is right."""
    found = _ANSWER.findall(results[0]) or _NUMBER.findall(results[0])
    return {"accuracy": float(bool(found) and found[-1] == doc["answer"])}


def score_copying(doc: dict[str, str], results: list[str]) -> dict[str, float]:
    """Whether the copy is exact, and how similar it is (0 to 1)."""
    copy, text = results[0].strip(), doc["answer"]
    matcher = SequenceMatcher(None, copy, text, autojunk=False)
    return {"accuracy": float(copy == text), "similarity": matcher.ratio()}


def score_json(doc: dict[str, str], results: list[str]) -> dict[str, float]:
    """Whether the object is right, and the share of its fields that are."""
    expected = json.loads(doc["answer"])
    found = _first_object(results[0])
    right = sum(
        # `True == 1` in Python, but not in JSON.
        key in found and found[key] == value and type(found[key]) is type(value)
        for key, value in expected.items()
    )
    return {
        "accuracy": float(right == len(expected) == len(found)),
        "fields": right / len(expected),
    }


def _first_object(text: str) -> dict[str, Any]:
    start = text.find("{")
    if start >= 0:
        try:
            value, _ = json.JSONDecoder().raw_decode(text[start:])
        except json.JSONDecodeError:
            return {}
        return value
    return {}
