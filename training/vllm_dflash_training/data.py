# SPDX-License-Identifier: Apache-2.0
"""Responses in memory, and batches that depend on the seed and the step alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from vllm_dflash.errors import option_error
from vllm_dflash_training.blocks import Batch
from vllm_dflash_training.heldout import HeldOut
from vllm_dflash_training.shards import read_rows

# Shorter responses have next to nothing to draft.
MIN_RESPONSE_TOKENS = 4
_LENGTH_MULTIPLE = 64
# Jitter of the sorting by length, so that batches differ between epochs.
_JITTER_TOKENS = 24


class Responses:
    """Prompts with their responses, as one flat array."""

    def __init__(self, rows: Sequence[tuple[list[int], list[int]]]):
        self.prompt_lens = np.array([len(p) for p, _ in rows], dtype=np.int64)
        self.lens = np.array([len(p) + len(r) for p, r in rows], dtype=np.int64)
        self.starts = np.concatenate([[0], np.cumsum(self.lens)[:-1]])
        self.tokens = np.empty(int(self.lens.sum()), dtype=np.int32)
        for start, (prompt, response) in zip(self.starts, rows, strict=True):
            self.tokens[start : start + len(prompt)] = prompt
            end = start + len(prompt) + len(response)
            self.tokens[start + len(prompt) : end] = response

    def __len__(self) -> int:
        return len(self.lens)

    @property
    def num_response_tokens(self) -> int:
        """Tokens that the target wrote."""
        return int((self.lens - self.prompt_lens).sum())

    def batch(self, indices: Sequence[int] | np.ndarray, multiple: int) -> Batch:
        """Pad some of the sequences to a multiple of a length."""
        lens = self.lens[indices]
        length = -(-int(lens.max()) // multiple) * multiple
        tokens = np.zeros((len(indices), length), dtype=np.int64)
        for row, index in enumerate(indices):
            start = self.starts[index]
            tokens[row, : lens[row]] = self.tokens[start : start + lens[row]]
        return Batch(
            torch.from_numpy(tokens),
            torch.from_numpy(self.prompt_lens[indices]),
            torch.from_numpy(lens),
        )


def load_responses(
    folders: Sequence[Path], max_length: int, heldout: HeldOut
) -> Responses:
    """Read all shards of responses of some data folders.

    What is longer than `max_length` is cut; what then has no response is left out.

    Raises:
        ValueError: There are none, or they answer held-out prompts.
    """
    rows, hashes = [], set()
    where = ", ".join(map(str, folders))
    for path in (p for f in folders for p in sorted(f.glob("responses-*.jsonl"))):
        for row in read_rows(path):
            hashes.add(row["hash"])
            prompt, response = row["prompt"], row["response"]
            response = response[: max(0, max_length - len(prompt))]
            if len(response) >= MIN_RESPONSE_TOKENS:
                rows.append((prompt, response))
    heldout.refuse(hashes, where)
    if not rows:
        raise option_error(
            f"there is nothing to train on in {where} (got 0 responses of "
            f"{MIN_RESPONSE_TOKENS} tokens or more)",
            "Shards of responses are allowed",
            "--stages prompts,generate first",
        )
    return Responses(rows)


class Batches:
    """Micro-batches by number: the same for the same seed, on any number of GPUs."""

    def __init__(self, responses: Responses, num_seqs: int, seed: int):
        self.responses, self.seed = responses, seed
        self.num_seqs = min(num_seqs, len(responses))
        self.per_epoch = len(responses) // self.num_seqs
        self._epoch, self._groups = -1, np.empty((0, 0), dtype=np.int64)

    def get(self, number: int) -> tuple[Batch, torch.Generator]:
        """Return a micro-batch, and the generator that draws its anchors."""
        epoch, index = divmod(number, self.per_epoch)
        if epoch != self._epoch:
            self._epoch, self._groups = epoch, self._shuffle(epoch)
        state = np.random.SeedSequence((self.seed, number)).generate_state(1, np.uint64)
        generator = torch.Generator().manual_seed(int(state[0] >> np.uint64(1)))
        return self.responses.batch(self._groups[index], _LENGTH_MULTIPLE), generator

    def _shuffle(self, epoch: int) -> np.ndarray:
        """Groups of similar length, in random order. Which are left over is random."""
        rng = np.random.default_rng((self.seed, epoch))
        keep = rng.permutation(len(self.responses))[: self.per_epoch * self.num_seqs]
        key = self.responses.lens[keep] + rng.integers(0, _JITTER_TOKENS, len(keep))
        groups = keep[np.argsort(key, kind="stable")].reshape(-1, self.num_seqs)
        return rng.permutation(groups, axis=0)
