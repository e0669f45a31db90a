# SPDX-License-Identifier: Apache-2.0
"""The mixed load: one measurement whose load rises from one request at a time to full.

``vllm bench serve`` sends requests at a rate that grows exponentially (its ramp), at
random times that its seed decides, so all servers get the same requests at the same
moments. Each doubling of the rate has equally many requests; a linear ramp would send
half of them above half of the highest rate. What is left after the last request ends
the way it came, from full to one. The client's other means do not fit: with bursts
chance decides which loads occur, and a timed trace asks random tokens, which no draft
can foresee.

The client sets no limit of concurrency here: it would hold requests back and start
their clocks when it lets them go, so waiting would not count. The server's
``--max-num-seqs``, which is the largest concurrency, is the limit.
"""

import argparse
import math
import re
from dataclasses import dataclass
from typing import Any

from vllm_dflash.errors import option_error

AUTO = "auto"


@dataclass(frozen=True)
class Ramp:
    """Requests per second at the start and at the end; whole numbers, as vLLM's."""

    start: int
    end: int

    def __str__(self) -> str:
        return f"{self.start}:{self.end}"

    def warm_up(self) -> "Ramp":
        """Return a ramp of the same end that takes little time."""
        return Ramp(max(self.start, self.end // 4), self.end)


def parse_ramp(text: str) -> Ramp | str:
    """Return the value of ``--mixed``; ``auto`` stays as it is.

    Raises:
        argparse.ArgumentTypeError: it is neither that nor START:END.
    """
    if text == AUTO:
        return AUTO
    match = re.fullmatch(r"(\d+):(\d+)", text)
    if match is not None:
        start, end = map(int, match.groups())
        if 1 <= start <= end:
            return Ramp(start, end)
    error = option_error(
        f"{text!r} is no mixed load",
        f"Allowed are {AUTO} and START:END, requests per second in whole numbers "
        "with 1 <= START <= END",
        f"--mixed {AUTO} or --mixed 2:128",
    )
    raise argparse.ArgumentTypeError(str(error))


def find_ramp(rows: list[dict[str, Any]], temperature: float) -> Ramp:
    """Return the ramp from one request at a time to full, by the other loads' rows.

    It starts at the requests per second of the slowest server that has one request at
    a time, and ends at twice those of the fastest server under the largest
    concurrency: a ramp is over before as many requests are in flight as its last rate
    would bring in the long run.
    """
    rates: dict[int, list[float]] = {}
    for row in rows:
        if row["temperature"] == temperature and row["concurrency"] is not None:
            rate = row["result"]["request_throughput"]
            rates.setdefault(row["concurrency"], []).append(rate)
    least, most = min(rates), max(rates)
    start = max(1, math.floor(min(rates[least]) / least))
    return Ramp(start, max(start, math.ceil(2 * max(rates[most]))))
