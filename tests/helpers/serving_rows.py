# SPDX-License-Identifier: Apache-2.0
"""Modules, options and made-up rows for tests of the serving benchmark."""

from types import SimpleNamespace
from typing import Any

from evals_modules import import_evals

from vllm_dflash.demo.pair import ModelPair


def load_evals() -> SimpleNamespace:
    """Import the benchmark's modules."""
    return import_evals(
        bench_serving="bench_serving",
        report="report",
        load="serving.load",
        mixed="serving.mixed",
        plots="serving.plots",
        servers="serving.servers",
        table="serving.table",
    )


def options(evals: Any, **values: Any) -> Any:
    """Options of all servers; `values` are those that matter."""
    defaults = {
        "pair": ModelPair("/target", "/draft", "name", is_embedded=False),
        "is_cpu": False,
        "depth": 15,
        "budget": None,
        "max_model_len": 2048,
        "max_num_seqs": 64,
        "kv_cache_gib": 2.0,
    }
    return evals.servers.ServingOptions(**{**defaults, **values})


def row(
    server: str,
    speed: float,
    temperature: float = 0.0,
    concurrency: int = 1,
    length: float | None = None,
    repeat: int = 0,
) -> dict[str, Any]:
    """A measured row of a closed loop."""
    result = {
        "output_throughput": speed,
        "median_tpot_ms": 1000 / speed,
        "p99_tpot_ms": 2000 / speed,
        "median_ttft_ms": 3.0,
    }
    if length is not None:
        result["spec_decode_acceptance_length"] = length
    return {
        "server": server,
        "temperature": temperature,
        "concurrency": concurrency,
        "repeat": repeat,
        "result": result,
    }


def mixed_row(
    server: str, latency: float, speed: float, temperature: float = 0.0
) -> dict[str, Any]:
    """A measured row of a mixed load."""
    result = {
        "mean_e2el_ms": latency,
        "p99_e2el_ms": 3 * latency,
        "mean_tpot_ms": latency / 100,
        "output_throughput": speed,
    }
    return {
        "server": server,
        "temperature": temperature,
        "concurrency": None,
        "load": "ramp 2:128",
        "peak_in_flight": 40,
        "result": result,
    }


def some_mixed_rows() -> list[dict[str, Any]]:
    """Rows of mixed loads: several servers, repeats of one, two temperatures."""
    return [
        mixed_row("tree-auto", 180.0, 105.0),
        mixed_row("tree-16", 200.0, 100.0),
        mixed_row("none", 600.0, 90.0),
        mixed_row("tree-fixed", 240.0, 110.0),
        mixed_row("tree-16", 260.0, 104.0),
        mixed_row("tree-16", 220.0, 98.0),
        mixed_row("tree-auto", 300.0, 80.0, temperature=1.0),
    ]
