# SPDX-License-Identifier: Apache-2.0
"""Where answers in 16 bits or from an fp8 cache leave those of no speculation.

Roundings differ between batch shapes, so the answers of a random target part often; but
a rounding makes them part at near ties only. After an error the token said is any of
the vocabulary, and the gap to it anything up to the spread of the logits.
"""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engines import engine, generate, params, random_prompts, token_ids, tree_config
from rigged_draft import RiggedDraft
from tiny_models import write_target

NUM_ANSWERS = 48
NUM_TOKENS = 16
# Best tokens of each step whose scores are known.
NUM_SCORES = 5


@dataclass
class Partings:
    """What the answers of an engine with trees had in common with the plain ones.

    Attributes:
        num_answers: How many were compared.
        num_agreeing: Tokens before the partings, those of whole answers included.
        gaps: Of each answer that parts, how much better the plain token was than the
            one that was said; infinite if that was none of the best `NUM_SCORES`.
    """

    num_answers: int = 0
    num_agreeing: int = 0
    gaps: list[float] = field(default_factory=list)

    @property
    def largest_gap(self) -> float:
        return max(self.gaps, default=0.0)

    @property
    def share_of_parting(self) -> float:
        return len(self.gaps) / self.num_answers

    def add(self, plain: Any, said: list[int]) -> None:
        """Compare one answer with the plain one, which has logprobs."""
        self.num_answers += 1
        expected = list(plain.token_ids)
        assert len(said) == len(expected)
        place = next((i for i, t in enumerate(said) if t != expected[i]), None)
        self.num_agreeing += len(expected) if place is None else place
        if place is None:
            return
        scores = plain.logprobs[place]
        gap = math.inf
        if said[place] in scores:
            gap = scores[expected[place]].logprob - scores[said[place]].logprob
        self.gaps.append(gap)


def write_calm_target(path: Path, **config: Any) -> str:
    """A target whose layers hardly enlarge a rounding: near ties are nearer."""
    return write_target(path, initializer_range=0.15, **config)


def find_partings(
    target: str,
    draft: str,
    rig: RiggedDraft,
    *,
    budget: int = 32,
    engine_options: dict[str, Any],
) -> Partings:
    """Greedy answers with trees, rigged to the plain ones, against those.

    A draft is rigged until its answer parts: then it is the draft's own.
    """
    rig.strict = False
    prompts = random_prompts(tuple(5 + i * 7 % 60 for i in range(NUM_ANSWERS)), seed=3)
    with engine(target, **engine_options) as llm:
        plain = generate(llm, prompts, params(NUM_TOKENS, logprobs=NUM_SCORES))
    rig.add_references(prompts, token_ids(plain))
    with engine(target, tree_config(draft, budget=budget), **engine_options) as llm:
        said = token_ids(generate(llm, prompts, params(NUM_TOKENS)))
    partings = Partings()
    for output, tokens in zip(plain, said, strict=True):
        partings.add(output.outputs[0], tokens)
    print(
        f"{len(partings.gaps)} of {partings.num_answers} answers part, after "
        f"{partings.num_agreeing} tokens in all, at gaps "
        f"{sorted(round(gap, 3) for gap in partings.gaps)}; {len(rig.paths)} rounds, "
        f"{rig.mean_tokens:.2f} tokens each, {rig.num_branching_paths} paths off the "
        "first branch"
    )
    return partings
