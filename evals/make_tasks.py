# SPDX-License-Identifier: Apache-2.0
"""Write the items of the local accuracy tasks: ``tasks/*.jsonl``.

    python evals/make_tasks.py            write them
    python evals/make_tasks.py --check    compare with what is there; exit code 1 if not

Everything is drawn from seeded generators, so the files never change by themselves.
Each file holds few-shot examples (``"split": "examples"``) and test items.
"""

import argparse
import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from code_templates import TEMPLATES

TASKS = Path(__file__).resolve().parent / "tasks"
NUM_EXAMPLES = 4
NUM_ITEMS = {
    "arithmetic": 300,
    "copying": 300,
    "json_extraction": 300,
    "python_functions": 200,
}
# A seed for each task, so that one can change without the others.
SEEDS = {
    "arithmetic": 11,
    "copying": 12,
    "json_extraction": 13,
    "python_functions": 14,
}


def _list(text: str) -> list[str]:
    return text.split()


_THINGS = _list(
    "apples bolts bricks candles chairs coins cups eggs envelopes hinges jars keys "
    "lamps maps nails pencils plates ropes shells stamps tickets tiles towels wheels"
)
_PLACES = _list("box shed drawer basket crate cupboard barrel cabinet warehouse cellar")
_CITIES = _list(
    "Aarhus Bergen Bristol Cork Dresden Ghent Graz Kiel Leeds Lyon Malmo Nantes Oulu "
    "Porto Split Tartu Turin Utrecht Vaasa Zadar"
)
_MATERIALS = _list(
    "brass cedar clay copper cotton glass linen oak paper steel wool zinc"
)
_WORDS = _list(
    "amber anchor bakes bell between black bridge bright carries cloud cold copper "
    "crosses dark deep distant door drifts early empty evening falls field fine "
    "garden gate glass gravel grey harbour heavy hill holds house keeps ladder lake "
    "lantern leaves light little long market meadow mill morning narrow near north "
    "old opens orchard over paper path quiet rain red rises river road roof round "
    "salt sand shade short silver slow small snow south stands station stone street "
    "sun table tall thin tower turns under valley wall warm water west white wide "
    "wind window winter wood"
)


def arithmetic(rng: random.Random) -> dict[str, Any]:
    """A short sum or word problem; the answer shows the steps."""
    kind = rng.choice(["sum", "difference", "product", "story", "story"])
    if kind == "sum":
        a, b, c = (rng.randint(2, 60) for _ in range(3))
        question = f"What is {a} + {b} + {c}?"
        steps = f"{a} + {b} = {a + b}. {a + b} + {c} = {a + b + c}."
        answer = a + b + c
    elif kind == "difference":
        a, b = sorted((rng.randint(5, 99), rng.randint(5, 99)), reverse=True)
        question = f"What is {a} - {b}?"
        steps, answer = f"{a} - {b} = {a - b}.", a - b
    elif kind == "product":
        a, b = rng.randint(2, 9), rng.randint(3, 20)
        question = f"What is {a} times {b}?"
        steps, answer = f"{a} * {b} = {a * b}.", a * b
    else:
        thing, place = rng.choice(_THINGS), rng.choice(_PLACES)
        a, b = rng.randint(10, 60), rng.randint(2, 9)
        more = rng.randint(2, 30)
        question = (
            f"A {place} holds {a} {thing}. {b} of them are taken out, then {more} "
            f"new ones are put in. How many {thing} does the {place} hold now?"
        )
        answer = a - b + more
        steps = f"{a} - {b} = {a - b}. {a - b} + {more} = {answer}."
    return {
        "prompt": f"{question} Show the steps, then say: The answer is N.",
        "target": f"{steps} The answer is {answer}.",
        "answer": str(answer),
    }


def copying(rng: random.Random) -> dict[str, Any]:
    """Text to repeat: words, numbered lines, or an inventory with figures."""
    kind = rng.choice(["words", "list", "table"])
    if kind == "words":
        lines = [" ".join(rng.sample(_WORDS, rng.randint(8, 24))) + "."]
        lines[0] = lines[0].capitalize()
    elif kind == "list":
        lines = [
            f"{i}. {' '.join(rng.sample(_WORDS, rng.randint(2, 4)))}"
            for i in range(1, rng.randint(3, 6) + 1)
        ]
    else:
        things = rng.sample(_THINGS, rng.randint(3, 5))
        lines = [f"{thing}: {rng.randint(1, 999)}" for thing in things]
    text = "\n".join(lines)
    prompt = f"Repeat the following text exactly, and nothing else.\n\n{text}"
    return {"prompt": prompt, "target": text, "answer": text}


def json_extraction(rng: random.Random) -> dict[str, Any]:
    """A sentence about a delivery, and the object that it describes."""
    record = {
        "order": rng.randint(1000, 9999),
        "quantity": rng.randint(2, 80),
        "material": rng.choice(_MATERIALS),
        "item": rng.choice(_THINGS),
        "city": rng.choice(_CITIES),
        "urgent": rng.random() < 0.5,
    }
    urgent = "urgent" if record["urgent"] else "not urgent"
    sentence = rng.choice(
        [
            "Order {order}: {quantity} {material} {item} go to {city}; it is {urgent}.",
            "Send {quantity} {material} {item} to {city}. The order number is {order} "
            "and it is {urgent}.",
            "In {city} they wait for {quantity} {material} {item} (order {order}, "
            "{urgent}).",
        ]
    ).format(**{**record, "urgent": urgent})
    keys = ", ".join(record)
    prompt = (
        f"Write one JSON object with the keys {keys} for this text. Numbers are "
        f"integers, urgent is true or false.\n\n{sentence}"
    )
    answer = json.dumps(record)
    return {"prompt": prompt, "target": answer, "answer": answer}


def python_functions(rng: random.Random) -> dict[str, Any]:
    """A small function to write; unit tests decide."""
    task = rng.choice(TEMPLATES)(rng)
    prompt = (
        f"Write a Python function `{task.signature}` that {task.purpose} "
        f"For example, `{task.tests[0][0]}` is `{task.tests[0][1]!r}`. "
        "Answer with the code only."
    )
    return {
        "prompt": prompt,
        "target": f"```python\n{task.solution}\n```",
        "entry_point": task.signature.partition("(")[0],
        "tests": "\n".join(f"assert {call} == {value!r}" for call, value in task.tests),
    }


MAKERS: dict[str, Callable[[random.Random], dict[str, Any]]] = {
    "arithmetic": arithmetic,
    "copying": copying,
    "json_extraction": json_extraction,
    "python_functions": python_functions,
}


def make(name: str) -> str:
    """Return the JSON lines of one task."""
    rng = random.Random(SEEDS[name])
    seen: set[str] = set()
    lines = []
    while len(lines) < NUM_EXAMPLES + NUM_ITEMS[name]:
        item = MAKERS[name](rng)
        if item["prompt"] in seen:
            continue
        seen.add(item["prompt"])
        is_example = len(lines) < NUM_EXAMPLES
        number = len(lines) if is_example else len(lines) - NUM_EXAMPLES
        split = "examples" if is_example else "test"
        head = {"id": f"{name}-{split}-{number:03}", "split": split}
        lines.append(json.dumps({**head, **item}))
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    stale = []
    for name in MAKERS:
        path, text = TASKS / f"{name}.jsonl", make(name)
        if args.check:
            if not path.exists() or path.read_text(encoding="utf-8") != text:
                stale.append(path.name)
        else:
            path.write_text(text, encoding="utf-8")
            print(f"{path}: {text.count(chr(10))} lines")
    if stale:
        print(f"not as generated: {', '.join(stale)}. Type: python {sys.argv[0]}")
    return int(bool(stale))


if __name__ == "__main__":
    sys.exit(main())
