# SPDX-License-Identifier: Apache-2.0
"""What the subcommands share: their error, and types of their options.

Apart from ``main.py``, which ``python -m`` runs under another name: a subcommand that
imported it would raise an error of a second class, which nobody catches.
"""

import argparse
import json
from collections.abc import Callable
from typing import Any

from vllm_dflash.errors import option_error


class CommandError(Exception):
    """A failure the user can act on; printed to stderr without a traceback."""


def positive(text: str) -> int:
    """Return the number of an option that counts something."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1 (got {value})")
    return value


def json_object(what: str, example: str) -> Callable[[str], dict[str, Any]]:
    """Return the type of an option that is a JSON object.

    Args:
        what: What its keys and values are.
        example: The option and a value, to be typed in a shell.
    """

    def parse(text: str) -> dict[str, Any]:
        try:
            value = json.loads(text)
        except ValueError:
            value = None
        if not isinstance(value, dict):
            error = option_error(
                f"{text!r} is no JSON object", f"{what} are allowed", example
            )
            raise argparse.ArgumentTypeError(str(error))
        return value

    return parse
