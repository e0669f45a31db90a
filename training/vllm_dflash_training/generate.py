# SPDX-License-Identifier: Apache-2.0
"""Prompts to responses of the target, in shards that survive an interruption."""

from __future__ import annotations

import dataclasses
import itertools
import random
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from vllm_dflash.calibrate.prompts import in_turn
from vllm_dflash_training.answer_prompts import answer_prompts
from vllm_dflash_training.answers import load_answers
from vllm_dflash_training.backends import Backend, Job, Sampling
from vllm_dflash_training.config import RunConfig
from vllm_dflash_training.heldout import HeldOut
from vllm_dflash_training.own_prompts import OwnPrompts
from vllm_dflash_training.prompts import collect_prompts
from vllm_dflash_training.shards import (
    read_rows,
    require_earlier_run,
    require_same_run,
    write_rows,
)
from vllm_dflash_training.target import is_same_target, target_folder
from vllm_dflash_training.tokenise import ChatTokens, load_tokens

PROMPTS, HELD_OUT, SELF = "prompts.jsonl", "heldout.jsonl", "self.jsonl"
# What changes how fast answers are made and in how much memory. Like everything that
# changes what is computed together, it can flip a near tie.
_SPEED = (
    "batch_size",
    "time_limit_s",
    "engines",
    "gpu_memory_utilization",
    "speculative",
)
_ENGINE_SPEED = (
    "async_scheduling",
    "block_size",
    "compilation_config",
    "cpu_offload_gb",
    "cudagraph_capture_sizes",
    "data_parallel_size",
    "disable_log_stats",
    "distributed_executor_backend",
    "enable_chunked_prefill",
    "enable_prefix_caching",
    "enforce_eager",
    "gpu_memory_utilization",
    "kv_cache_memory_bytes",
    "max_cudagraph_capture_size",
    "max_num_batched_tokens",
    "max_num_seqs",
    "num_gpu_blocks_override",
    "pipeline_parallel_size",
    "tensor_parallel_size",
)
_POLL_S = 0.1
# Of earlier answers, so many are looked at for each prompt that is wanted.
_ANSWERS_A_PROMPT = 8


def facts(config: RunConfig) -> dict[str, Any]:
    """What data are made from; another value needs another folder.

    How many requests and engines run at once, and for how long, changes no prompt.
    """
    generation = dataclasses.asdict(config.generation)
    for name in _SPEED:
        del generation[name]
    for name in _ENGINE_SPEED:
        generation["engine_args"].pop(name, None)
    if not generation["engine_args"]:
        # Folders of before there were any go on.
        del generation["engine_args"]
    prompts = dataclasses.asdict(config.prompts)
    if config.prompts.from_answers is None:
        del prompts["from_answers"]
    return {
        "target": config.target,
        "seed": config.seed,
        "prompts": prompts,
        "generation": generation,
        "heldout_tokens": config.evaluation.max_tokens,
        "heldout_limit": config.evaluation.limit,
    }


def make_prompts(config: RunConfig, heldout: HeldOut) -> int:
    """Write the prompts that need no model; return how many there are.

    Raises:
        ValueError: The folder was begun with another config, or what prompts are made
            of is not there.
    """
    folder = config.data_folder()
    path, record = folder / PROMPTS, folder / "facts.json"
    if record.exists() or path.exists():
        require_same_run(record, facts(config))
    if not path.exists():
        more = _from_answers(config, heldout)
        rows = collect_prompts(config.prompts, config.seed, heldout, more)
        # Only now: a folder isn't begun with what is refused.
        require_same_run(record, facts(config))
        write_rows(path, rows)
    return sum(1 for _ in read_rows(path))


def _from_answers(config: RunConfig, heldout: HeldOut) -> list[dict[str, Any]]:
    options = config.prompts.from_answers
    if options is None:
        return []
    source, number = Path(options.data_dir), _ANSWERS_A_PROMPT * options.count
    place = "prompts.from_answers.data_dir"
    require_earlier_run(source, place, config.target, is_same_target)
    tokens, stops = load_tokens(target_folder(config.target))
    rng = random.Random(config.seed)
    answers = load_answers(source, number, rng, tokens, stops, heldout)
    limit = config.prompts.max_tokens
    return answer_prompts(options, answers, rng, tokens, limit, heldout)


@dataclass(frozen=True)
class _Shard:
    """One pass over a part of the prompts."""

    path: Path
    rows: list[dict[str, Any]]
    temperature: float
    # Of the first of its prompts.
    seed: int
    # Of the shards and passes, for who answers it.
    turn: int


class Generation:
    """The stage that needs the target: held-out answers, own prompts, responses.

    Args:
        config: Of the run.
        heldout: Prompts that must not be trained on.
        index: Which of the `generation.engines` this process is.
    """

    tokens: ChatTokens

    def __init__(self, config: RunConfig, heldout: HeldOut, index: int = 0):
        self.config, self.heldout, self.index = config, heldout, index
        self.folder = config.data_folder()
        self.own = OwnPrompts(config, heldout, self.folder / SELF)
        self.started = time.perf_counter()
        self.num_shards = self.num_tokens = 0

    def is_complete(self) -> bool:
        """Whether nothing is missing, so that no model need be loaded."""
        if self.own.is_missing():
            return False
        if not all((self.folder / name).exists() for name in (HELD_OUT, PROMPTS)):
            return False
        return all(shard.path.exists() for shard in self._plan(self._all_prompts()))

    def run(self, tokens: ChatTokens, backend: Backend) -> None:
        """Write this engine's share of what is missing, or until the time is up.

        Args:
            tokens: Of the target.
            backend: Answers as the target.
        """
        self.tokens = tokens
        engines = self.config.generation.engines
        first: Iterable[Job] = self._heldout_jobs() if self.index == 0 else ()
        own: Iterable[Job] = ()
        if self.own.is_missing():
            own = self.own.jobs(tokens, backend.stop_ids, self.index, engines)
        backend.run(itertools.chain(first, own))
        # The order of all prompts depends on all of them.
        if self.own.is_missing() and self.index == 0:
            _wait_for(self.own.parts())
            self.own.merge()
        if self.own.is_missing():
            _wait_for([self.own.path])
        backend.run(self._response_jobs())

    def _is_late(self) -> bool:
        limit = self.config.generation.time_limit_s
        return limit is not None and time.perf_counter() - self.started > limit

    def _heldout_jobs(self) -> Iterator[Job]:
        """Greedy answers to the held-out prompts, for the proxies only."""
        path = self.folder / HELD_OUT
        if path.exists():
            return
        rows = choose_heldout(self.heldout.rows, self.config.evaluation.limit)
        prompts = [self.tokens.prompt(row["messages"]) for row in rows]

        def finish(responses: list[list[int]]) -> None:
            write_rows(
                path,
                (
                    {"prompt": p, "response": r, "kind": row.get("kind", "file")}
                    for row, p, r in zip(rows, prompts, responses, strict=True)
                ),
            )

        sampling = Sampling(0.0, self.config.evaluation.max_tokens, 0.0, 0)
        yield Job(prompts, sampling, finish)

    def _all_prompts(self) -> list[dict[str, Any]]:
        rows = list(read_rows(self.folder / PROMPTS))
        if (self.folder / SELF).exists():
            rows += read_rows(self.folder / SELF)
        self.heldout.refuse((row["hash"] for row in rows), str(self.folder))
        order = np.random.default_rng(self.config.seed).permutation(len(rows))
        return [rows[i] for i in order]

    def _plan(self, prompts: list[dict[str, Any]]) -> Iterator[_Shard]:
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
                    path = self.folder / f"responses-{shard:05d}-{number}.jsonl"
                    seed = self.config.seed + 1 + (shard * 64 + number) * size
                    # Each engine has its share of every pass.
                    yield _Shard(path, rows, one.temperature, seed, shard + number)

    def _response_jobs(self) -> Iterator[Job]:
        engines = self.config.generation.engines
        for shard in self._plan(self._all_prompts()):
            if shard.turn % engines != self.index or shard.path.exists():
                continue
            if self._is_late():
                return
            yield self._answer(shard)

    def _answer(self, shard: _Shard) -> Job:
        options = self.config.generation
        limit = self.config.prompts.max_tokens
        found = [(row, self.tokens.prompt(row["messages"])) for row in shard.rows]
        found = [(row, prompt) for row, prompt in found if len(prompt) <= limit]
        sampling = Sampling(
            shard.temperature, options.max_tokens, options.min_p, shard.seed
        )
        finish = partial(self._write, shard, found)
        return Job([prompt for _, prompt in found], sampling, finish)

    def _write(
        self,
        shard: _Shard,
        found: list[tuple[dict[str, Any], list[int]]],
        responses: list[list[int]],
    ) -> None:
        rows = (
            {
                "prompt": prompt,
                "response": response,
                "kind": row["kind"],
                "temperature": shard.temperature,
                "hash": row["hash"],
            }
            for (row, prompt), response in zip(found, responses, strict=True)
        )
        write_rows(shard.path, rows)
        num_tokens = sum(map(len, responses))
        self.num_shards += 1
        self.num_tokens += num_tokens
        seconds = time.perf_counter() - self.started
        print(
            f"{shard.path.name}: {num_tokens} tokens, {seconds:.0f} s after the start",
            file=sys.stderr,
            flush=True,
        )


def _wait_for(paths: list[Path]) -> None:
    """Wait for what other engines write; when one of them ends, this one is ended."""
    while not all(path.exists() for path in paths):
        time.sleep(_POLL_S)


def choose_heldout(
    rows: list[dict[str, Any]], limit: int | None
) -> list[dict[str, Any]]:
    """Return some of the rows, the kinds in turn."""
    if limit is None:
        return rows
    chosen = in_turn([row.get("kind") for row in rows])[:limit]
    return [rows[index] for index in sorted(chosen)]


def load_heldout_responses(folder: Path) -> list[tuple[list[int], list[int]]]:
    """Return the target's answers to the held-out prompts."""
    rows = read_rows(folder / HELD_OUT)
    return [(row["prompt"], row["response"]) for row in rows]
