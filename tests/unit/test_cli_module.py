# SPDX-License-Identifier: Apache-2.0
"""The command as a module: one class of errors, whoever imports it."""

import subprocess
import sys


def test_errors_of_a_subcommand_are_printed_without_a_traceback(tmp_path):
    missing = str(tmp_path / "missing.jsonl")
    command = [sys.executable, "-m", "vllm_dflash.cli.main", "show-tree", missing]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert run.returncode == 2
    assert run.stderr.startswith("vllm-dflash show-tree: ")
    assert missing in run.stderr and "Traceback" not in run.stderr
