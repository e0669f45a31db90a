# SPDX-License-Identifier: Apache-2.0
"""Where two answers part."""

from collections.abc import Sequence
from typing import Any


def first_difference(left: Sequence[Any], right: Sequence[Any]) -> int | None:
    """Return the first position at which two answers differ, None if they are equal.

    Where one is the beginning of the other that is its length.
    """
    for position, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return position
    return None if len(left) == len(right) else min(len(left), len(right))
