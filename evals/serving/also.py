# SPDX-License-Identifier: Apache-2.0
"""Loads that are measured more often than the others, by the same servers.

Where two servers are close, a ratio wants more repeats than a whole sweep can have.
"""

import argparse
import random
import re
from dataclasses import dataclass

from vllm_dflash.errors import option_error

_FORM = re.compile(
    r"(?P<temperature>\d+(\.\d+)?):(?P<levels>\d+(,\d+)*):(?P<repeats>\d+)"
    r"(:(?P<servers>[\w,-]+))?"
)


@dataclass(frozen=True)
class Also:
    """More loads, with repeats of their own.

    Attributes:
        servers: Which are measured; None: all.
    """

    temperature: float
    concurrency: tuple[int, ...]
    repeats: int
    servers: tuple[str, ...] | None = None

    def schedule(
        self, servers: list[str], seed: int
    ) -> list[tuple[int | None, tuple[float, int], str]]:
        """Return (repeat, load, server) in the order of measuring; None warms up."""
        rng = random.Random(seed)
        names = servers if self.servers is None else list(self.servers)
        settings = [(self.temperature, level) for level in self.concurrency]
        order: list[tuple[int | None, tuple[float, int], str]] = [
            (None, setting, name) for setting in settings for name in names
        ]
        for repeat in range(self.repeats):
            for setting in rng.sample(settings, len(settings)):
                order += [(repeat, setting, n) for n in rng.sample(names, len(names))]
        return order


def parse_also(text: str) -> Also:
    """Return the value of ``--also``.

    Raises:
        argparse.ArgumentTypeError: it is no T:CONCURRENCY:REPEATS[:SERVERS].
    """
    match = _FORM.fullmatch(text)
    if match is not None:
        levels = tuple(int(part) for part in match["levels"].split(","))
        repeats, names = int(match["repeats"]), match["servers"]
        if min(levels) > 0 and len(set(levels)) == len(levels) and repeats > 0:
            servers = None if names is None else tuple(names.split(","))
            return Also(float(match["temperature"]), levels, repeats, servers)
    error = option_error(
        f"{text!r} names no loads",
        "Allowed is TEMPERATURE:CONCURRENCY,..:REPEATS, and :SERVER,.. for some of "
        "the servers",
        "--also 0:4,8,32:8:tree-fixed,tree-auto",
    )
    raise argparse.ArgumentTypeError(str(error))


def check_also(
    also: Also, servers: list[str], temperatures: list[float], concurrency: list[int]
) -> None:
    """Stop if servers are missing, or loads are measured twice.

    Raises:
        ValueError: They are.
    """
    missing = [name for name in also.servers or () if name not in servers]
    if missing:
        raise option_error(
            f"--also names the server {missing[0]!r}, which is not measured",
            f"Allowed are {', '.join(servers)}",
            f"--servers {','.join([*servers, missing[0]])}",
        )
    twice = set(also.concurrency) & set(concurrency)
    if also.temperature in temperatures and twice:
        raise option_error(
            f"--also repeats T={also.temperature:g} at concurrency {min(twice)}, which "
            "--temperatures and --concurrency have measured",
            "Each load is allowed once",
            "--also with another temperature or concurrency, or --repeats for all",
        )
