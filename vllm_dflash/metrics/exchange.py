# SPDX-License-Identifier: Apache-2.0
"""How the worker's counters reach /metrics: prometheus_client's multiprocess files.

/metrics is served by the front end, the counters live in the worker, and nothing that
vLLM sends between them has room for more. prometheus_client has files for just this:
one process writes a small memory-mapped table, another merges the tables when it is
scraped. With several API servers vLLM itself uses them, in PROMETHEUS_MULTIPROC_DIR;
otherwise the front end makes a private folder, named after its own process, of which
every worker is a descendant. Without it (statistics are off) workers publish nothing.

A front end that is killed leaves its folder; the next one removes it. Each holds a lock
on its own as long as it lives, for process ids say nothing about another container.
"""

from __future__ import annotations

import contextlib
import fcntl
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

_NAME = "vllm-dflash-{pid}-{since}"
_NAMES = _NAME.format(pid="[0-9]*", since="[0-9]*.[0-9][0-9]")


def private_folder(process: psutil.Process) -> Path:
    """The folder of a front end on this host."""
    # Containers that share a temporary directory have equal process ids.
    name = _NAME.format(pid=process.pid, since=f"{process.create_time():.2f}")
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


def remove_abandoned_folders() -> None:
    """Remove the folders of this user's front ends that were killed."""
    for folder in Path(tempfile.gettempdir()).glob(_NAMES):
        # It may go away meanwhile, or its file system may have no locks.
        with contextlib.suppress(OSError):
            if not _is_ours(folder):
                continue
            handle = _open_folder(folder)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(handle)


def _open_folder(folder: Path) -> int:
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)


def _make_locked_folder(folder: Path) -> int:
    """Make the folder and hold a lock on it until the returned handle is closed."""
    while True:
        folder.mkdir(mode=0o700, exist_ok=True)
        handle = _open_folder(folder)
        # Without locks nobody removes it, this process excepted.
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_SH)
        # Another front end may have removed it before there was a lock.
        if folder.exists() and os.path.samestat(folder.stat(), os.fstat(handle)):
            return handle
        os.close(handle)


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
        remove_abandoned_folders()
        folder = private_folder(psutil.Process())
        folder.mkdir(mode=0o700, exist_ok=True)
        if not _is_ours(folder):
            logger.warning("The worker's metrics are not shown: %s is not ours", folder)
            return
        handle = _make_locked_folder(folder)
        collector = MultiProcessCollector(REGISTRY, path=str(folder))
        self.close = weakref.finalize(self, _forget, collector, folder, handle)


def _nothing() -> None:
    """There is nothing to close."""


def _forget(collector: MultiProcessCollector, folder: Path, handle: int) -> None:
    REGISTRY.unregister(collector)
    shutil.rmtree(folder, ignore_errors=True)
    os.close(handle)


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
