# SPDX-License-Identifier: Apache-2.0
"""The form of every message about a wrong option."""


def option_error(wrong: str, allowed: str, way_out: str) -> ValueError:
    """What is wrong and was got, what is allowed, what to type."""
    return ValueError(f"{wrong}. {allowed}. Type {way_out}.")
