# SPDX-License-Identifier: Apache-2.0
"""The page on sampling: the support table's options, each with tests that exist."""

import re
from pathlib import Path

from vllm_dflash import support
from vllm_dflash.support_table import FEATURES

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/sampling.md").read_text(encoding="utf-8")
DEFAULT_TESTS = ("test_sampling_options.py", "test_structured_output.py")


def rows() -> list[list[str]]:
    section = PAGE.partition("## Options")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]


def test_page_serves_the_options_as_the_table_does():
    table = support.render_markdown().partition("## Sampling")[2]
    served = dict(re.findall(r"^\| (.+?) \| (.+?) \|", table, re.MULTILINE)[1:])
    assert {name: status for name, status, _ in rows()} == served
    assert set(served) == {f.name for f in FEATURES if f.area == "Sampling"}


def test_every_option_has_a_test_that_exists():
    default = "\n".join(
        (ROOT / "tests/e2e" / name).read_text(encoding="utf-8")
        for name in DEFAULT_TESTS
    )
    for name, _, tests in rows():
        found = re.findall(r"`([^`]+)`", tests)
        assert found, name
        for test in found:
            if test.endswith(".py"):
                assert (ROOT / test).is_file(), test
            else:
                assert re.search(rf"^(def|class) {test}\b", default, re.MULTILINE), test
