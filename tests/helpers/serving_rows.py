# SPDX-License-Identifier: Apache-2.0
"""Modules, options and made-up rows for tests of the serving benchmark."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from vllm_dflash.demo.pair import ModelPair

EVALS = Path(__file__).resolve().parents[2] / "evals"


def load_evals() -> SimpleNamespace:
    """Import the benchmark's modules, which are scripts beside each other."""
    sys.path.insert(0, str(EVALS))
    try:
        import bench_serving
        import report
        from serving import load, mixed, plots, servers, table
    finally:
        sys.path.remove(str(EVALS))
    return SimpleNamespace(
        bench_serving=bench_serving,
        report=report,
        load=load,
        mixed=mixed,
        plots=plots,
        servers=servers,
        table=table,
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
