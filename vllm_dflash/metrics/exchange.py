# SPDX-License-Identifier: Apache-2.0
"""How the worker's counters reach /metrics: prometheus_client's multiprocess files.

/metrics is served by the front end, the counters live in the worker, and nothing that
vLLM sends between them has room for more. prometheus_client has files for just this:
one process writes a small memory-mapped table, another merges the tables when it is
scraped. With several API servers vLLM itself uses them, in PROMETHEUS_MULTIPROC_DIR;
otherwise the front end makes a private folder, named after its own process, of which
every worker is a descendant. Without it (statistics are off) workers publish nothing.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil
from prometheus_client import REGISTRY
from prometheus_client.mmap_dict import MmapedDict, mmap_key
from prometheus_client.multiprocess import MultiProcessCollector

from vllm_dflash import envs
from vllm_dflash.logger import init_logger
from vllm_dflash.metrics.definitions import ENGINE_LABELS, MetricSpec

logger = init_logger(__name__)


def private_folder(process: psutil.Process) -> Path:
    """The folder of a front end on this host."""
    # Containers that share a temporary directory have equal process ids.
    name = f"vllm-dflash-{process.pid}-{process.create_time():.2f}"
    return Path(tempfile.gettempdir()) / name


def find_folder() -> Path | None:
    """Where a worker writes, None if nobody would read it."""
    shared = envs.prometheus_multiproc_dir()
    if shared is not None:
        return Path(shared)
    own = psutil.Process()
    folders = (private_folder(process) for process in (own, *own.parents()))
    return next((folder for folder in folders if _is_ours(folder)), None)


def _is_ours(folder: Path) -> bool:
    # The name can be guessed, so another user may have been there first.
    return (
        folder.is_dir()
        and not folder.is_symlink()
        and folder.stat().st_uid == _own_uid()
    )


def _own_uid() -> int:
    return os.getuid()


class FrontEndFolder:
    """The private folder and its collector in vLLM's registry, while this lives.

    Nothing is made when vLLM collects from PROMETHEUS_MULTIPROC_DIR. As with vLLM's own
    metrics, the latest engine of a process is the one that is shown.
    """

    _current: weakref.ref[FrontEndFolder] | None = None

    def __init__(self) -> None:
        self.close: Callable[[], object] = _nothing
        if envs.prometheus_multiproc_dir() is not None:
            return
        before = FrontEndFolder._current and FrontEndFolder._current()
        if before is not None:
            before.close()
        FrontEndFolder._current = weakref.ref(self)
        folder = private_folder(psutil.Process())
        folder.mkdir(mode=0o700, exist_ok=True)
        if not _is_ours(folder):
            logger.warning("The worker's metrics are not shown: %s is not ours", folder)
            return
        collector = MultiProcessCollector(REGISTRY, path=str(folder))
        self.close = weakref.finalize(self, _forget, collector, folder)


def _nothing() -> None:
    """There is nothing to close."""


def _forget(collector: MultiProcessCollector, folder: Path) -> None:
    REGISTRY.unregister(collector)
    shutil.rmtree(folder, ignore_errors=True)


class WorkerTable:
    """The worker's side: values of one kind of metric, written in place."""

    def __init__(
        self, folder: Path, kind: str, instance_id: str, labels: tuple[str, ...]
    ) -> None:
        # The kind up to the first underscore is how prometheus_client merges a file.
        path = folder / f"{kind}_vllm-dflash-{instance_id}-{os.getpid()}.db"
        self._table = MmapedDict(str(path))
        self._labels = labels

    def write(
        self, spec: MetricSpec, values: Mapping[str, float], suffix: str = ""
    ) -> None:
        """Set the samples of a metric, by the value of its own label."""
        name = spec.name + suffix if suffix else spec.samples[0]
        for value, number in values.items():
            labels = (*self._labels, value)
            key = mmap_key(
                spec.name, name, [*ENGINE_LABELS, spec.label], labels, spec.meaning
            )
            self._table.write_value(key, float(number), 0.0)
