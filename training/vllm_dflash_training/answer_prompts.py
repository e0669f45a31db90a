# SPDX-License-Identifier: Apache-2.0
"""Prompts made of earlier answers: tasks on texts, tasks on code, second turns."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Collection
from dataclasses import asdict
from functools import cache
from typing import Any

import yaml

from vllm_dflash.errors import option_error
from vllm_dflash_training.answers import Answer, Tokens
from vllm_dflash_training.config import FromAnswers
from vllm_dflash_training.excerpts import (
    Code,
    find_code,
    find_keywords,
    find_quotes,
    has_many_numbers,
    list_length,
    pick_excerpt,
    with_a_bug,
)
from vllm_dflash_training.heldout import (
    HeldOut,
    Messages,
    conversation_hash,
    prompt_hash,
)
from vllm_dflash_training.prompts import ROOT, SYSTEM_SHARE, load_material

FOLLOW_UPS = ROOT / "training/prompts/followups.yaml"
# Draws in a row that gave nothing: the answers are used up.
_PATIENCE = 4000
# How users type: all small, without the last dot, at times with a typo.
_CASUAL_SHARE, _TYPO_SHARE = 0.15, 0.4
_ENDING_SHARE, _BUG_SHARE = 0.1, 0.7
_POLITE = {
    "{c}": 0.62,
    "please {c}": 0.12,
    "{c}, please": 0.03,
    "can you {c}?": 0.1,
    "could you {c}?": 0.05,
    "could you please {c}?": 0.03,
    "I need you to {c}": 0.02,
    "I'd like you to {c}": 0.02,
    "help me {c}": 0.01,
}
_NUMBER = re.compile(r"\d+")
_SHORT_WORDS, _LONG_WORDS = 25, 60


@cache
def load_follow_ups() -> dict[str, Any]:
    """Return what users ask."""
    return yaml.safe_load(FOLLOW_UPS.read_text(encoding="utf-8"))


def answer_prompts(
    options: FromAnswers,
    answers: list[Answer],
    rng: random.Random,
    tokens: Tokens,
    max_tokens: int,
    heldout: HeldOut,
) -> list[dict[str, Any]]:
    """Make different prompts of all kinds, the same ones for the same answers and rng.

    Args:
        max_tokens: Longer prompts are not made.
        heldout: Not made either.

    Raises:
        ValueError: The answers don't give so many.
    """
    shares = asdict(options.shares)
    makers: dict[str, Callable[[random.Random, Answer], Messages | None]] = {
        "text_task": _text_task,
        "code_task": _code_task,
        "second_turn": _second_turn,
    }
    sources = {
        "text_task": [a for a in answers if pick_excerpt(random.Random(0), a)],
        "code_task": [a for a in answers if find_code(a.text)],
        "second_turn": answers,
    }
    wanted = [kind for kind in shares if shares[kind] > 0]
    for kind in wanted:
        if not sources[kind]:
            raise option_error(
                f"prompts.from_answers has nothing for {kind} (got {len(answers)} "
                f"answers of {options.data_dir}, none of which fits)",
                "Kinds that there are answers for are allowed",
                f"prompts.from_answers.shares.{kind}: 0",
            )
    rows: list[dict[str, Any]] = []
    seen: set[str] = set()
    turn = dict.fromkeys(wanted, 0)
    failures = 0
    while len(rows) < options.count:
        if not failures:
            # Drawn anew only after a success, so that the shares are kept.
            (kind,) = rng.choices(wanted, [shares[k] for k in wanted])
        answer = sources[kind][turn[kind] % len(sources[kind])]
        turn[kind] += 1
        messages = makers[kind](rng, answer)
        if (
            messages is None
            or (key := conversation_hash(messages)) in seen
            or any(prompt_hash([m]) in heldout.hashes for m in messages)
            or len(tokens.prompt(messages)) > max_tokens
        ):
            failures += 1
            if failures > _PATIENCE:
                raise option_error(
                    f"prompts.from_answers.count is more than the answers give (got "
                    f"{options.count}, it stopped at {len(rows)} with {kind})",
                    f"Up to {len(rows)} are allowed",
                    "prompts.from_answers with fewer, or with other shares",
                )
            continue
        failures = 0
        seen.add(key)
        row = {"kind": kind, "messages": messages, "hash": prompt_hash(messages)}
        rows.append(row)
    return rows


class _Draw(dict[str, str]):
    """Slots of a line; what isn't given is drawn, and `KeyError` says that none is."""

    def __init__(self, rng: random.Random, **given: str | None):
        super().__init__({k: v for k, v in given.items() if v})
        self.rng = rng

    def __missing__(self, name: str) -> str:
        return self.rng.choice(load_follow_ups()["slots"][name])

    def line(self, lines: list[str]) -> str:
        """Fill one of the lines whose slots are all there."""
        while True:
            try:
                return self.rng.choice(lines).format_map(self)
            except KeyError:
                continue


def _text_task(rng: random.Random, answer: Answer) -> Messages | None:
    text = pick_excerpt(rng, answer)
    if text is None:
        return None
    words = load_follow_ups()
    is_before = rng.random() < 0.55
    draw = _Draw(
        rng,
        x=rng.choice(words["below" if is_before else "above"]),
        k=_one_of(rng, find_keywords(text, words["common"])),
    )
    task = words["text"]
    is_question = rng.random() < 0.25
    line = draw.line(task["questions" if is_question else "commands"])
    said = _say(rng, line, is_question, _Draw(rng).line(task["endings"]))
    frame = rng.choice(task["before" if is_before else "after"])
    return _with_system(rng, _put(frame, said, text))


def _code_task(rng: random.Random, answer: Answer) -> Messages | None:
    blocks = find_code(answer.text)
    if not blocks:
        return None
    code = rng.choice(blocks)
    task = load_follow_ups()["code"]
    is_before = rng.random() < 0.6
    draw = _Draw(rng, l=code.language, **_names(rng, code))
    draw["x"] = draw.line(task["below" if is_before else "above"])
    is_question = rng.random() < 0.3
    if rng.random() < 0.2:
        lines = task["bug_questions" if is_question else "bugs"]
        if rng.random() < _BUG_SHARE:
            code = with_a_bug(rng, code)
    elif is_question:
        lines = task["questions"]
    else:
        lines = task["commands"] + task["python"] * (code.language == "Python")
    line = draw.line(lines)
    said = _say(rng, line, is_question, _Draw(rng).line(task["endings"]))
    frame = draw.line(_keeping(task["before" if is_before else "after"]))
    return _with_system(rng, _put(frame, said, _as_pasted(rng, code)))


def _second_turn(rng: random.Random, answer: Answer) -> Messages | None:
    asked, text = answer.messages[-1]["content"].casefold(), answer.text
    words = load_follow_ups()
    turn, length = words["turn"], len(text.split())
    blocks = find_code(text)
    questions = turn["questions"]
    if blocks:
        commands, questions = turn["code"], turn["code_questions"]
    elif has_many_numbers(text) and len(_NUMBER.findall(asked)) > 1:
        commands, questions = turn["numbers"], turn["number_questions"]
    elif any(word in asked for word in ("story", "poem", "haiku", "tale")):
        commands = turn["story"] * 3 + turn["commands"]
    elif any(word in asked for word in ("email", "letter", "note to")):
        commands = turn["letter"] * 3 + turn["commands"]
    else:
        commands = turn["commands"]
        if length >= _LONG_WORDS:
            commands = commands + turn["long"] * 2
        elif length < _SHORT_WORDS:
            commands = commands + turn["short"] * 3
    items = list_length(text)
    draw = _Draw(
        rng,
        k=_one_of(rng, find_keywords(text, words["common"])),
        q=_one_of(rng, find_quotes(text)),
        i=str(rng.randint(1, items)) if items else None,
        **(_names(rng, blocks[0]) if blocks else {}),
    )
    is_question = rng.random() < 0.4
    line = draw.line(questions if is_question else commands)
    said = _say(rng, line, is_question, _Draw(rng).line(turn["endings"]), stop=True)
    if rng.random() < 0.12:
        first = said if said.startswith(("I ", "I'")) else said[0].lower() + said[1:]
        opening = rng.choice(turn["openings"])
        said = f"{opening if said[0].islower() else opening.capitalize()}, {first}"
    return [
        *answer.messages,
        {"role": "assistant", "content": text},
        {"role": "user", "content": said},
    ]


def _say(
    rng: random.Random, line: str, is_question: bool, ending: str, stop: bool = False
) -> str:
    """Put a line as a user might.

    Args:
        stop: Whether it ends the message, so that it needs a dot.
    """
    if is_question:
        said = line + "?"
    else:
        (frame,) = rng.choices(list(_POLITE), list(_POLITE.values()))
        said = frame.format(c=line)
    is_casual = rng.random() < _CASUAL_SHARE
    if not is_casual:
        said = said[0].upper() + said[1:]
    if not is_question and rng.random() < _ENDING_SHARE:
        said = f"{said if said.endswith('?') else said + '.'} {ending}"
    if not is_casual:
        wants_dot = stop and said[-1] not in "?.!" and rng.random() < 0.7
        return said + "." if wants_dot else said
    said = said.lower().rstrip("?" if rng.random() < 0.6 else ".")
    return _with_typo(rng, said) if rng.random() < _TYPO_SHARE else said


def _with_typo(rng: random.Random, said: str) -> str:
    words = said.split(" ")
    long = [i for i, word in enumerate(words) if len(word) > 4 and word.isalpha()]
    if long:
        index = rng.choice(long)
        word, at = words[index], rng.randint(1, len(words[index]) - 2)
        swapped = word[:at] + word[at + 1] + word[at] + word[at + 2 :]
        words[index] = rng.choice(
            [swapped, word[:at] + word[at + 1 :], word[:at] + word[at] + word[at:]]
        )
    return " ".join(words)


def _put(frame: str, said: str, text: str) -> str:
    """Fill a frame; what the instruction ends with already isn't said twice."""
    if said[-1] in "?.!":
        frame = frame.replace("{c}.", "{c}").replace("{c}:", "{c}")
    # The text last: it may hold anything.
    return frame.replace("{c}", said).replace("{t}", text)


def _keeping(frames: list[str]) -> list[str]:
    """Frames of which only other slots than {c} and {t} are filled by `format`."""
    return [f.replace("{c}", "{{c}}").replace("{t}", "{{t}}") for f in frames]


def _as_pasted(rng: random.Random, code: Code) -> str:
    kind = rng.random()
    if kind < 0.7:
        return f"```{code.tag}\n{code.text}\n```"
    return f"```\n{code.text}\n```" if kind < 0.8 else code.text


def _names(rng: random.Random, code: Code) -> dict[str, str | None]:
    """Return slots: a function of the code, and another language than its own."""
    others = [o for o in load_follow_ups()["slots"]["to"] if o != code.language]
    return {"f": _one_of(rng, code.functions), "to": rng.choice(others)}


def _with_system(rng: random.Random, content: str) -> Messages:
    messages = [{"role": "user", "content": content}]
    if rng.random() < SYSTEM_SHARE:
        system = rng.choice(load_material()["systems"])
        messages.insert(0, {"role": "system", "content": system})
    return messages


def _one_of(rng: random.Random, values: Collection[str]) -> str | None:
    return rng.choice(list(values)) if values else None
