# SPDX-License-Identifier: Apache-2.0
"""The front end's side: vLLM's statistics of every step -> `vllm_dflash:*`.

A stat logger like vLLM's own, beside them in the same manager. It is not registered
as an entry point `vllm.stat_logger_plugins`: vLLM loads those for every engine, turns
statistics on for them even where the user has switched them off, and leaves them out
of `vllm.LLM`.
"""

from __future__ import annotations

from typing import Any

from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from prometheus_client.samples import Sample
from vllm.config import VllmConfig
from vllm.v1.metrics.loggers import (
    AggregateStatLoggerBase,
    LoggingStatLogger,
    PerEngineStatLoggerAdapter,
    StatLoggerManager,
)
from vllm.v1.metrics.stats import SchedulerStats

from vllm_dflash.config import get_ddtree_config
from vllm_dflash.metrics.canary import AcceptanceCanary
from vllm_dflash.metrics.definitions import (
    ACCEPTANCE_LENGTH,
    ACCEPTED_BY_DEPTH,
    PREFIX,
    PROPOSED_NODES,
    ROUNDS,
    ROUNDS_BY_WIDTH,
    VERIFY_WIDTH,
)
from vllm_dflash.metrics.exchange import FrontEndFolder
from vllm_dflash.metrics.log_line import TreeSpecDecodingLogging
from vllm_dflash.metrics.step_counts import StepCounts


class TreeStatLogger(AggregateStatLoggerBase):
    """Publishes the metrics of engines with trees, and watches their acceptance."""

    def __init__(self, vllm_config: VllmConfig, engine_indexes: list[int]) -> None:
        tree = get_ddtree_config(vllm_config)
        assert tree is not None, "made for an engine without trees"
        spec_config = vllm_config.speculative_config
        assert spec_config is not None
        self.depth = tree.depth
        self._model_name = vllm_config.model_config.served_model_name
        _unregister()

        def make(kind: Any, spec: Any, **options: Any) -> Any:
            # A gauge of several API servers: each sees the steps of its own requests.
            if kind is Gauge:
                options["multiprocess_mode"] = "mostrecent"
            return kind(spec.name, spec.meaning, spec.labels, **options)

        self._rounds = make(Counter, ROUNDS)
        self._nodes = make(Counter, PROPOSED_NODES)
        self._by_depth = make(Counter, ACCEPTED_BY_DEPTH)
        self._by_width = make(Counter, ROUNDS_BY_WIDTH)
        self._width = make(Gauge, VERIFY_WIDTH)
        self._lengths = make(
            Histogram, ACCEPTANCE_LENGTH, buckets=range(1, self.depth + 2)
        )
        # From the start: a rate needs a first value.
        for engine in engine_indexes:
            labels = self._labels(engine)
            for metric in (self._rounds, self._nodes, self._width, self._lengths):
                metric.labels(*labels)
            for depth in range(1, self.depth + 1):
                self._by_depth.labels(*labels, str(depth))
            for width in tree.widths:
                if width > 1:
                    self._by_width.labels(*labels, str(width))
        draft, target = spec_config.draft_model_config, vllm_config.model_config
        self._canary = AcceptanceCanary(draft.model, target.model)
        self._folder = FrontEndFolder()

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        stats = scheduler_stats.spec_decoding_stats if scheduler_stats else None
        if stats is None:
            return
        counts = StepCounts.of(stats, self.depth)
        labels = self._labels(engine_idx)
        self._rounds.labels(*labels).inc(counts.rounds)
        self._nodes.labels(*labels).inc(counts.nodes)
        for depth, number in enumerate(counts.accepted_by_depth, 1):
            if number:
                self._by_depth.labels(*labels, str(depth)).inc(number)
        for width, rounds in counts.widths.items():
            self._by_width.labels(*labels, str(width)).inc(rounds)
        self._width.labels(*labels).set(max(counts.widths, default=0))
        histogram = self._lengths.labels(*labels)
        for length, rounds in counts.lengths.items():
            for _ in range(rounds):
                histogram.observe(length)
        self._canary.observe(counts.rounds, counts.accepted)

    def log_engine_initialized(self) -> None:
        pass

    def _labels(self, engine: int) -> tuple[str, str]:
        return self._model_name, str(engine)


def count_trees_in_log_lines(manager: StatLoggerManager, depth: int) -> None:
    """Let vLLM's periodic lines of this engine count depths, and add our own."""
    for stat_logger in manager.stat_loggers:
        loggers = (
            stat_logger.per_engine_stat_loggers.values()
            if isinstance(stat_logger, PerEngineStatLoggerAdapter)
            else [stat_logger]
        )
        for each in loggers:
            if isinstance(each, LoggingStatLogger):
                each.spec_decoding_logging = TreeSpecDecodingLogging(depth)


def get_metrics() -> list[Sample]:
    """Return the samples of this process's engine, by name, labels and value.

    The counterpart of `LLM.get_metrics()`, which shows names with `vllm:` only. Needs
    `disable_log_stats=False`, as that does.
    """
    return [
        sample
        for metric in REGISTRY.collect()
        if metric.name.startswith(PREFIX)
        for sample in metric.samples
        if not sample.name.endswith("_created")
    ]


def _unregister() -> None:
    """Forget the collectors of an earlier engine of this process, as vLLM does."""
    for collector in list(REGISTRY._collector_to_names):
        if getattr(collector, "_name", "").startswith(PREFIX):
            REGISTRY.unregister(collector)
