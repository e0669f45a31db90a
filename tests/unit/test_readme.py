# SPDX-License-Identifier: Apache-2.0
"""What the README tells people to type exists and is accepted."""

import json
import re
import shlex
from pathlib import Path

import pytest

from vllm_dflash import config, envs
from vllm_dflash.cli import main

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = [
    shlex.split(line, comments=True)
    for block in re.findall(r"```bash\n(.*?)```", TEXT, re.DOTALL)
    for line in block.replace("\\\n", " ").splitlines()
    if line.strip()
]
SPECULATIVE_CONFIGS = [
    json.loads(command[command.index("--speculative-config") + 1])
    for command in COMMANDS
    if "--speculative-config" in command
]


def _first_column(header: str) -> set[str]:
    table = TEXT.split(f"| {header} |", 1)[1].split("\n\n", 1)[0]
    return set(re.findall(r"^\| `(\w+)", table, re.MULTILINE))


def test_there_is_one_command_to_see_it_and_one_to_test_it():
    assert ["bash", "scripts/demo.sh"] in COMMANDS
    assert ["bash", "scripts/test.sh"] in COMMANDS


def test_every_script_and_file_named_exists():
    named = {
        word
        for command in COMMANDS
        for word in command
        if "/" in word and not word.startswith((".venv", "-", "{"))
    }
    models = {word for command in COMMANDS if command[0] == "vllm" for word in command}
    links = set(re.findall(r"\]\((?!https?:)([^)#]+)", TEXT))
    paths = set(re.findall(r"`((?:\w+/)+[\w./]+)`", TEXT))
    missing = [
        name for name in (named - models) | links | paths if not (ROOT / name).exists()
    ]
    assert not missing


@pytest.mark.parametrize("words", SPECULATIVE_CONFIGS, ids=json.dumps)
def test_serve_command_is_accepted(words):
    options = config.parse_ddtree_option(
        words.get(config.OPTION_KEY),
        num_speculative_tokens=words.get("num_speculative_tokens"),
        block_size=16,
        is_cpu=False,
    )
    assert options.depth == 15


def test_option_table_is_complete():
    assert _first_column("key | default | meaning") == set(config.OPTION_NAMES)


def test_defaults_and_limits_are_those_of_the_code():
    assert (
        f"| {config.DEFAULT_BUDGET}; on the CPU {config.DEFAULT_BUDGET_CPU} |" in TEXT
    )
    assert f"from the draft depth to {config.MAX_BUDGET}" in TEXT
    assert f"| {config.DEFAULT_MAX_CHILDREN} |" in TEXT
    assert f"1 to {config.MAX_MAX_CHILDREN}" in TEXT


def test_variable_table_is_complete():
    named = _first_column("environment variable | meaning")
    assert named == set(envs.environment_variables)


def test_demo_and_check_are_commands():
    assert "vllm-dflash check" in TEXT
    for argv in (["demo", "--serve"], ["check"]):
        assert callable(main._parse(argv).run)
