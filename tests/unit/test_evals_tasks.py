# SPDX-License-Identifier: Apache-2.0
"""The local accuracy tasks: their items, their scores, and how code is run."""

import json
import sys
from pathlib import Path

import pytest
import yaml

EVALS = Path(__file__).resolve().parents[2] / "evals"
NAMES = ("arithmetic", "copying", "json_extraction", "python_functions")


@pytest.fixture(scope="module")
def modules():
    folders = [str(EVALS), str(EVALS / "tasks")]
    sys.path[:0] = folders
    try:
        import code_runner
        import local_tasks
        import make_tasks
    finally:
        for folder in folders:
            sys.path.remove(folder)
    return {
        "code_runner": code_runner,
        "local_tasks": local_tasks,
        "make_tasks": make_tasks,
    }


@pytest.fixture
def make_tasks(modules):
    return modules["make_tasks"]


@pytest.fixture
def scoring(modules):
    return modules["local_tasks"]


@pytest.fixture
def runner(modules):
    return modules["code_runner"]


def items(name: str) -> list[dict[str, str]]:
    path = EVALS / "tasks" / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_every_task_has_items_and_a_definition(make_tasks):
    assert set(NAMES) == set(make_tasks.MAKERS)
    assert {path.stem for path in (EVALS / "tasks").glob("*.yaml")} == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_items_are_what_the_script_makes(make_tasks, name):
    made = make_tasks.make(name)
    assert made == (EVALS / "tasks" / f"{name}.jsonl").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", NAMES)
def test_items_are_distinct_and_a_few_hundred(name):
    tests = [item for item in items(name) if item["split"] == "test"]
    assert 200 <= len(tests) <= 400
    assert len({item["id"] for item in items(name)}) == len(items(name))
    assert len({item["prompt"] for item in items(name)}) == len(items(name))


@pytest.mark.parametrize(
    ("name", "score"),
    [
        ("arithmetic", "score_arithmetic"),
        ("copying", "score_copying"),
        ("json_extraction", "score_json"),
    ],
)
def test_the_target_of_every_item_gets_full_marks(scoring, name, score):
    for item in items(name):
        scores = getattr(scoring, score)(item, [item["target"]])
        assert set(scores.values()) == {1.0}, item["id"]


def test_every_kind_of_function_passes_its_tests(runner):
    by_purpose = {
        "".join(c for c in item["entry_point"] if not c.isdigit()): item
        for item in items("python_functions")
    }
    assert len(by_purpose) > 20
    for item in by_purpose.values():
        assert runner.score_code(item, [item["target"]]) == {"accuracy": 1.0}


@pytest.mark.parametrize(
    ("response", "accuracy"),
    [
        ("4 + 5 = 9. The answer is 9.", 1.0),
        ("The answer is: 9, not 8.", 1.0),
        ("9", 1.0),
        ("The answer is 8. I mean 9", 0.0),
        ("19", 0.0),
        ("nine", 0.0),
        ("", 0.0),
    ],
)
def test_arithmetic_takes_the_stated_number(scoring, response, accuracy):
    scores = scoring.score_arithmetic({"answer": "9"}, [response])
    assert scores == {"accuracy": accuracy}


@pytest.mark.parametrize(
    ("response", "accuracy", "fields"),
    [
        ('Sure:\n```json\n{"n": 1, "ok": true}\n```', 1.0, 1.0),
        ('{"n": 1, "ok": 1}', 0.0, 0.5),
        ('{"n": 1.0, "ok": true}', 0.0, 0.5),
        ('{"n": 1, "ok": true, "more": 2}', 0.0, 1.0),
        ('{"n": 1, "ok"', 0.0, 0.0),
        ("[1]", 0.0, 0.0),
    ],
)
def test_json_counts_fields_of_the_right_type(scoring, response, accuracy, fields):
    scores = scoring.score_json({"answer": '{"n": 1, "ok": true}'}, [response])
    assert scores == {"accuracy": accuracy, "fields": fields}


def test_copy_must_be_exact(scoring):
    scores = scoring.score_copying({"answer": "a b c"}, ["a b d"])
    assert scores["accuracy"] == 0
    assert 0 < scores["similarity"] < 1


@pytest.mark.parametrize(
    "program",
    [
        "assert 1 == 2",
        "def f(:",
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        "while True: pass",
        "data = bytearray(2 << 30)",
        "import os; os.fork()",
        "open('/etc/hostname', 'a')",
        "print('x' * 100); raise SystemExit",
    ],
)
def test_programs_that_do_not_pass(runner, program):
    if "open" in program and Path("/etc/hostname").owner() != "root":
        pytest.skip("the file is not root's")
    assert not runner.passes(program, timeout_s=2.0)


def test_programs_that_pass_may_print_and_use_the_standard_library(runner):
    assert runner.passes("import math\nprint('hello')\nassert math.gcd(4, 6) == 2")


def test_program_sees_no_environment(runner, monkeypatch):
    monkeypatch.setenv("A_SECRET", "1")
    assert runner.passes("import os\nassert 'A_SECRET' not in os.environ")


def test_code_is_taken_from_the_first_fence(runner):
    text = "Here:\n```python\nx = 1\n```\nor\n```\nx = 2\n```"
    assert runner.extract_code(text) == "x = 1\n"
    assert runner.extract_code("```py\nx = 3") == "x = 3"
    assert runner.extract_code("x = 4") == "x = 4"


def test_task_that_runs_code_asks_for_consent():
    text = (EVALS / "tasks" / "python_functions.yaml").read_text(encoding="utf-8")
    assert yaml.safe_load(text.replace("!function ", ""))["unsafe_code"] is True
