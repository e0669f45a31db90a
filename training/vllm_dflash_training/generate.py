# SPDX-License-Identifier: Apache-2.0
"""Prompts to responses of the target, in shards that survive an interruption."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from vllm_dflash_training.backends import Backend, Sampling
from vllm_dflash_training.config import RunConfig
from vllm_dflash_training.heldout import HeldOut, prompt_hash
from vllm_dflash_training.prompts import collect_prompts, opening_words
from vllm_dflash_training.shards import read_rows, require_same_run, write_rows
from vllm_dflash_training.tokenise import ChatTokens

PROMPTS, HELD_OUT, SELF = "prompts.jsonl", "heldout.jsonl", "self.jsonl"
# A self-written prompt of fewer characters asks nothing.
_MIN_SELF_CHARACTERS = 12


def facts(config: RunConfig) -> dict[str, Any]:
    """What data are made from; another value needs another folder.

    How many requests run at once, and for how long, changes no prompt.
    """
    generation = dataclasses.asdict(config.generation)
    for name in ("batch_size", "time_limit_s", "gpu_memory_utilization"):
        del generation[name]
    return {
        "target": config.target,
        "seed": config.seed,
        "prompts": dataclasses.asdict(config.prompts),
        "generation": generation,
        "heldout_tokens": config.evaluation.max_tokens,
        "heldout_limit": config.evaluation.limit,
    }


def make_prompts(config: RunConfig, heldout: HeldOut) -> int:
    """Write the prompts that need no model; return how many there are."""
    folder = config.data_folder()
    require_same_run(folder / "facts.json", facts(config))
    path = folder / PROMPTS
    if not path.exists():
        write_rows(path, collect_prompts(config.prompts, config.seed, heldout))
    return sum(1 for _ in read_rows(path))


class Generation:
    """The stage that needs the target: held-out answers, own prompts, responses."""

    tokens: ChatTokens
    backend: Backend

    def __init__(self, config: RunConfig, heldout: HeldOut):
        self.config, self.heldout = config, heldout
        self.folder = config.data_folder()
        self.started = time.perf_counter()

    def is_complete(self) -> bool:
        """Whether nothing is missing, so that no model need be loaded."""
        needed = [HELD_OUT, PROMPTS]
        if self.config.prompts.self_generated.count:
            needed.append(SELF)
        if not all((self.folder / name).exists() for name in needed):
            return False
        return all(path.exists() for path, *_ in self._plan(self._all_prompts()))

    def run(self, tokens: ChatTokens, backend: Backend) -> int:
        """Write what is missing, until all is there or the time is up.

        Args:
            tokens: Of the target.
            backend: Answers as the target.

        Returns:
            Number of shards of responses written by this call.
        """
        self.tokens, self.backend = tokens, backend
        self._answer_heldout()
        self._write_own_prompts()
        prompts = self._all_prompts()
        written = 0
        for path, rows, temperature, seed in self._plan(prompts):
            if path.exists():
                continue
            if self._is_late():
                break
            write_rows(path, self._answer(rows, temperature, seed))
            written += 1
        return written

    def _is_late(self) -> bool:
        limit = self.config.generation.time_limit_s
        return limit is not None and time.perf_counter() - self.started > limit

    def _answer_heldout(self) -> None:
        """Greedy answers to the held-out prompts, for the proxies only."""
        path = self.folder / HELD_OUT
        if path.exists():
            return
        rows = choose_heldout(self.heldout.rows, self.config.evaluation.limit)
        prompts = [self.tokens.prompt(row["messages"]) for row in rows]
        sampling = Sampling(0.0, self.config.evaluation.max_tokens, 0.0, 0)
        responses = self.backend.generate(prompts, sampling)
        write_rows(
            path,
            (
                {"prompt": p, "response": r, "kind": row.get("kind", "file")}
                for row, p, r in zip(rows, prompts, responses, strict=True)
            ),
        )

    def _write_own_prompts(self) -> None:
        options, path = self.config.prompts.self_generated, self.folder / SELF
        if not options.count or path.exists():
            return
        words = opening_words(self.config.seed)
        openings = [next(words) for _ in range(options.count)]
        sampling = Sampling(
            options.temperature, options.max_tokens, options.min_p, self.config.seed
        )
        inputs = [self.tokens.opening(opening) for opening in openings]
        stops = set(self.backend.stop_ids)
        rows, seen = [], set(self.heldout.hashes)
        for opening, response in zip(
            openings, self.backend.generate(inputs, sampling), strict=True
        ):
            if not response or response[-1] not in stops:
                # Cut off in the middle of the question.
                continue
            text = (opening + self.tokens.text(response)).strip()
            messages = [{"role": "user", "content": text}]
            key = prompt_hash(messages)
            if len(text) >= _MIN_SELF_CHARACTERS and key not in seen:
                seen.add(key)
                rows.append({"kind": "self", "messages": messages, "hash": key})
        write_rows(path, rows)

    def _all_prompts(self) -> list[dict[str, Any]]:
        rows = list(read_rows(self.folder / PROMPTS))
        if (self.folder / SELF).exists():
            rows += read_rows(self.folder / SELF)
        self.heldout.refuse((row["hash"] for row in rows), str(self.folder))
        order = np.random.default_rng(self.config.seed).permutation(len(rows))
        return [rows[i] for i in order]

    def _plan(
        self, prompts: list[dict[str, Any]]
    ) -> Iterator[tuple[Path, list[dict[str, Any]], float, int]]:
        """Shards in the order of their making: every pass over a part, then the next.

        So a time limit leaves each pass its share.
        """
        options = self.config.generation
        size = options.shard_size
        for shard, start in enumerate(range(0, len(prompts), size)):
            part = prompts[start : start + size]
            for number, one in enumerate(options.passes):
                rows = part[: round(len(part) * one.share)]
                if rows:
                    name = f"responses-{shard:05d}-{number}.jsonl"
                    seed = self.config.seed + 1 + (shard * 64 + number) * size
                    yield self.folder / name, rows, one.temperature, seed

    def _answer(
        self, rows: list[dict[str, Any]], temperature: float, seed: int
    ) -> Iterator[dict[str, Any]]:
        options = self.config.generation
        limit = self.config.prompts.max_tokens
        found = [(row, self.tokens.prompt(row["messages"])) for row in rows]
        found = [(row, prompt) for row, prompt in found if len(prompt) <= limit]
        sampling = Sampling(temperature, options.max_tokens, options.min_p, seed)
        responses = self.backend.generate([prompt for _, prompt in found], sampling)
        for (row, prompt), response in zip(found, responses, strict=True):
            yield {
                "prompt": prompt,
                "response": response,
                "kind": row["kind"],
                "temperature": temperature,
                "hash": row["hash"],
            }


def choose_heldout(
    rows: list[dict[str, Any]], limit: int | None
) -> list[dict[str, Any]]:
    """Return some of the rows, the kinds in turn."""
    if limit is None:
        return rows
    rank = dict.fromkeys((row.get("kind") for row in rows), -1)
    keyed = []
    for index, row in enumerate(rows):
        rank[row.get("kind")] += 1
        keyed.append((rank[row.get("kind")], index))
    return [rows[index] for index in sorted(i for _, i in sorted(keyed)[:limit])]


def load_heldout_responses(folder: Path) -> list[tuple[list[int], list[int]]]:
    """Return the target's answers to the held-out prompts."""
    rows = read_rows(folder / HELD_OUT)
    return [(row["prompt"], row["response"]) for row in rows]
