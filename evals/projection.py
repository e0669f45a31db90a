# SPDX-License-Identifier: Apache-2.0
"""Projected speed at sizes that were not served: measured steps x published acceptance.

    python evals/projection.py

NOT A MEASUREMENT. Tokens per second are batch x tokens per step / step time. Step times
were measured with dummy weights: those of the 8B with `bench_round.py`, those of larger
shapes with `bench_shapes.py` (projection_steps.py). Tokens per step are what others
published for these drafts. All are in results/projection, with their sources.
docs/performance.md, "Projection", says what is assumed.

Every ratio has two ends. The high one takes the step times as they are. The low one
adds to each drafting step what such a step cost more when the small pair was served
than when it was profiled. The model is checked on that pair, and against SGLang's
published speeds, and prints by how much it is off; so are estimates of steps from bytes
and operations (projection_model.py), which need the steps of one shape only.
"""

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from projection_model import SHAPES, Constants, fit, step_ms
from projection_steps import Steps, measured_steps

INPUTS = Path(__file__).resolve().parent / "results" / "projection"
CALIBRATED = "qwen3-8b"
PAIR = "smollm2-135m"
CONTEXT = 1000
BATCHES = (1, 8, 32)
LABEL = "projection, not measured"
DATA_SETS = ("HumanEval", "MT-Bench")
# Shape -> whose published acceptance it is given. There is no public draft for 70B.
ACCEPTANCE_OF = {
    "qwen3-8b": "qwen3-8b",
    "coder-30b-a3b": "coder-30b-a3b",
    "llama-70b-tp2": "qwen3-8b",
}
Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Inputs:
    """Measured costs and published acceptance."""

    costs: dict[str, Any]
    acceptance: dict[str, Any]
    # Shape -> steps, and how they were measured; from `bench_shapes.py`.
    shapes: dict[str, tuple[Steps, str]]

    def measured(self, shape: str) -> Steps:
        """Return batch -> engine -> milliseconds of a measured step."""
        if shape in self.shapes:
            return self.shapes[shape][0]
        return {int(b): steps for b, steps in self.costs["step_ms"][shape].items()}

    def how(self, shape: str) -> str:
        """Return how the steps of a shape were measured."""
        return self.shapes[shape][1] if shape in self.shapes else "measured"

    def width(self, engine: str) -> int:
        """Return the target's rows of a request in a step of an engine."""
        return self.costs["rows"][engine]


def load(folder: Path = INPUTS) -> Inputs:
    """Read the files."""
    names = ("step_costs.json", "published_acceptance.json", "shape_steps.json")
    costs, acceptance, shapes = (
        json.loads((folder / name).read_text("utf-8")) for name in names
    )
    return Inputs(costs, acceptance, measured_steps(shapes["rows"]))


def served_overhead_ms(inputs: Inputs) -> dict[str, float]:
    """Return, by engine, what a step of the pair cost more when it was served."""
    steps = inputs.measured(PAIR)[1]
    served = inputs.costs["served"][PAIR]["1"]
    return {
        engine: 1e3 * row["tokens_per_step"] / row["tokens_per_s"] - steps[engine]
        for engine, row in served.items()
    }


def calibrate(inputs: Inputs, batches: tuple[int, ...] = BATCHES) -> Constants:
    """Fit the estimates to the measured steps of some batches of the 8B shape."""
    points = [
        (batch, inputs.width(engine), engine != "none", ms)
        for batch, steps in inputs.measured(CALIBRATED).items()
        for engine, ms in steps.items()
        if batch in batches
    ]
    return fit(SHAPES[CALIBRATED], points, CONTEXT)


def project(
    steps: dict[int, dict[str, float]],
    tokens_per_step: dict[str, float],
    overhead_ms: float,
) -> Rows:
    """Return a row for each batch and engine.

    Args:
        tokens_per_step: By engine; an engine without a figure gets no row.
        overhead_ms: Of a drafting step, for the low end.
    """
    rows = []
    for batch, costs in steps.items():
        ends: dict[str, list[float]] = {}
        for engine, ms in costs.items():
            tokens = 1.0 if engine == "none" else tokens_per_step.get(engine)
            if tokens is None:
                continue
            slow = ms + (overhead_ms if engine != "none" else 0.0)
            ends[engine] = [1e3 * batch * tokens / t for t in (slow, ms)]
        for engine, speeds in ends.items():
            row = {
                "batch": batch,
                "engine": engine,
                "step_ms": costs[engine],
                "tokens_per_step": tokens_per_step.get(engine, 1.0),
                "tokens_per_s": speeds,
            }
            for other in ("none", "chain"):
                ratios = zip(speeds, ends[other], strict=True)
                row[f"to_{other}"] = sorted(own / base for own, base in ratios)
            rows.append(row)
    return rows


def project_all(inputs: Inputs) -> Rows:
    """Return the rows of all shapes and data sets."""
    overhead_ms = max(served_overhead_ms(inputs).values())
    rows = []
    for shape, source in ACCEPTANCE_OF.items():
        steps, kind = inputs.measured(shape), inputs.how(shape)
        for data_set, published in inputs.acceptance["tokens_per_step"][source].items():
            lengths = {k: v for k, v in published.items() if k != "source"}
            for row in project(steps, lengths, overhead_ms):
                rows.append({"shape": shape, "data": data_set, "steps": kind, **row})
    return rows


def check_pair(inputs: Inputs) -> Rows:
    """Return ratios of the small pair: predicted from its steps, measured, error."""
    served = inputs.costs["served"][PAIR]["1"]
    lengths = {engine: row["tokens_per_step"] for engine, row in served.items()}
    predicted = {
        row["engine"]: row["tokens_per_s"][1]
        for row in project(inputs.measured(PAIR), lengths, 0.0)
    }
    checks = []
    for engine, other in (("tree47", "chain"), ("chain", "none"), ("tree47", "none")):
        guess = predicted[engine] / predicted[other]
        real = served[engine]["tokens_per_s"] / served[other]["tokens_per_s"]
        checks.append(_check(f"{PAIR}: {engine} to {other}", guess, real))
    return checks


def check_published(inputs: Inputs) -> Rows:
    """Return the chain's speed-up at both ends against SGLang's on another GPU."""
    overhead_ms = max(served_overhead_ms(inputs).values())
    checks = []
    for shape, data_sets in inputs.acceptance["served_sglang_b200"].items():
        steps = inputs.measured(shape)
        for data_set, published in data_sets.items():
            lengths = {"chain": published["tokens_per_step"]}
            for row in project(steps, lengths, overhead_ms):
                batch = str(row["batch"])
                if row["engine"] == "chain":
                    real = published["chain"][batch] / published["none"][batch]
                    name = f"{shape}, {data_set}, {batch} at once: chain to none"
                    for end, guess in zip(("low", "high"), row["to_none"], strict=True):
                        checks.append(_check(f"{name}, {end}", guess, real))
    return checks


def check_fit(inputs: Inputs) -> Rows:
    """Return the estimate of every measured step, and of batch 32 from the others."""
    checks = []
    for name, batches in (("fitted", BATCHES), ("batches 1 and 8 fitted", (1, 8))):
        constants = calibrate(inputs, batches)
        for batch, steps in inputs.measured(CALIBRATED).items():
            if name == "fitted" or batch not in batches:
                for engine, ms in steps.items():
                    guess = step_ms(
                        constants,
                        SHAPES[CALIBRATED],
                        batch,
                        inputs.width(engine),
                        engine != "none",
                        CONTEXT,
                    )
                    checks.append(
                        _check(f"ms, batch {batch}, {engine}; {name}", guess, ms)
                    )
    return checks


def check_shapes(inputs: Inputs) -> Rows:
    """Return the estimate of every step of the larger shapes, which were measured."""
    constants = calibrate(inputs)
    return [
        _check(
            f"ms, {shape}, batch {batch}, {engine}",
            step_ms(
                constants,
                SHAPES[shape],
                batch,
                inputs.width(engine),
                engine != "none",
                CONTEXT,
            ),
            ms,
        )
        for shape in inputs.shapes
        for batch, steps in inputs.measured(shape).items()
        for engine, ms in steps.items()
    ]


def _check(name: str, predicted: float, measured: float) -> dict[str, Any]:
    error = predicted / measured - 1
    return {"name": name, "predicted": predicted, "real": measured, "error": error}


def markdown(rows: Rows) -> str:
    """Return the projection as a table."""
    heading = ["shape", "steps", "acceptance of", "batch", "engine", "ms per step"]
    heading += ["tokens per step", "tokens/s", "to chain", "to none"]
    lines = [heading, ["---"] * 3 + ["---:"] + ["---"] + ["---:"] * 5]
    for row in rows:
        lines.append(
            [row["shape"], row["steps"], row["data"], str(row["batch"]), row["engine"]]
            + [f"{row['step_ms']:.2f}", f"{row['tokens_per_step']:.2f}"]
            + [_range(row["tokens_per_s"], ".0f")]
            + [_range(row[f"to_{other}"], ".2f") for other in ("chain", "none")]
        )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _range(ends: list[float], form: str) -> str:
    low, high = (format(end, form) for end in ends)
    return low if low == high else f"{low}-{high}"


def checks_markdown(checks: Rows) -> str:
    """Return checks as a table."""
    lines = ["| | predicted | real | error |", "|---|---:|---:|---:|"]
    for item in checks:
        lines.append(
            f"| {item['name']} | {item['predicted']:.2f} | {item['real']:.2f} | "
            f"{item['error']:+.0%} |"
        )
    return "\n".join(lines)


def save_plots(rows: Rows, stem: Path) -> list[Path]:
    """Write the ratio to no speculation as PNG and SVG; needs matplotlib."""
    from matplotlib.figure import Figure

    panels = list(dict.fromkeys((row["shape"], row["data"]) for row in rows))
    figure = Figure(figsize=(3.6 * len(panels), 4), layout="constrained")
    figure.suptitle(f"Tokens/s to no speculation: {LABEL}")
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axis, (shape, data_set) in zip(axes, panels, strict=True):
        own = [r for r in rows if (r["shape"], r["data"]) == (shape, data_set)]
        for color, engine in enumerate(("none", "chain", "tree16", "tree47")):
            points = [row for row in own if row["engine"] == engine]
            batches = [row["batch"] for row in points]
            low, high = ([row["to_none"][i] for row in points] for i in (0, 1))
            axis.plot(batches, high, color=f"C{color}", marker="o", label=engine)
            axis.fill_between(batches, low, high, color=f"C{color}", alpha=0.2)
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter("{x:g}")
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
        axis.set_xlabel("concurrent requests")
        axis.set_title(f"{shape}, {data_set}\nsteps: {own[0]['steps']}", fontsize=9)
    axes[0].legend(fontsize="small")
    paths = [stem.with_suffix(suffix) for suffix in (".png", ".svg")]
    for path in paths:
        figure.savefig(path, dpi=120)
    return paths


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--inputs", type=Path, default=INPUTS)
    parser.add_argument(
        "--data",
        type=lambda text: text.split(","),
        default=list(DATA_SETS),
        help="data sets whose published acceptance is used; also GSM8K, MATH-500",
    )
    parser.add_argument("--output", type=Path, help="write the rows as JSON")
    parser.add_argument("--plots", type=Path, help="write PATH.png and PATH.svg")
    args = parser.parse_args()
    inputs = load(args.inputs)
    rows = [row for row in project_all(inputs) if row["data"] in args.data]
    if not rows:
        parser.error(f"--data {','.join(args.data)}: nothing is published for these")
    print(f"# {LABEL.capitalize()}\n")
    print(markdown(rows))
    print("\n## Check: the small pair, predicted from its step times\n")
    print(checks_markdown(check_pair(inputs)))
    overhead = served_overhead_ms(inputs)
    told = ", ".join(f"{name} {ms:.2f}" for name, ms in overhead.items())
    print(f"\nms of a served step beyond its profiled step: {told}")
    print("\n## Check: SGLang on a B200, as published (another engine and GPU)\n")
    print(checks_markdown(check_published(inputs)))
    print("\n## Check: estimated steps of the 8B shape\n")
    print(checks_markdown(check_fit(inputs)))
    print("\n## Check: estimates of the larger shapes from the 8B, and their steps\n")
    print(checks_markdown(check_shapes(inputs)))
    if args.output:
        text = json.dumps({"label": LABEL, "rows": rows}, indent=1) + "\n"
        args.output.write_text(text, encoding="utf-8")
    if args.plots:
        for path in save_plots(rows, args.plots):
            print(f"\nPlot: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
