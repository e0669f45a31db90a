# SPDX-License-Identifier: Apache-2.0
"""What a row of the support table says, and the three kinds of it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from vllm_dflash.support_checks import Check


class Status(Enum):
    """How a feature and a tree get along."""

    TREE = "tree"
    CHAIN = "chain"
    REFUSED = "refused"


@dataclass(frozen=True)
class Feature:
    """One row of the table.

    Attributes:
        area: Heading in the docs.
        name: What the user calls it.
        status: Served as a tree, as a chain beside trees, or refused.
        note: Why.
        way_out: What to type instead, in refused rows.
        check: Finds the feature in an engine's config; refused rows only.
    """

    area: str
    name: str
    status: Status
    note: str
    way_out: str = ""
    check: Check | None = None


def tree_row(area: str, name: str, note: str) -> Feature:
    return Feature(area, name, Status.TREE, note)


def chain_row(area: str, name: str, note: str) -> Feature:
    return Feature(area, name, Status.CHAIN, note)


def refused_row(
    area: str, name: str, note: str, way_out: str, check: Check | None
) -> Feature:
    return Feature(area, name, Status.REFUSED, note, way_out, check)
