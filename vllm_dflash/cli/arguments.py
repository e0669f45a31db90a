# SPDX-License-Identifier: Apache-2.0
"""What the subcommands share: their error, and types of their options.

Apart from ``main.py``, which ``python -m`` runs under another name: a subcommand that
imported it would raise an error of a second class, which nobody catches.
"""

import argparse


class CommandError(Exception):
    """A failure the user can act on; printed to stderr without a traceback."""


def positive(text: str) -> int:
    """Return the number of an option that counts something."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1 (got {value})")
    return value
