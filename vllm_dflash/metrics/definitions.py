# SPDX-License-Identifier: Apache-2.0
"""Every Prometheus metric of the plugin: name, type, labels, unit, meaning.

The table in docs/metrics.md is this one. No name may begin with `vllm:`: vLLM forgets
such collectors when it makes its own, and `vllm bench serve` would count them twice.
"""

from __future__ import annotations

from dataclasses import dataclass

PREFIX = "vllm_dflash:"
# What vLLM labels its own metrics with.
ENGINE_LABELS = ("model_name", "engine")

COUNTER = "counter"
GAUGE = "gauge"
HISTOGRAM = "histogram"
SUMMARY = "summary"
_SUFFIXES = {
    COUNTER: ("_total",),
    GAUGE: ("",),
    HISTOGRAM: ("_bucket", "_sum", "_count"),
    SUMMARY: ("_sum", "_count"),
}


@dataclass(frozen=True)
class MetricSpec:
    """One metric.

    Attributes:
        name: Without the suffix that Prometheus adds to samples.
        kind: `counter`, `gauge`, `histogram` or `summary`.
        label: Its own label beside those of the engine; "" is none.
        unit: What one count is.
        meaning: A sentence for the docs and for `# HELP`.
        from_worker: Counted on the device and read by the worker about once a second;
            others come with vLLM's own statistics of every step.
    """

    name: str
    kind: str
    label: str
    unit: str
    meaning: str
    from_worker: bool = False

    @property
    def labels(self) -> tuple[str, ...]:
        """All labels, in order."""
        return (*ENGINE_LABELS, self.label) if self.label else ENGINE_LABELS

    @property
    def samples(self) -> tuple[str, ...]:
        """The names that a scrape shows and a query uses."""
        return tuple(self.name + suffix for suffix in _SUFFIXES[self.kind])


ROUNDS = MetricSpec(
    PREFIX + "rounds",
    COUNTER,
    "",
    "rounds",
    "Drafts verified: one for each request in each step that checks its draft.",
)
PROPOSED_NODES = MetricSpec(
    PREFIX + "proposed_nodes",
    COUNTER,
    "",
    "nodes",
    "Draft nodes scheduled for verification, roots excluded. "
    "Rows that pad a chain up to the budget count.",
)
ACCEPTANCE_LENGTH = MetricSpec(
    PREFIX + "acceptance_length",
    HISTOGRAM,
    "",
    "tokens",
    "Tokens that a round emitted: the accepted nodes and the target's own token.",
)
ACCEPTED_BY_DEPTH = MetricSpec(
    PREFIX + "accepted_nodes_by_depth",
    COUNTER,
    "depth",
    "nodes",
    "Accepted nodes by their depth, from 1. Divided by rounds: how often a path "
    "reached this depth.",
)
ACCEPTED_BY_RANK = MetricSpec(
    PREFIX + "accepted_nodes_by_rank",
    COUNTER,
    "rank",
    "nodes",
    "Accepted nodes by their rank among the children of their parent; 0 is the draft's "
    "first choice, the only one that a chain has.",
    from_worker=True,
)
ROUNDS_BY_WIDTH = MetricSpec(
    PREFIX + "rounds_by_width",
    COUNTER,
    "width",
    "rounds",
    "Rounds by the rows that the target ran for the request, root included.",
)
VERIFY_WIDTH = MetricSpec(
    PREFIX + "verify_width",
    GAUGE,
    "",
    "rows",
    "The widest tree of the latest step, root included.",
)
STAGE_TIME = MetricSpec(
    PREFIX + "stage_time_seconds",
    SUMMARY,
    "stage",
    "seconds",
    "Time of a stage in a step that verifies. Only with VLLM_DFLASH_STAGE_TIMES=1.",
    from_worker=True,
)

METRICS: tuple[MetricSpec, ...] = (
    ROUNDS,
    PROPOSED_NODES,
    ACCEPTANCE_LENGTH,
    ACCEPTED_BY_DEPTH,
    ACCEPTED_BY_RANK,
    ROUNDS_BY_WIDTH,
    VERIFY_WIDTH,
    STAGE_TIME,
)


def render_markdown() -> str:
    """Return the table of docs/metrics.md."""
    lines = ["| name | type | label | unit | meaning |", "|---|---|---|---|---|"]
    for spec in METRICS:
        label = f"`{spec.label}`" if spec.label else ""
        lines.append(
            f"| `{spec.name}` | {spec.kind} | {label} | {spec.unit} | {spec.meaning} |"
        )
    return "\n".join(lines) + "\n"
