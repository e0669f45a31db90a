# SPDX-License-Identifier: Apache-2.0
"""Plots of a serving benchmark; needs matplotlib (extra ``bench``)."""

import io
from pathlib import Path
from typing import Any

from serving.table import medians

PLOTS = {
    "output_throughput": "output tokens per second",
    "median_tpot_ms": "median time per output token, ms",
    "spec_decode_acceptance_length": "accepted tokens per step",
}
RELATIVE = "output tokens per second, to no speculation"
_MARKERS = "osD^vPX*"


def figures(runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Return one figure for each of ``PLOTS`` and for the speed-up.

    Mixed loads are left out: they have no concurrency to plot against.

    Args:
        runs: Rows by the name of their run; names show only if there are several.
    """
    # An own figure instead of pyplot: no display, no state between figures.
    from matplotlib.figure import Figure

    by_run = {name: medians(rows) for name, rows in runs.items()}
    temperatures = sorted({cell[0] for cells in by_run.values() for cell in cells})
    made: dict[str, Any] = {}
    if not temperatures:
        return made
    for metric in (*PLOTS, "speedup"):
        title = PLOTS.get(metric, RELATIVE)
        figure = Figure(figsize=(5.5 * len(temperatures), 4), layout="constrained")
        axes = figure.subplots(1, len(temperatures), squeeze=False)[0]
        # A server has one colour on both sides of a figure.
        labels: list[str] = []
        for axis, temperature in zip(axes, temperatures, strict=True):
            lines = _lines(by_run, temperature, metric)
            labels += [label for label in lines if label not in labels]
            for label, points in lines.items():
                index = labels.index(label)
                axis.plot(
                    *zip(*points, strict=True),
                    color=f"C{index}",
                    marker=_MARKERS[index % len(_MARKERS)],
                    label=label,
                )
            axis.set_xscale("log", base=2)
            axis.xaxis.set_major_formatter("{x:g}")
            axis.set_xlabel("concurrent requests")
            axis.set_title(f"temperature {temperature:g}")
            axis.grid(alpha=0.3)
            axis.set_ylim(bottom=0)
            if lines:
                axis.legend(fontsize="small")
        axes[0].set_ylabel(title)
        if labels:
            made[metric] = figure
    return made


def save(runs: dict[str, list[dict[str, Any]]], stem: Path) -> list[Path]:
    """Write each figure as PNG and SVG beside each other."""
    paths = []
    for metric, figure in figures(runs).items():
        for suffix in ("png", "svg"):
            path = stem.with_name(f"{stem.name}_{metric}.{suffix}")
            # Without the time of drawing, equal figures are equal files.
            metadata = {"Date": None} if suffix == "svg" else None
            figure.savefig(path, dpi=120, metadata=metadata)
            paths.append(path)
    return paths


def svg(figure: Any) -> str:
    """Return a figure as an ``<svg>`` element for a page."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg")
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def _lines(
    by_run: dict[str, Any], temperature: float, metric: str
) -> dict[str, list[tuple[int, float]]]:
    lines: dict[str, list[tuple[int, float]]] = {}
    for name, cells in by_run.items():
        for (t, concurrency, server), row in cells.items():
            if t != temperature:
                continue
            value = row.get(metric)
            if metric == "speedup":
                # vLLM's is the baseline beside other engines too.
                bases = [(t, concurrency, name) for name in ("none", "vllm-none")]
                none = next((cells[base] for base in bases if base in cells), None)
                value = none and row["output_throughput"] / none["output_throughput"]
            if value is not None:
                label = server if len(by_run) == 1 else f"{name}: {server}"
                lines.setdefault(label, []).append((concurrency, value))
    return lines
