# SPDX-License-Identifier: Apache-2.0
"""Medians over the repeats of a serving benchmark, and their table."""

from statistics import median
from typing import Any

from serving.servers import SERVERS

# Key of `vllm bench serve` -> heading, format.
METRICS = {
    "output_throughput": ("tokens/s", "{:.1f}"),
    "median_tpot_ms": ("TPOT ms", "{:.2f}"),
    "p99_tpot_ms": ("TPOT p99 ms", "{:.2f}"),
    "median_ttft_ms": ("TTFT ms", "{:.1f}"),
    "spec_decode_acceptance_length": ("tokens per step", "{:.2f}"),
}
Cell = tuple[float, int, str]


def medians(rows: list[dict[str, Any]]) -> dict[Cell, dict[str, Any]]:
    """Return the median of each metric over the repeats.

    Returns:
        (temperature, concurrency, server) -> metric -> median, in that order; None
        where the benchmark has no figure (acceptance without speculation). Also
        ``repeats``, and ``spread``, the largest over the smallest throughput.
    """
    groups: dict[Cell, list[dict[str, Any]]] = {}
    for row in rows:
        cell = (row["temperature"], row["concurrency"], row["server"])
        groups.setdefault(cell, []).append(row["result"])
    # Measured in random orders, shown in one.
    others = sorted({row["server"] for row in rows} - set(SERVERS))
    order = [*SERVERS, *others]
    found: dict[Cell, dict[str, Any]] = {}
    for cell in sorted(groups, key=lambda c: (c[0], c[1], order.index(c[2]))):
        results = groups[cell]
        found[cell] = {"repeats": len(results)}
        for metric in METRICS:
            values = [r[metric] for r in results if r.get(metric) is not None]
            found[cell][metric] = median(values) if values else None
        speeds = [result["output_throughput"] for result in results]
        found[cell]["spread"] = max(speeds) / min(speeds)
    return found


def ratio(
    cells: dict[Cell, dict[str, Any]], cell: Cell, server: str, metric: str
) -> float | None:
    """Return a median over that of another server under the same load."""
    other = cells.get((*cell[:2], server))
    if other is None or not other[metric] or cells[cell][metric] is None:
        return None
    return cells[cell][metric] / other[metric]


def table_rows(rows: list[dict[str, Any]]) -> list[list[str]]:
    """Return heading and lines of the table, as text."""
    cells = medians(rows)
    heading = ["T", "concurrency", "server"]
    heading += [title for title, _ in METRICS.values()]
    heading += ["tokens/s to none", "tokens/s to chain", "repeats", "spread"]
    lines = [heading]
    for cell, row in cells.items():
        temperature, concurrency, server = cell
        line = [f"{temperature:g}", str(concurrency), server]
        for metric, (_, form) in METRICS.items():
            line.append("-" if row[metric] is None else form.format(row[metric]))
        for other in ("none", "chain"):
            value = ratio(cells, cell, other, "output_throughput")
            line.append("-" if value is None else f"{value:.2f}")
        lines.append([*line, str(row["repeats"]), f"{row['spread']:.2f}"])
    return lines


def markdown(rows: list[dict[str, Any]]) -> str:
    """Return the table in Markdown."""
    heading, *lines = table_rows(rows)
    rule = ["---:", "---:", "---", *["---:"] * (len(heading) - 3)]
    return "\n".join(f"| {' | '.join(line)} |" for line in [heading, rule, *lines])
