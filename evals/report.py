# SPDX-License-Identifier: Apache-2.0
"""One self-contained HTML page about several runs.

    python evals/report.py evals/results/*.json --output report.html

Takes what ``bench_serving.py``, ``compare_sglang.py``, ``run_lm_eval.py``,
``run_acceptance.py`` and ``vllm-dflash calibrate`` write, in any mixture. Runs with
served models share their plots, so two commits or two machines can be compared. The
page loads nothing: plots are inside it.
"""

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import sglang_table
from accuracy.compare import means
from serving.table import mixed_table_rows, table_rows

from vllm_dflash.errors import option_error

MAX_DIFFERENCES = 20
_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 75rem;
       padding: 0 1rem; color: #222; background: #fff; }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums; }
th, td { border-bottom: 1px solid #ddd; padding: .25rem .7rem; text-align: right; }
th { border-bottom: 2px solid #888; } td.text, th.text { text-align: left; }
svg { max-width: 100%; height: auto; } pre { white-space: pre-wrap; margin: 0; }
.failed { color: #a00; } .note { color: #666; }
"""


@dataclass(frozen=True)
class Run:
    """One result file."""

    name: str
    kind: str
    data: dict[str, Any]


def load_run(path: Path, name: str) -> Run:
    """Read a result file.

    Raises:
        ValueError: it is not one of the known kinds.
    """
    data = json.loads(path.read_text(encoding="utf-8"))
    kind = _kind(data) if isinstance(data, dict) else None
    if kind not in _SECTIONS:
        raise option_error(
            f"{path} is no result that this page can show",
            "Allowed are files of bench_serving.py, compare_sglang.py, run_lm_eval.py, "
            "run_acceptance.py and vllm-dflash calibrate",
            "their paths",
        )
    return Run(name, kind, data)


def _kind(data: dict[str, Any]) -> str | None:
    if "agreement" in data:
        return "comparison"
    if "step_ms" in data:
        return "calibration"
    return data.get("kind") or ("acceptance" if "summary" in data else None)


def run_names(paths: list[Path]) -> list[str]:
    """Return a name for each file, with its folder where two would be the same."""
    names = [path.name.removesuffix(".json").removesuffix(".local") for path in paths]
    return [
        name if names.count(name) == 1 else f"{path.resolve().parent.name}/{name}"
        for name, path in zip(names, paths, strict=True)
    ]


def render(runs: list[Run]) -> str:
    """Return the page."""
    parts = ["<h1>vllm-dflash: evaluation</h1>", "<h2>Runs</h2>", _provenance(runs)]
    measured = [run for run in runs if run.kind in ("serving", "comparison")]
    serving = {run.name: run.data["rows"] for run in measured}
    if serving:
        parts += ["<h2>Speed</h2>", *_plots(serving)]
    for kind, section in _SECTIONS.items():
        for run in runs:
            if run.kind == kind:
                parts.append(section(run))
    body = "\n".join(parts)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>vllm-dflash: evaluation</title><style>{_STYLE}</style></head>\n"
        f"<body>\n{body}\n</body></html>\n"
    )


def _plots(serving: dict[str, list[dict[str, Any]]]) -> list[str]:
    from serving import plots

    figures = plots.figures(serving).values()
    return [f"<figure>{plots.svg(figure)}</figure>" for figure in figures]


def _provenance(runs: list[Run]) -> str:
    rows = [["run", "kind", "date", "device", "commit", "versions", "command"]]
    for run in runs:
        known = run.data.get("provenance") or _calibrated(run.data["setup"])
        versions = ", ".join(f"{k} {v}" for k, v in known["versions"].items() if v)
        rows.append(
            [
                run.name,
                run.kind,
                known["date"],
                known["device"],
                known["git"][:12] + ("-dirty" if "dirty" in known["git"] else ""),
                versions,
                " ".join(map(str, known["argv"])),
            ]
        )
    return _table(rows, num_text=len(rows[0]))


def _calibrated(setup: dict[str, Any]) -> dict[str, Any]:
    """Provenance of a calibration, which names versions but no commit."""
    versions = {
        name.removesuffix("_version"): value
        for name, value in setup.items()
        if name.endswith("_version")
    }
    return {
        "date": "-",
        "device": setup["device"],
        "git": "-",
        "versions": versions,
        "argv": ["vllm-dflash", "calibrate"],
    }


def _settings(run: Run) -> str:
    settings = ", ".join(f"{k} {v}" for k, v in run.data["settings"].items())
    return f'<p class="note">Medians over the repeats. {escape(settings)}</p>'


def _serving_section(run: Run) -> str:
    parts = [
        f"<h3>Serving: {escape(run.name)}</h3>",
        _settings(run),
        _table(table_rows(run.data["rows"]), num_text=3),
    ]
    mixed = mixed_table_rows(run.data["rows"])
    if mixed:
        parts += ["<h4>Mixed load</h4>", _table(mixed, num_text=3)]
    return "".join(parts)


def _comparison_section(run: Run) -> str:
    versions = ", ".join(f"{k} {v}" for k, v in run.data["sglang_versions"].items())
    return (
        f"<h3>Beside SGLang: {escape(run.name)}</h3>{_settings(run)}"
        f'<p class="note">SGLang\'s environment: {escape(versions)}</p>'
        + _table(sglang_table.speed_rows(run.data["rows"]), num_text=3)
        + _table(sglang_table.agreement_rows(run.data["agreement"]), num_text=2)
    )


def _calibration_section(run: Run) -> str:
    data = run.data
    speeds = {
        (batch, nodes): 1e3 * batch * data["tokens_by_nodes"][str(nodes)] / ms
        for batch, nodes, ms in data["step_ms"]
    }
    batches = sorted({batch for batch, _ in speeds})
    rows = [["nodes", "tokens per step", *(f"batch {batch}" for batch in batches)]]
    for nodes, length in data["tokens_by_nodes"].items():
        cells = [speeds.get((batch, int(nodes))) for batch in batches]
        line = ["-" if cell is None else f"{cell:.0f}" for cell in cells]
        rows.append([nodes, f"{length:.2f}", *line])
    return (
        f"<h3>Calibration: {escape(run.name)}</h3>"
        '<p class="note">Tokens a second inside one engine. Nodes by batch size: '
        f"{data['budget_per_batch_size']}</p>" + _table(rows, num_text=1)
    )


def _accuracy_section(run: Run) -> str:
    comparison = run.data["comparison"]
    rows = [
        ["engine", "task", "metric", "mean", "items", "responses that differ"]
        + ["scores that differ", "tokens per step"]
    ]
    details = []
    compared = comparison["engines"]
    for engine, result in (run.data.get("means") or means(run.data["results"])).items():
        length = result["tokens_per_step"]
        for task, values in result["scores"].items():
            # The baseline was asked the same items as the others.
            others = [tasks[task] for tasks in compared.values() if task in tasks]
            number = str(others[0]["num_items"]) if others else "-"
            found = compared.get(engine, {}).get(task)
            counts = ["-", "-"]
            if found is not None:
                responses, scores = (
                    found["different_responses"],
                    found["different_scores"],
                )
                counts = [str(len(responses)), str(len(scores))]
                # The small form of a result names the items only.
                whole = [row for row in responses if isinstance(row, dict)]
                details += [(engine, task, row) for row in whole]
            for metric, value in values.items():
                rows.append(
                    [engine, task, metric, f"{value:.4f}", number, *counts]
                    + ["-" if length is None else f"{length:.2f}"]
                )
    failures = comparison["failures"]
    verdict = f'<p class="failed">{len(failures)} conditions do not hold.</p>'
    if not failures:
        verdict = "<p>All conditions of the configuration hold.</p>"
    return (
        f"<h3>Accuracy: {escape(run.name)}</h3>{verdict}"
        + "".join(
            f'<p class="failed">{escape(line)}</p>'
            for line in failures[:MAX_DIFFERENCES]
        )
        + _table(rows, num_text=3)
        + _differences(details)
    )


def _differences(details: list[tuple[str, str, dict[str, Any]]]) -> str:
    if not details:
        return ""
    rows = [["engine", "task", "item", "from character", "without speculation", "here"]]
    rows += [
        [
            engine,
            task,
            str(row["id"]),
            str(row["position"]),
            row["baseline"],
            row["response"],
        ]
        for engine, task, row in details[:MAX_DIFFERENCES]
    ]
    summary = f"Responses that differ ({len(details)})"
    return (
        f"<details><summary>{summary}</summary>{_table(rows, len(rows[0]))}</details>"
    )


def _acceptance_section(run: Run) -> str:
    summary = run.data["summary"]
    kinds = list(next(iter(summary.values()))["acceptance_length"])
    rows = [["engine", *kinds, "equal answers"]]
    for name, row in summary.items():
        lengths = [row["acceptance_length"][kind] for kind in kinds]
        cells = ["-" if value is None else f"{value:.2f}" for value in lengths]
        rows.append([name, *cells, f"{row['num_equal']} of {row['num_prompts']}"])
    return f"<h3>Tokens per step: {escape(run.name)}</h3>" + _table(rows, num_text=1)


_SECTIONS: dict[str | None, Callable[[Run], str]] = {
    "serving": _serving_section,
    "comparison": _comparison_section,
    "calibration": _calibration_section,
    "lm_eval": _accuracy_section,
    "acceptance": _acceptance_section,
}


def _table(rows: list[list[str]], num_text: int) -> str:
    """A table with a heading; the first ``num_text`` columns are aligned left."""
    lines = []
    for number, row in enumerate(rows):
        cells = []
        for column, cell in enumerate(row):
            text = escape(cell)
            if "\n" in cell:
                text = f"<pre>{text}</pre>"
            attribute = ' class="text"' if column < num_text else ""
            tag = "td" if number else "th"
            cells.append(f"<{tag}{attribute}>{text}</{tag}>")
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return f"<table>{''.join(lines)}</table>"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path, nargs="+", help="result files")
    parser.add_argument("--output", type=Path, default=Path("report.html"))
    args = parser.parse_args()
    try:
        page = render(list(map(load_run, args.runs, run_names(args.runs))))
    except (OSError, ValueError) as error:
        print(f"report: {error}", file=sys.stderr)
        return 2
    args.output.write_text(page, encoding="utf-8")
    print(args.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
