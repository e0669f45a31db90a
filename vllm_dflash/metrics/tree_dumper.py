# SPDX-License-Identifier: Apache-2.0
"""Writes every verified tree to a file. For looking closely, not for serving.

Reads the round back to the host, so each step waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from vllm_dflash.metrics.tree_dump import TreeRound, engine_line

if TYPE_CHECKING:
    import numpy as np
    from vllm.config import VllmConfig

    from vllm_dflash.config import DDTreeConfig


class TreeDumper:
    """One engine's lines of a dump."""

    def __init__(self, path: Path, vllm_config: VllmConfig, tree: DDTreeConfig) -> None:
        spec_config = vllm_config.speculative_config
        assert spec_config is not None
        self.depth = tree.depth
        self.engine = vllm_config.parallel_config.data_parallel_index
        self._step = 0
        # Slot -> candidates of its next tree: tokens [K, C], log-probabilities [K, C].
        self._candidates: dict[int, tuple[list[list[int]], list[list[float]]]] = {}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Tokens of every request: for the user who started the engine only.
            path.touch(mode=0o600)
            # It holds what was asked and answered.
            path.touch(mode=0o600)
            # Unbuffered: a line is one write, whole also beside another engine's.
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise ValueError(
                f"VLLM_DFLASH_DUMP_TREES can't be written (got {path}: "
                f"{error.strerror}). A file in a folder of yours is allowed. Type "
                "VLLM_DFLASH_DUMP_TREES=/tmp/trees.jsonl."
            ) from error
        self._write(
            engine_line(
                engine=self.engine,
                model=vllm_config.model_config.model,
                draft=spec_config.draft_model_config.model,
                tokenizer=vllm_config.model_config.tokenizer,
                depth=tree.depth,
                budget=tree.budget,
                max_children=tree.max_children,
            )
        )

    def keep_candidates(
        self,
        # [num_reqs], request state slots
        slots: np.ndarray,
        # [>= num_reqs * K, C]
        tokens: torch.Tensor,
        # [>= num_reqs * K, C], natural log-probabilities
        logprobs: torch.Tensor,
    ) -> None:
        """Remember what the trees just built were made of."""
        num_rows = len(slots) * self.depth
        token_rows = tokens[:num_rows].tolist()
        logprob_rows = logprobs[:num_rows].tolist()
        for index, slot in enumerate(slots.tolist()):
            rows = slice(index * self.depth, (index + 1) * self.depth)
            self._candidates[slot] = (token_rows[rows], logprob_rows[rows])

    def write_step(
        self,
        input_batch: Any,
        # [num_logits], input token of each row
        node_tokens: torch.Tensor,
        # [max_num_reqs, W], by slot; unused nodes -2
        parents: torch.Tensor,
        # [num_reqs], rows of each tree, 0: none
        tree_len: torch.Tensor,
        # [num_reqs, K + 1]
        path: torch.Tensor,
        # [num_reqs, W]
        sampled: torch.Tensor,
        # [num_reqs]
        num_sampled: torch.Tensor,
        # [num_logits]
        positions: torch.Tensor,
    ) -> None:
        """Append a line for each request of the step that verified a tree."""
        self._step += 1
        starts = input_batch.cu_num_logits_np.tolist()
        slots = input_batch.idx_mapping_np.tolist()
        all_tokens, all_positions = node_tokens.tolist(), positions.tolist()
        counts, lengths = num_sampled.tolist(), tree_len.tolist()
        for index, request in enumerate(input_batch.req_ids):
            length, count, start = lengths[index], counts[index], starts[index]
            if not length or not count:
                continue
            node_parents = parents[slots[index], :length].tolist()
            # Rows past the tree: a chain of a request that needs its history.
            size = next((n for n, p in enumerate(node_parents) if p == -2), length)
            tokens = all_tokens[start : start + size]
            line = TreeRound(
                request=request,
                step=self._step,
                position=all_positions[start],
                tokens=tokens,
                parents=node_parents[:size],
                logprobs=self._logprobs(slots[index], tokens, node_parents[:size]),
                path=path[index, :count].tolist(),
                emitted=sampled[index, :count].tolist(),
                engine=self.engine,
            )
            self._write(line.to_json())

    def _logprobs(
        self, slot: int, tokens: Sequence[int], parents: Sequence[int]
    ) -> list[float | None]:
        candidates, logprobs = self._candidates.get(slot, ([], []))
        depths = [0] * len(tokens)
        result: list[float | None] = [None]
        for node in range(1, len(tokens)):
            depths[node] = depth = depths[parents[node]] + 1
            row = candidates[depth - 1] if depth <= len(candidates) else []
            found = tokens[node] in row
            result.append(
                logprobs[depth - 1][row.index(tokens[node])] if found else None
            )
        return result

    def _write(self, line: str) -> None:
        self._file.write(line.encode() + b"\n")
