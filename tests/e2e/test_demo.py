# SPDX-License-Identifier: Apache-2.0
"""The demo as a newcomer runs it, with real servers and the real pair."""

import os
import re
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

# What the test session sets for engines in its own process.
SESSION_VARIABLES = (
    "OMP_NUM_THREADS",
    "VLLM_CPU_OMP_THREADS_BIND",
    "VLLM_ENABLE_V1_MULTIPROCESSING",
    "VLLM_LOGGING_LEVEL",
)


def test_demo_shows_equal_tokens_and_a_tree_that_accepts_more_than_the_chain():
    env = {k: v for k, v in os.environ.items() if k not in SESSION_VARIABLES}
    command = [sys.executable, "-m", "vllm_dflash.cli.main", "demo"]
    result = subprocess.run(
        [*command, "--max-tokens", "48"],
        env=env,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    rows = {
        cells[0].split(",")[0].split(" of ")[0]: cells[1:]
        for line in result.stdout.splitlines()
        if len(cells := [cell.strip() for cell in line.split("|")[1:-1]]) == 4
    }
    assert rows["DFlash chain"][2] == rows["DFlash tree"][2] == "yes"
    assert float(rows["DFlash tree"][1]) > float(rows["DFlash chain"][1])
    assert re.search(r"> .*juggle\.\n +\S+", result.stdout)
