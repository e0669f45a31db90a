# SPDX-License-Identifier: Apache-2.0
"""Measured steps of large shapes, as `bench_shapes.py` writes them.

A shape that was measured at two depths is continued to its own number of layers: every
layer of a target adds the same time, and the rest of a step (draft, output matrix,
sampling) is the same at any depth.
"""

from typing import Any

from projection_model import SHAPES

# Name of `bench_shapes.py` -> name of the projection.
NAMES = {"qwen3-30b-a3b": "coder-30b-a3b", "llama-70b-rank": "llama-70b-tp2"}
# A tree of 15 nodes has the rows of a chain of 15, and verifies them as a tree.
ENGINES = {0: "none", 15: "chain", 16: "tree16", 47: "tree47"}
Steps = dict[int, dict[str, float]]


def measured_steps(rows: list[dict[str, Any]]) -> dict[str, tuple[Steps, str]]:
    """Return, by shape, batch -> engine -> milliseconds, and how that was measured.

    Raises:
        ValueError: A shape was measured at one depth that is not its own.
    """
    by_depth: dict[str, dict[int, Steps]] = {}
    for row in rows:
        name, at, layers = row["shape"].partition("@")
        shape = NAMES[name]
        depth = int(layers) if at else SHAPES[shape].layers
        steps = by_depth.setdefault(shape, {}).setdefault(depth, {})
        steps.setdefault(row["batch"], {})[ENGINES[row["nodes"]]] = row["ms"]
    found = {}
    for shape, depths in by_depth.items():
        full = SHAPES[shape].layers
        if full in depths:
            found[shape] = (depths[full], "measured")
            continue
        if len(depths) < 2:
            raise ValueError(f"{shape} was measured at one depth only: {list(depths)}")
        low, high = sorted(depths)[0], sorted(depths)[-1]
        found[shape] = (
            _continued(depths[low], depths[high], low, high, full),
            f"from {low} and {high} layers",
        )
    return found


def _continued(a: Steps, b: Steps, low: int, high: int, full: int) -> Steps:
    times = (full - high) / (high - low)
    return {
        batch: {
            engine: round(ms + times * (ms - a[batch][engine]), 3)
            for engine, ms in engines.items()
        }
        for batch, engines in b.items()
    }
