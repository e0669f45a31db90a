# SPDX-License-Identifier: Apache-2.0
"""Prompts that the target writes itself, in parts that several engines can write."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path

from vllm_dflash_training.backends import Job, Sampling
from vllm_dflash_training.config import RunConfig
from vllm_dflash_training.heldout import HeldOut, prompt_hash
from vllm_dflash_training.prompts import opening_words
from vllm_dflash_training.shards import read_rows, write_rows
from vllm_dflash_training.tokenise import ChatTokens

# A prompt of fewer characters asks nothing.
_MIN_CHARACTERS = 12


class OwnPrompts:
    """The user's turns that the target writes after an opening.

    Where a part begins and ends depends on the config alone, and each prompt on its
    number; so do the prompts that the parts are merged to.
    """

    def __init__(self, config: RunConfig, heldout: HeldOut, path: Path):
        self.options = config.prompts.self_generated
        self.seed, self.size = config.seed, config.generation.shard_size
        self.heldout, self.path = heldout, path

    def is_missing(self) -> bool:
        """Whether they are wanted and not there yet."""
        return self.options.count > 0 and not self.path.exists()

    def parts(self) -> list[Path]:
        """Return the files that are merged to all of the prompts."""
        number = -(-self.options.count // self.size)
        name = f"{self.path.stem}-{{:05d}}{self.path.suffix}"
        return [self.path.with_name(name.format(i)) for i in range(number)]

    def jobs(
        self, tokens: ChatTokens, stop_ids: list[int], index: int, count: int
    ) -> Iterator[Job]:
        """Yield what writes the missing parts of engine `index` of `count`."""
        options = self.options
        openings = list(islice(opening_words(self.seed), options.count))
        for number, path in enumerate(self.parts()):
            if number % count != index:
                continue
            # In this order: they may be merged, and this part be gone, meanwhile.
            if path.exists() or not self.is_missing():
                continue
            start = number * self.size
            part = openings[start : start + self.size]
            # Counted on from the first prompt of all.
            seed = self.seed + start
            sampling = Sampling(
                options.temperature, options.max_tokens, options.min_p, seed
            )
            inputs = [tokens.opening(opening) for opening in part]
            finish = partial(self._write, path, tokens, set(stop_ids), part)
            yield Job(inputs, sampling, finish)

    def _write(
        self,
        path: Path,
        tokens: ChatTokens,
        stops: set[int],
        openings: list[str],
        responses: list[list[int]],
    ) -> None:
        rows = []
        for opening, response in zip(openings, responses, strict=True):
            if not response or response[-1] not in stops:
                # Cut off in the middle of the question.
                continue
            text = (opening + tokens.text(response)).strip()
            messages = [{"role": "user", "content": text}]
            key = prompt_hash(messages)
            if len(text) >= _MIN_CHARACTERS and key not in self.heldout.hashes:
                rows.append({"kind": "self", "messages": messages, "hash": key})
        write_rows(path, rows)

    def merge(self) -> None:
        """Write all prompts, each once, from the parts, which must be there."""
        rows, seen = [], set()
        for part in self.parts():
            for row in read_rows(part):
                if row["hash"] not in seen:
                    seen.add(row["hash"])
                    rows.append(row)
        write_rows(self.path, rows)
        for part in self.parts():
            part.unlink()
