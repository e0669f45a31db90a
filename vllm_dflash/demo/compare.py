# SPDX-License-Identifier: Apache-2.0
"""Measure one server after another on the same prompts, and compare."""

import time
from dataclasses import dataclass

from vllm_dflash.demo.client import Client, Message
from vllm_dflash.demo.fetch import Log

_NUM_DRAFTS = "vllm:spec_decode_num_drafts_total"
_NUM_ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"

CHAT_QUESTION = "Give me three tips for learning to juggle."
WARM_UP_QUESTION = "Say hello."
QUESTIONS = (
    CHAT_QUESTION,
    "Write a Python function that returns the number of days in a given month.",
    "A baker sells 14 rolls in the morning and twice as many in the afternoon. "
    "How many rolls does the baker sell that day? Explain step by step.",
    "Summarize the following text in two sentences:\n\nThe old canal was dug to carry "
    "coal to the town, and for sixty years it did little else. When the railway came, "
    "the barges disappeared within a decade. Today the towpath is a favourite walk, "
    "herons nest in the former basin, and volunteers keep the two remaining locks in "
    "working order so that visitors can see how a boat was lifted.",
)


@dataclass(frozen=True)
class Measurement:
    """What one server did with the questions.

    Attributes:
        label: The name of the row.
        outputs: Token ids of each answer.
        duration_s: Wall time of all answers, one request at a time, prefill included.
        acceptance_length: Tokens per verify, the bonus token included; None without
            speculation.
    """

    label: str
    outputs: list[list[int]]
    duration_s: float
    acceptance_length: float | None

    @property
    def tokens_per_s(self) -> float:
        """Output tokens per second of wall time."""
        return sum(map(len, self.outputs)) / self.duration_s


def user_turn(question: str) -> list[Message]:
    """Return a chat of one user message."""
    return [{"role": "user", "content": question}]


def measure(label: str, client: Client, max_tokens: int, log: Log) -> Measurement:
    """Answer the questions one at a time, after one warm-up that is not counted."""
    client.complete(user_turn(WARM_UP_QUESTION), 16)
    before = client.counters()
    outputs = []
    duration_s = 0.0
    for index, question in enumerate(QUESTIONS, 1):
        started = time.perf_counter()
        completion = client.complete(user_turn(question), max_tokens)
        elapsed_s = time.perf_counter() - started
        duration_s += elapsed_s
        outputs.append(completion.token_ids)
        log(
            f"prompt {index}/{len(QUESTIONS)}: {len(completion.token_ids)} tokens "
            f"in {elapsed_s:.1f} s"
        )
    length = acceptance_length(before, client.counters())
    return Measurement(label, outputs, duration_s, length)


def acceptance_length(
    before: dict[str, float], after: dict[str, float]
) -> float | None:
    """Return tokens per verify between two looks at the counters; None if none ran."""
    num_drafts = after.get(_NUM_DRAFTS, 0.0) - before.get(_NUM_DRAFTS, 0.0)
    if num_drafts <= 0:
        return None
    accepted = after.get(_NUM_ACCEPTED, 0.0) - before.get(_NUM_ACCEPTED, 0.0)
    return 1 + accepted / num_drafts


def tokens_equal(measurement: Measurement, baseline: Measurement) -> str:
    """Return ``yes``, or ``no`` with how many answers are equal."""
    if measurement is baseline:
        return "-"
    pairs = list(zip(measurement.outputs, baseline.outputs, strict=True))
    num_equal = sum(output == expected for output, expected in pairs)
    if num_equal == len(pairs):
        return "yes"
    return f"no ({num_equal} of {len(pairs)} answers)"


def format_table(measurements: list[Measurement], baseline: Measurement) -> str:
    """Return a table in Markdown, one row a measurement, padded for a terminal."""
    header = ["", "tokens/s", "mean acceptance length", "tokens equal"]
    rows = [
        [
            row.label,
            f"{row.tokens_per_s:.1f}",
            "-" if row.acceptance_length is None else f"{row.acceptance_length:.2f}",
            tokens_equal(row, baseline),
        ]
        for row in measurements
    ]
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    rule = ["-" * width for width in widths]
    return "\n".join(
        "| " + " | ".join(map(str.ljust, cells, widths)) + " |"
        for cells in [header, rule, *rows]
    )
