# SPDX-License-Identifier: Apache-2.0
"""One process a GPU, as `torchrun` starts them."""

from __future__ import annotations

import os
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

# The first process may generate for hours before the others have something to do.
_PATIENCE = timedelta(days=7)


@dataclass(frozen=True)
class World:
    """Which process this is."""

    rank: int = 0
    size: int = 1
    device: torch.device = torch.device("cpu")

    @property
    def is_first(self) -> bool:
        """Whether this process writes files and shows progress."""
        return self.rank == 0

    def any(self, value: bool) -> bool:
        """Whether it holds in any process, so that all decide alike."""
        if self.size == 1:
            return value
        flag = torch.tensor(int(value), device=self.device)
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        return bool(flag)

    def largest(self, value: float) -> float:
        """The largest of all processes."""
        if self.size == 1:
            return value
        number = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(number, dist.ReduceOp.MAX)
        return float(number)


def find_device() -> torch.device:
    """Return this process's GPU, or the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))


def is_first_process() -> bool:
    """Whether this is the process that prepares for the others."""
    return int(os.environ.get("RANK", 0)) == 0


@contextmanager
def world():
    """Join the other processes of `torchrun`, if there are any."""
    device = find_device()
    size = int(os.environ.get("WORLD_SIZE", 1))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if size == 1:
        yield World(device=device)
        return
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=_PATIENCE)
    try:
        yield World(dist.get_rank(), size, device)
    finally:
        dist.destroy_process_group()
