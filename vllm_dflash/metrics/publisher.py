# SPDX-License-Identifier: Apache-2.0
"""Reads the device's counters about once a second, outside the round.

A thread of the worker copies them on a stream of its own and waits for that copy; the
round only adds one to a number. The counters only grow and are aligned 8-byte words,
so a copy beside a running kernel is a little late and never torn. What it missed comes
with the next one: after the last round there is one more.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING

import torch

from vllm_dflash.logger import init_logger
from vllm_dflash.metrics.definitions import (
    ACCEPTED_BY_RANK,
    COUNTER,
    STAGE_TIME,
    SUMMARY,
)
from vllm_dflash.metrics.stage_clock import StageClock

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_dflash.metrics.exchange import WorkerTable

logger = init_logger(__name__)

INTERVAL_S = 1.0


class CounterPublisher:
    """Owns the thread that reads the counters, and ends with the engine."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        # [C], int64
        rank_counts: torch.Tensor,
        clock: StageClock | None,
    ) -> None:
        self._vllm_config = vllm_config
        self._rank_counts = rank_counts
        self._clock = clock
        self._rounds = 0
        self._published_rounds = 0
        self._is_settled = True
        self._stop = threading.Event()
        self._host_counts: torch.Tensor | None = None
        self._stream: torch.cuda.Stream | None = None
        self._counter_table: WorkerTable | None = None
        self._summary_table: WorkerTable | None = None

    def round_done(self) -> None:
        """There may be something to publish."""
        self._rounds += 1

    def start(self) -> None:
        """Start the thread, if anybody reads what it publishes.

        Not before graphs are captured: another thread's allocation breaks a capture.
        """
        from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

        from vllm_dflash.metrics.exchange import WorkerTable, find_folder

        folder = find_folder()
        # All ranks of a tensor-parallel group walk the same trees.
        if folder is None or get_tensor_model_parallel_rank() != 0:
            return
        config = self._vllm_config
        labels = (
            config.model_config.served_model_name,
            str(config.parallel_config.data_parallel_index),
        )
        self._counter_table = WorkerTable(folder, COUNTER, config.instance_id, labels)
        if self._clock is not None:
            self._summary_table = WorkerTable(
                folder, SUMMARY, config.instance_id, labels
            )
        weakref.finalize(self, self._stop.set)
        threading.Thread(
            target=_publish_until_stopped,
            args=(weakref.ref(self), self._stop),
            name="vllm-dflash-metrics",
            daemon=True,
        ).start()

    def publish(self) -> None:
        """Write what has been counted since the last time, if anything has."""
        if self._counter_table is None:
            return
        rounds = self._rounds
        is_idle = rounds == self._published_rounds
        if is_idle and self._is_settled:
            return
        counts = self._read_counts()
        self._counter_table.write(
            ACCEPTED_BY_RANK, {str(rank): n for rank, n in enumerate(counts)}
        )
        if self._clock is not None and self._summary_table is not None:
            self._clock.collect()
            self._summary_table.write(STAGE_TIME, self._clock.seconds, "_sum")
            self._summary_table.write(STAGE_TIME, self._clock.counts, "_count")
        # The host counts a round when it is launched: the device may be behind, and a
        # timed round goes on until the next draft is made.
        is_timed = self._clock is None or not self._clock.is_behind
        self._published_rounds, self._is_settled = rounds, is_idle and is_timed

    def _read_counts(self) -> list[int]:
        if self._rank_counts.device.type != "cuda":
            return self._rank_counts.tolist()
        device = self._rank_counts.device
        if self._stream is None or self._host_counts is None:
            self._stream = torch.cuda.Stream(device)
            self._host_counts = torch.empty(
                self._rank_counts.shape,
                dtype=torch.int64,
                device="cpu",
                pin_memory=True,
            )
        with torch.cuda.device(device), torch.cuda.stream(self._stream):
            self._host_counts.copy_(self._rank_counts, non_blocking=True)
            copied = torch.cuda.Event(blocking=True)
            copied.record(self._stream)
        copied.synchronize()
        return self._host_counts.tolist()


def _publish_until_stopped(
    publisher_ref: weakref.ref[CounterPublisher], stop: threading.Event
) -> None:
    while not stop.wait(INTERVAL_S):
        publisher = publisher_ref()
        if publisher is None:
            return
        try:
            publisher.publish()
        except Exception:
            # An engine must not end because of its statistics.
            logger.exception("vllm-dflash stops publishing the worker's metrics")
            return
        del publisher
