# SPDX-License-Identifier: Apache-2.0
"""The tables of the comparison with SGLang, as text and as cells."""

from typing import Any

from serving.table import medians, ratio

_METRICS = {
    "output_throughput": ("tokens/s", "{:.1f}"),
    "median_tpot_ms": ("TPOT ms", "{:.2f}"),
    "median_ttft_ms": ("TTFT ms", "{:.1f}"),
    "spec_decode_acceptance_length": ("tokens per step", "{:.2f}"),
}
BASELINES = ("vllm-none", "vllm-chain", "sglang-none", "sglang-dflash")


def speed(rows: list[dict[str, Any]]) -> str:
    """Return the table of `speed_rows` in Markdown."""
    return _markdown(speed_rows(rows), num_text=3)


def agreement(comparisons: list[dict[str, Any]]) -> str:
    """Return the table of `agreement_rows` in Markdown."""
    return _markdown(agreement_rows(comparisons), num_text=2)


def speed_rows(rows: list[dict[str, Any]]) -> list[list[str]]:
    """Return heading and lines: medians over the repeats, ratios to the baselines."""
    cells = medians(rows)
    present = {server for _, _, server in cells}
    baselines = [name for name in BASELINES if name in present]
    heading = ["T", "concurrency", "server", *(title for title, _ in _METRICS.values())]
    heading += [f"tokens/s to {name}" for name in baselines]
    heading += ["repeats", "spread"]
    lines = [heading]
    for cell, row in cells.items():
        line = [f"{cell[0]:g}", str(cell[1]), cell[2]]
        for metric, (_, form) in _METRICS.items():
            line.append("-" if row[metric] is None else form.format(row[metric]))
        for name in baselines:
            value = ratio(cells, cell, name, "output_throughput")
            line.append("-" if value is None else f"{value:.2f}")
        lines.append([*line, str(row["repeats"]), f"{row['spread']:.2f}"])
    return lines


def agreement_rows(comparisons: list[dict[str, Any]]) -> list[list[str]]:
    """Return heading and lines: how many greedy answers are equal."""
    heading = ["server", "compared with", "answers", "equal", "share"]
    heading += ["earliest difference", "median difference"]
    lines = [
        [
            item["server"],
            item["reference"],
            str(item["answers"]),
            str(item["equal"]),
            f"{item['rate']:.2f}",
            *(
                "-" if item[key] is None else f"{item[key]:g}"
                for key in ("earliest_difference", "median_difference")
            ),
        ]
        for item in comparisons
    ]
    return [heading, *lines]


def _markdown(table: list[list[str]], num_text: int) -> str:
    heading, *lines = table
    rule = ["---"] * num_text + ["---:"] * (len(heading) - num_text)
    return "\n".join(f"| {' | '.join(line)} |" for line in [heading, rule, *lines])
