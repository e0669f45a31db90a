# SPDX-License-Identifier: Apache-2.0
"""Small functions with unit tests, for the local code task.

A template draws parameters and returns what to write, a solution, and tests whose
expected values the solution itself computes.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class FunctionTask:
    """One function to write.

    Attributes:
        signature: Name and parameters, as in ``add_3(x)``.
        purpose: What it does, completing "a function that ...".
        solution: Source of a right answer.
        tests: Calls as source, with the values they must have.
    """

    signature: str
    purpose: str
    solution: str
    tests: list[tuple[str, Any]]


Template = Callable[[random.Random], FunctionTask]


def _task(
    signature: str, purpose: str, body: str, arguments: list[tuple[Any, ...]]
) -> FunctionTask:
    solution = f"def {signature}:\n    {body}"
    namespace: dict[str, Any] = {}
    # Our own source, from this file.
    exec(solution, namespace)
    name = signature.partition("(")[0]
    tests = [
        (f"{name}({', '.join(map(repr, values))})", namespace[name](*values))
        for values in arguments
    ]
    return FunctionTask(signature, purpose, solution, tests)


def _numbers(rng: random.Random, size: int = 6) -> list[int]:
    return [rng.randint(0, 30) for _ in range(size)]


def _of_number(name: str, purpose: str, expression: str, low: int, high: int):
    """A function of one number; ``{k}`` is drawn from ``low`` to ``high``."""

    def template(rng: random.Random) -> FunctionTask:
        k = rng.randint(low, high)
        values = [(value,) for value in (rng.randint(1, 40), 0, 7, -3)]
        return _task(
            f"{name.format(k=k)}(x)",
            purpose.format(k=k),
            f"return {expression.format(k=k)}",
            values,
        )

    return template


def _of_list(name: str, purpose: str, expression: str, low: int, high: int):
    """A function of a list of numbers."""

    def template(rng: random.Random) -> FunctionTask:
        k = rng.randint(low, high)
        values = [(_numbers(rng),), (_numbers(rng, 9),), ([k],)]
        return _task(
            f"{name.format(k=k)}(numbers)",
            purpose.format(k=k),
            f"return {expression.format(k=k)}",
            values,
        )

    return template


_TEXTS = [
    "banana",
    "stone bridge",
    "a quiet river",
    "Level",
    "tea",
    "umbrella stand",
    "ox",
]


def _of_text(name: str, purpose: str, expression: str, choices: str):
    """A function of a string; ``{k}`` is one of ``choices``."""

    def template(rng: random.Random) -> FunctionTask:
        k = rng.choice(choices.split())
        values = [(text,) for text in [*rng.sample(_TEXTS, 3), ""]]
        return _task(
            f"{name.format(k=k)}(text)",
            purpose.format(k=k),
            f"return {expression.format(k=k)}",
            values,
        )

    return template


_LETTERS = "a e i o r s t n"
TEMPLATES: list[Template] = [
    _of_number("add_{k}", "returns x plus {k}.", "x + {k}", 2, 30),
    _of_number("subtract_{k}", "returns x minus {k}.", "x - {k}", 2, 30),
    _of_number("times_{k}", "returns x multiplied by {k}.", "x * {k}", 2, 15),
    _of_number(
        "square_plus_{k}", "returns the square of x, plus {k}.", "x * x + {k}", 1, 20
    ),
    _of_number(
        "is_multiple_of_{k}",
        "returns True if x is a multiple of {k}, else False.",
        "x % {k} == 0",
        2,
        9,
    ),
    _of_number(
        "at_most_{k}", "returns the smaller of x and {k}.", "min(x, {k})", 3, 25
    ),
    _of_number(
        "at_least_{k}", "returns the larger of x and {k}.", "max(x, {k})", 3, 25
    ),
    _of_number(
        "is_above_{k}",
        "returns True if x is greater than {k}, else False.",
        "x > {k}",
        1,
        20,
    ),
    _of_number("remainder_by_{k}", "returns x modulo {k}.", "x % {k}", 2, 12),
    _of_list(
        "keep_multiples_of_{k}",
        "returns a list of the numbers that are multiples of {k}, in order.",
        "[n for n in numbers if n % {k} == 0]",
        2,
        7,
    ),
    _of_list(
        "keep_above_{k}",
        "returns a list of the numbers greater than {k}, in order.",
        "[n for n in numbers if n > {k}]",
        2,
        20,
    ),
    _of_list(
        "add_{k}_to_each",
        "returns a list with {k} added to each number.",
        "[n + {k} for n in numbers]",
        1,
        20,
    ),
    _of_list(
        "scale_each_by_{k}",
        "returns a list with each number multiplied by {k}.",
        "[n * {k} for n in numbers]",
        2,
        12,
    ),
    _of_list(
        "count_equal_to_{k}",
        "returns how many of the numbers are equal to {k}.",
        "numbers.count({k})",
        0,
        12,
    ),
    _of_list(
        "sum_above_{k}",
        "returns the sum of the numbers greater than {k}.",
        "sum(n for n in numbers if n > {k})",
        2,
        20,
    ),
    _of_list(
        "first_{k}", "returns a list of the first {k} numbers.", "numbers[:{k}]", 1, 5
    ),
    _of_list(
        "last_{k}", "returns a list of the last {k} numbers.", "numbers[-{k}:]", 1, 5
    ),
    _of_list(
        "largest_{k}",
        "returns a list of the {k} largest numbers, the largest first.",
        "sorted(numbers, reverse=True)[:{k}]",
        1,
        4,
    ),
    _of_list(
        "total_plus_{k}",
        "returns the sum of the numbers, plus {k}.",
        "sum(numbers) + {k}",
        1,
        40,
    ),
    _of_list(
        "contains_{k}",
        "returns True if {k} is one of the numbers, else False.",
        "{k} in numbers",
        0,
        20,
    ),
    _of_text(
        "count_{k}",
        "returns how often the letter {k} is in the text.",
        "text.count({k!r})",
        _LETTERS,
    ),
    _of_text(
        "remove_{k}",
        "returns the text without the letter {k}.",
        "text.replace({k!r}, '')",
        _LETTERS,
    ),
    _of_text(
        "starts_with_{k}",
        "returns True if the text starts with the letter {k}, else False.",
        "text.startswith({k!r})",
        "a b s t u",
    ),
    _of_text(
        "shout_{k}_times",
        "returns the text in upper case, repeated {k} times.",
        "text.upper() * {k}",
        "2 3 4 5",
    ),
    _of_text(
        "first_{k}_letters",
        "returns the first {k} characters of the text.",
        "text[:{k}]",
        "1 2 3 4 5",
    ),
    _of_text(
        "longer_than_{k}",
        "returns True if the text has more than {k} characters, else False.",
        "len(text) > {k}",
        "1 2 3 4 5 6 7 8 9 10 11 12",
    ),
    _of_text(
        "reverse_and_add_{k}",
        "returns the text reversed, followed by the letter {k}.",
        "text[::-1] + {k!r}",
        _LETTERS,
    ),
    _of_text(
        "words_joined_by_{k}",
        "returns the words of the text joined by the letter {k}.",
        "{k!r}.join(text.split())",
        "x y z q",
    ),
]
