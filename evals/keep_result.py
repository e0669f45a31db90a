# SPDX-License-Identifier: Apache-2.0
"""Make the small form of a result, as `evals/results` keeps it.

    python evals/keep_result.py acceptance.json evals/results/acceptance_h200.json

Answers and figures for single requests are left out, and of accuracy the scores of
single items, whose means stay, and the folders of files; provenance, settings, commands
and everything that a table or plot is made of stay as they are.
"""

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from accuracy.compare import means

# Where `run_acceptance.py` and `compare_sglang.py` have them.
ANSWERS = {"results", "answers"}
# Where files of a machine are; routes of a server begin otherwise.
_FOLDERS = re.compile(r"/(?:home|mnt|opt|root|tmp|usr|var|work)/(?:[^/\s'\"]+/)*")
# Of the result of `vllm bench serve`: what tables use, and what tells a bad run.
SERVING = {
    "completed",
    "failed",
    "duration",
    "total_input_tokens",
    "total_output_tokens",
    "request_throughput",
    "output_throughput",
    "mean_ttft_ms",
    "median_ttft_ms",
    "mean_tpot_ms",
    "median_tpot_ms",
    "p99_tpot_ms",
    "mean_e2el_ms",
    "p99_e2el_ms",
    "p99_itl_ms",
    "peak_in_flight",
    "spec_decode_acceptance_length",
}


def keep(report: dict[str, Any]) -> dict[str, Any]:
    """Return the report in its small form."""
    kept = {key: value for key, value in report.items() if key not in ANSWERS}
    if report.get("kind") == "serving":
        kept["rows"] = [
            row | {"result": {k: v for k, v in row["result"].items() if k in SERVING}}
            for row in report["rows"]
        ]
    if report.get("kind") == "lm_eval" and "results" in report:
        kept["means"] = means(report["results"])
        kept["comparison"] = _items_by_name(report["comparison"])
    return kept


def _items_by_name(comparison: dict[str, Any]) -> dict[str, Any]:
    """Leave the names of the items that differ, without their texts."""
    engines = {
        engine: {
            task: {
                key: [row["id"] for row in value] if isinstance(value, list) else value
                for key, value in found.items()
            }
            for task, found in tasks.items()
        }
        for engine, tasks in comparison["engines"].items()
    }
    return {**comparison, "engines": engines}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path)
    parser.add_argument("destination", type=Path)
    args = parser.parse_args()
    report = json.loads(args.source.read_text(encoding="utf-8"))
    text = _FOLDERS.sub("", json.dumps(keep(report), indent=1)) + "\n"
    args.destination.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
