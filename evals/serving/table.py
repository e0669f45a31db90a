# SPDX-License-Identifier: Apache-2.0
"""Medians over the repeats of a serving benchmark, and their tables.

Rows of a mixed load have the key ``load`` and no concurrency; they have a table of
their own.
"""

import math
from collections.abc import Callable
from statistics import fmean, median, stdev
from typing import Any

from serving.servers import is_fixed_tree, table_order

Row = dict[str, Any]
# Key of `vllm bench serve` -> heading, format.
METRICS = {
    "output_throughput": ("tokens/s", "{:.1f}"),
    "median_tpot_ms": ("TPOT ms", "{:.2f}"),
    "p99_tpot_ms": ("TPOT p99 ms", "{:.2f}"),
    "median_ttft_ms": ("TTFT ms", "{:.1f}"),
    "spec_decode_acceptance_length": ("tokens per step", "{:.2f}"),
}
MIXED_METRICS = {
    "mean_e2el_ms": ("E2E ms", "{:.1f}"),
    "p99_e2el_ms": ("E2E p99 ms", "{:.1f}"),
    "mean_tpot_ms": ("TPOT ms", "{:.2f}"),
    "output_throughput": ("tokens/s", "{:.1f}"),
    "peak_in_flight": ("most in flight", "{:.0f}"),
}
# Compared in the table of the mixed load -> which of several values is the best.
_MIXED_RATIOS: dict[str, Callable[..., Any]] = {
    "mean_e2el_ms": min,
    "output_throughput": max,
}
Cell = tuple[float, Any, str]


def medians(rows: list[Row]) -> dict[Cell, Row]:
    """Return the median of each metric over the repeats, without mixed loads.

    Returns:
        (temperature, concurrency, server) -> metric -> median, in that order; None
        where the benchmark has no figure (acceptance without speculation). Also
        ``repeats``, and ``spread``, the largest over the smallest throughput.
    """
    rows = [row for row in rows if "load" not in row]
    return _medians(rows, "concurrency", METRICS, "output_throughput")


def mixed_medians(rows: list[Row]) -> dict[Cell, Row]:
    """Return the same of the mixed loads, by (temperature, load, server).

    ``spread`` is that of the mean end-to-end latency.
    """
    rows = [row for row in rows if "load" in row]
    return _medians(rows, "load", MIXED_METRICS, "mean_e2el_ms")


def _medians(
    rows: list[Row], load: str, metrics: dict[str, Any], spread: str
) -> dict[Cell, Row]:
    groups: dict[Cell, list[Row]] = {}
    for row in rows:
        cell = (row["temperature"], row[load], row["server"])
        groups.setdefault(cell, []).append({**row, **row["result"]})
    found: dict[Cell, Row] = {}
    # Measured in random orders, shown in one.
    for cell in sorted(groups, key=lambda c: (c[0], c[1], table_order(c[2]))):
        results = groups[cell]
        found[cell] = {"repeats": len(results)}
        for metric in metrics:
            values = [r[metric] for r in results if r.get(metric) is not None]
            found[cell][metric] = median(values) if values else None
        values = [result[spread] for result in results]
        found[cell]["spread"] = max(values) / min(values)
    return found


def ratio(
    cells: dict[Cell, Row], cell: Cell, server: str | None, metric: str
) -> float | None:
    """Return a median over that of another server under the same load."""
    other = None if server is None else cells.get((*cell[:2], server))
    if other is None or not other[metric] or cells[cell][metric] is None:
        return None
    return cells[cell][metric] / other[metric]


def best_fixed(cells: dict[Cell, Row], cell: Cell, metric: str) -> str | None:
    """Return the fixed tree with the best mixed median under the load of a cell."""
    values = {
        other[2]: row[metric]
        for other, row in cells.items()
        if other[:2] == cell[:2] and is_fixed_tree(other[2]) and row[metric] is not None
    }
    if not values:
        return None
    return _MIXED_RATIOS[metric](values, key=values.__getitem__)


def table_rows(rows: list[Row]) -> list[list[str]]:
    """Return heading and lines of the table, as text, without mixed loads."""
    cells = medians(rows)
    heading = ["T", "concurrency", "server"]
    heading += [title for title, _ in METRICS.values()]
    heading += ["tokens/s to none", "tokens/s to chain", "repeats", "spread"]
    lines = [heading]
    for cell, row in cells.items():
        ratios = [
            ratio(cells, cell, other, "output_throughput")
            for other in ("none", "chain")
        ]
        lines.append(_line(cell, row, METRICS, ratios))
    return lines


def mixed_table_rows(rows: list[Row]) -> list[list[str]]:
    """Return heading and lines of the table of mixed loads; empty if there are none."""
    cells = mixed_medians(rows)
    if not cells:
        return []
    heading = ["T", "load", "server"]
    heading += [title for title, _ in MIXED_METRICS.values()]
    for metric in _MIXED_RATIOS:
        title = MIXED_METRICS[metric][0].removesuffix(" ms")
        heading += [f"{title} to {other}" for other in ("none", "chain", "best fixed")]
    lines = [[*heading, "repeats", "spread"]]
    for cell, row in cells.items():
        ratios = [
            ratio(cells, cell, other, metric)
            for metric in _MIXED_RATIOS
            for other in ("none", "chain", best_fixed(cells, cell, metric))
        ]
        lines.append(_line(cell, row, MIXED_METRICS, ratios))
    return lines


def paired_rows(rows: list[Row]) -> list[list[str]]:
    """Return heading and lines of automatic trees against the best other choice.

    Servers of a load and repeat are measured next to each other, so their ratio is
    taken before the mean: a machine that gets slower between repeats does no harm. The
    best other is the one with the lowest geometric mean of ratios; +- is the standard
    error of the mean of logarithms, so the ratio is not known better than that.
    """
    speeds: dict[tuple[float, int], dict[str, dict[int, float]]] = {}
    for row in rows:
        if "load" not in row:
            load = speeds.setdefault((row["temperature"], row["concurrency"]), {})
            server = load.setdefault(row["server"], {})
            server[row["repeat"]] = row["result"]["output_throughput"]
    lines = []
    for (temperature, concurrency), load in sorted(speeds.items()):
        own = load.pop("tree-auto", {})
        found = []
        for name, other in load.items():
            logs = [math.log(own[i] / other[i]) for i in own if other.get(i)]
            if len(logs) > 1:
                error = stdev(logs) / math.sqrt(len(logs))
                found.append((math.exp(fmean(logs)), name, error, len(logs)))
        if found:
            ratio, name, error, number = min(found)
            line = [f"{temperature:g}", str(concurrency), name, f"{ratio:.3f}"]
            lines.append([*line, f"{ratio * error:.3f}", str(number)])
    if not lines:
        return []
    heading = ["T", "concurrency", "best other", "tree-auto to it", "+-", "pairs"]
    return [heading, *lines]


def _line(
    cell: Cell, row: Row, metrics: dict[str, Any], ratios: list[float | None]
) -> list[str]:
    line = [f"{cell[0]:g}", str(cell[1]), cell[2]]
    for metric, (_, form) in metrics.items():
        line.append("-" if row[metric] is None else form.format(row[metric]))
    line += ["-" if value is None else f"{value:.2f}" for value in ratios]
    return [*line, str(row["repeats"]), f"{row['spread']:.2f}"]


def markdown(rows: list[Row]) -> str:
    """Return the tables in Markdown."""
    tables = [table_rows(rows), mixed_table_rows(rows), paired_rows(rows)]
    return "\n\n".join(_markdown(table) for table in tables if table)


def _markdown(table: list[list[str]]) -> str:
    heading, *lines = table
    rule = ["---:", "---:", "---", *["---:"] * (len(heading) - 3)]
    return "\n".join(f"| {' | '.join(line)} |" for line in [heading, rule, *lines])
