# SPDX-License-Identifier: Apache-2.0
"""How long the stages of a round take, without making the host wait for the device.

On a GPU a mark is a CUDA event on the current stream. Events are looked at later, by
whoever asks for the totals, and only once the last one of their round has been
reached. On the CPU a mark is the time.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import torch

# In the order of a round. "update" is vLLM's bookkeeping between commit and draft.
STAGES = ("prepare", "target", "sample", "commit", "update", "draft")
# Rounds whose events have not been read yet; past this a round goes untimed.
_MAX_PENDING = 4096


class StageClock:
    """Marks made by the round, totals read by another thread."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._marks: list[tuple[str, Any]] | None = None
        self._pending: deque[list[tuple[str, Any]]] = deque()
        self._free: deque[torch.cuda.Event] = deque()
        self.seconds = dict.fromkeys(STAGES, 0.0)
        self.counts = dict.fromkeys(STAGES, 0)

    @property
    def is_behind(self) -> bool:
        """Whether a round has begun that is not in the totals."""
        return self._marks is not None or bool(self._pending)

    def begin(self) -> None:
        """Start timing a round; one that never ended is dropped."""
        self._marks = None
        if len(self._pending) < _MAX_PENDING:
            self._marks = [("", self._now())]

    def mark(self, stage: str) -> None:
        """The stage has ended here."""
        if self._marks is not None:
            self._marks.append((stage, self._now()))

    def end(self) -> None:
        """The round is over."""
        if self._marks is not None:
            self._pending.append(self._marks)
            self._marks = None

    def collect(self) -> None:
        """Add the rounds that the device has finished to the totals. Never waits."""
        while self._pending and self._is_reached(self._pending[0][-1][1]):
            marks = self._pending.popleft()
            for (_, before), (stage, after) in zip(marks, marks[1:], strict=False):
                self.seconds[stage] += self._between(before, after)
                self.counts[stage] += 1
            if self._is_cuda:
                self._free.extend(event for _, event in marks)

    def _now(self) -> Any:
        if not self._is_cuda:
            return time.perf_counter()
        event = self._free.popleft() if self._free else None
        event = event or torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _is_reached(self, mark: Any) -> bool:
        return not self._is_cuda or mark.query()

    def _between(self, before: Any, after: Any) -> float:
        if self._is_cuda:
            return before.elapsed_time(after) / 1000
        return after - before
