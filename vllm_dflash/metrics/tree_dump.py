# SPDX-License-Identifier: Apache-2.0
"""The dump of trees: one JSON object a line. docs/metrics.md describes the format."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

VERSION = 1
ENGINE = "engine"
ROUND = "round"


class DumpError(ValueError):
    """The file is no dump of trees; the message names the line."""


@dataclass(frozen=True)
class TreeRound:
    """One verified tree of one request.

    Attributes:
        request: vLLM's id of the request.
        step: Counts the engine's steps that verified; equal for a batch.
        position: Of the root in the request's tokens, from 0.
        tokens: Token of each node, the root first.
        parents: Index of each node's parent, -1 for the root.
        logprobs: The draft's natural log-probability of each node's token at its depth
            (not of its prefix); None where it is not known, and for the root.
        path: Accepted nodes, the root first.
        emitted: The tokens of the path and the target's own last one.
        engine: Index among data-parallel engines.
    """

    request: str
    step: int
    position: int
    tokens: Sequence[int]
    parents: Sequence[int]
    logprobs: Sequence[float | None]
    path: Sequence[int]
    emitted: Sequence[int]
    engine: int = 0

    @property
    def bonus(self) -> int:
        """The token that the target added after the accepted nodes."""
        return self.emitted[-1]

    def children(self, node: int) -> list[int]:
        """Return the children of a node, the draft's first choice first."""
        return [i for i, parent in enumerate(self.parents) if parent == node]

    def probability(self, node: int) -> float | None:
        """Return the draft's probability of a node's token at its depth."""
        logprob = self.logprobs[node]
        return None if logprob is None else math.exp(logprob)

    def to_json(self) -> str:
        """Return its line, without the line's end."""
        logprobs = [None if p is None else round(p, 4) for p in self.logprobs]
        values = {**vars(self), "logprobs": logprobs}
        return json.dumps({"kind": ROUND, **values}, separators=(",", ":"))

    @classmethod
    def from_values(cls, values: dict[str, Any]) -> TreeRound:
        """Check and restore what `to_json` wrote.

        Raises:
            ValueError: A field is missing or does not fit the others.
        """
        fields = {name: values.get(name) for name in cls.__dataclass_fields__}
        missing = [name for name, value in fields.items() if value is None]
        if missing:
            raise ValueError(f"no field {', '.join(missing)}")
        result = cls(**fields)
        size = len(result.tokens)
        if not size or not (size == len(result.parents) == len(result.logprobs)):
            raise ValueError("tokens, parents and logprobs differ in length")
        if result.parents[0] != -1 or any(
            not 0 <= parent < node for node, parent in enumerate(result.parents[1:], 1)
        ):
            raise ValueError("a parent does not precede its child")
        if len(result.path) != len(result.emitted) or result.path[:1] != [0]:
            raise ValueError("path and emitted don't belong together")
        if any(
            not 0 < node < size or result.parents[node] != before
            for before, node in zip(result.path, result.path[1:], strict=False)
        ):
            raise ValueError("path does not lead from parent to child")
        return result


@dataclass
class TreeDump:
    """A file: what the engine was, and its rounds in order."""

    engine: dict[str, Any] = field(default_factory=dict)
    rounds: list[TreeRound] = field(default_factory=list)

    @property
    def requests(self) -> list[str]:
        """Ids of the requests, in order of their first round."""
        return list(dict.fromkeys(item.request for item in self.rounds))

    def of_request(self, request: str) -> list[TreeRound]:
        """Return the rounds of one request."""
        return [item for item in self.rounds if item.request == request]


def engine_line(**values: Any) -> str:
    """Return the line that an engine writes first, without the line's end."""
    return json.dumps({"kind": ENGINE, "version": VERSION, **values})


def read_dump(path: Path) -> TreeDump:
    """Read a dump; of several engines in one file the last one's facts are kept.

    Raises:
        DumpError: The file is not there or a line is not of this format.
    """
    dump = TreeDump()
    try:
        for number, values in _read_lines(path):
            try:
                if values["kind"] == ENGINE:
                    _require_version(values.get("version"))
                    dump.engine = values
                elif values["kind"] == ROUND:
                    dump.rounds.append(TreeRound.from_values(values))
                else:
                    raise ValueError(f"unknown kind {values['kind']!r}")
            except (KeyError, TypeError, ValueError) as error:
                raise DumpError(
                    f"line {number} of {path} is not of a dump of trees ({error}). "
                    "Allowed are the lines that VLLM_DFLASH_DUMP_TREES makes vLLM "
                    "write. Type VLLM_DFLASH_DUMP_TREES=trees.jsonl before "
                    "`vllm serve`, and send a request"
                ) from error
    except OSError as error:
        raise DumpError(
            f"the dump can't be read ({path}: {error.strerror}). A file that "
            "VLLM_DFLASH_DUMP_TREES names is allowed. Type "
            "VLLM_DFLASH_DUMP_TREES=trees.jsonl before `vllm serve`, and send a request"
        ) from error
    return dump


def _read_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    yield number, json.loads(line)
                except ValueError as error:
                    # The engine may have ended, or be, in the middle of its last line.
                    if line.endswith("\n"):
                        raise DumpError(
                            f"line {number} of {path} is no JSON ({error}). Allowed "
                            "is one JSON object a line, as VLLM_DFLASH_DUMP_TREES "
                            "makes vLLM write them. Type: head -n "
                            f"{number - 1} {path} > part.jsonl"
                        ) from error


def _require_version(version: Any) -> None:
    if version != VERSION:
        raise ValueError(f"version {version!r}, this command reads {VERSION}")
