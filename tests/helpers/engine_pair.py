# SPDX-License-Identifier: Apache-2.0
"""Two live engines with the same settings: without speculation, and with trees.

The draft of the second is rigged to hit what the first has said. Both stay up for many
comparisons, so that a test costs the steps it takes and no start-up.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from engines import engine, generate, tree_config
from rigged_draft import RiggedDraft


@dataclass
class Comparison:
    """Outputs of one set of requests on both engines, in prompt order."""

    expected: list[Any]
    got: list[Any]

    @property
    def expected_tokens(self) -> list[list[list[int]]]:
        """Token ids of every sample of every request."""
        return [_samples(output) for output in self.expected]

    @property
    def got_tokens(self) -> list[list[list[int]]]:
        return [_samples(output) for output in self.got]

    def assert_equal(self) -> None:
        """Token ids, text, finish and stop reasons are those without speculation."""
        assert self.got_tokens == self.expected_tokens
        for ours, theirs in zip(self.got, self.expected, strict=True):
            for a, b in zip(ours.outputs, theirs.outputs, strict=True):
                assert a.text == b.text
                assert a.finish_reason == b.finish_reason
                assert a.stop_reason == b.stop_reason


@dataclass
class EnginePair:
    """The engines and the rig of the second."""

    plain: Any
    tree: Any
    rig: RiggedDraft

    def compare(
        self, prompts: list[list[int]], params: Any, *, rigged: bool = True
    ) -> Comparison:
        """Run the requests on both engines, each in one call.

        Without the rig the second engine's draft model is on its own.
        """
        self.rig.forget()
        expected = generate(self.plain, prompts, params)
        if rigged:
            for prompt, output in zip(prompts, expected, strict=True):
                for sample in _samples(output):
                    self.rig.add_reference(prompt, sample)
        return Comparison(expected, generate(self.tree, prompts, params))

    @property
    def verified_trees(self) -> bool:
        """Whether the last comparison accepted paths off the first branch."""
        return self.rig.num_branching_paths > 0 and self.rig.mean_tokens > 1.3

    @property
    def verified_chains(self) -> bool:
        """Whether it accepted drafts, and never off the first branch."""
        return self.rig.num_branching_paths == 0 and self.rig.mean_tokens > 1.1


@contextmanager
def engine_pair(
    target: str, draft: str, ddtree: dict[str, Any] | None = None, **kwargs: Any
) -> Iterator[EnginePair]:
    """A pair that is shut down afterwards; ``kwargs`` go to both engines."""
    rig = RiggedDraft(strict=False)
    with pytest.MonkeyPatch.context() as monkeypatch:
        rig.install(monkeypatch)
        with (
            engine(target, **kwargs) as plain,
            engine(target, tree_config(draft, **(ddtree or {})), **kwargs) as tree,
        ):
            yield EnginePair(plain, tree, rig)


def _samples(output: Any) -> list[list[int]]:
    return [list(sample.token_ids) for sample in output.outputs]
