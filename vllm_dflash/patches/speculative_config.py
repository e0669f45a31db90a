# SPDX-License-Identifier: Apache-2.0
"""`vllm/config/speculative.py`: the slots that a draft needs in a step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import SpeculativeConfig

# No field: it travels in the instance's own dict, to the engine core too.
_DRAFT_SLOTS = "_ddtree_draft_slots"


class _Property(property):
    """A property that can carry the ledger's mark."""


def set_draft_slots(config: SpeculativeConfig, depth: int) -> None:
    """Say how many slots the draft of a tree takes beside a request's own rows."""
    vars(config)[_DRAFT_SLOTS] = depth


def make_draft_slots(original: Any) -> property:
    """Return `max_num_new_slots_for_drafting` that knows trees."""

    def max_num_new_slots_for_drafting(self: SpeculativeConfig) -> int:
        slots = vars(self).get(_DRAFT_SLOTS)
        return original.fget(self) if slots is None else slots

    return _Property(max_num_new_slots_for_drafting, doc=original.__doc__)
