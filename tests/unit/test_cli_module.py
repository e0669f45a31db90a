# SPDX-License-Identifier: Apache-2.0
"""The command as a module, and what its options share."""

import argparse
import subprocess
import sys

import pytest

from vllm_dflash.cli.arguments import json_object


def test_errors_of_a_subcommand_are_printed_without_a_traceback(tmp_path):
    missing = str(tmp_path / "missing.jsonl")
    command = [sys.executable, "-m", "vllm_dflash.cli.main", "show-tree", missing]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert run.returncode == 2
    assert run.stderr.startswith("vllm-dflash show-tree: ")
    assert missing in run.stderr and "Traceback" not in run.stderr


@pytest.mark.parametrize("text", ["x", "[1]", "1", '"a"', "", "{"])
def test_an_option_that_is_no_json_object_is_named(text):
    parse = json_object("Options of a thing by name", """--thing '{"a": 1}'""")
    assert parse('{"a": {"b": [1]}}') == {"a": {"b": [1]}}
    with pytest.raises(argparse.ArgumentTypeError) as error:
        parse(text)
    assert str(error.value).startswith(f"{text!r} is no JSON object")
    assert "Options of a thing by name are allowed" in str(error.value)
    assert """Type --thing '{"a": 1}'""" in str(error.value)
