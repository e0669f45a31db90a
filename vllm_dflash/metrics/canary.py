# SPDX-License-Identifier: Apache-2.0
"""One warning, soon after the start, when the draft does not fit the target."""

from __future__ import annotations

from vllm_dflash.logger import init_logger

logger = init_logger(__name__)

CANARY_ROUNDS = 200
CANARY_LENGTH = 1.1


class AcceptanceCanary:
    """Looks at the first rounds of an engine, says at most one thing, and is done."""

    def __init__(self, draft_model: str, target_model: str) -> None:
        self._draft_model = draft_model
        self._target_model = target_model
        self._rounds = 0
        self._accepted = 0
        self._is_done = False

    def observe(self, rounds: int, accepted: int) -> None:
        """Add the rounds of a step; warns when enough of them accepted nearly nothing.

        Args:
            rounds: Drafts verified in the step.
            accepted: Nodes accepted in them.
        """
        if self._is_done:
            return
        self._rounds += rounds
        self._accepted += accepted
        if self._rounds < CANARY_ROUNDS:
            return
        self._is_done = True
        length = 1 + self._accepted / self._rounds
        if length < CANARY_LENGTH:
            logger.warning(
                "The draft is hardly ever right: the mean acceptance length is %.2f "
                "over the first %d rounds (1.00 is no draft token accepted). Answers "
                "are still the target's own, but every step pays for a tree that is "
                "thrown away. Usual causes: the draft %s was trained for another model "
                "than %s, or for another fine-tune of it; prompts that do not go "
                "through the chat template that the draft was trained with; a target "
                "quantised so far that its tokens changed; a sampling temperature well "
                "above 1. Check the draft's model card for its target, send a plain "
                "chat request at temperature 0, and look at its trees: type "
                "VLLM_DFLASH_DUMP_TREES=trees.jsonl before the command, then "
                "`vllm-dflash show-tree trees.jsonl`. To serve without drafts leave "
                "--speculative-config out.",
                length,
                self._rounds,
                self._draft_model,
                self._target_model,
            )
