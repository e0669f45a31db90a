# SPDX-License-Identifier: Apache-2.0
"""Parts of answers that prompts are made of: sentences, keywords, code."""

import random

import pytest
import training_runs  # noqa: F401, puts training/ on the path

from vllm_dflash_training.answers import repeated, split_sentences, whole_part
from vllm_dflash_training.excerpts import Code, find_code, find_keywords, with_a_bug


@pytest.mark.parametrize(
    ("text", "whole"),
    [
        ("One. Two! Thr", "One. Two!"),
        ("One is e.g. small. Dr. B", "One is e.g. small."),
        ("First:\n\n1. Do it.\n2. Do th", "First:\n\n1. Do it."),
        ("Go:\n```py\nx\n```\nThen", "Go:\n```py\nx\n```"),
        ("It is so. Go:\n```py\nx = 1.\ny", "It is so."),
        ("no end at all", ""),
    ],
)
def test_unfinished_answers_end_with_a_sentence(text, whole):
    assert whole_part(text) == whole


def test_sentences_loops_and_keywords():
    assert split_sentences('A is 1.5. "B?" Yes, Mr. C. Doe.') == [
        "A is 1.5.",
        '"B?"',
        "Yes, Mr. C. Doe.",
    ]
    assert repeated("a b c d e f g h") == 0 and repeated("a b c d e " * 9) > 0.8
    text = "**Good soil**: Lavender likes soil. Lavender, which grows, grows which."
    assert find_keywords(text, {"which"}) == ["Good soil", "Lavender", "grows"]


def test_code_and_bugs():
    text = "A\n```python\nif a < b:\n    go()\n```\n```\nx\n```\n```brainf\n+\n+\n```"
    (code,) = find_code(text)
    assert code == Code("if a < b:\n    go()", "python", "Python")
    assert with_a_bug(random.Random(0), code).text == "if a <= b:\n    go()"
