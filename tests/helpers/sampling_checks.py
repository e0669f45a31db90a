# SPDX-License-Identifier: Apache-2.0
"""Sets of sampling options, one request each, on an engine pair with a tokenizer."""

from contextlib import contextmanager
from typing import Any

from engine_pair import Comparison, EnginePair, engine_pair
from engines import random_prompts
from tiny_models import write_target
from tiny_tokenizer import END_THINK, THINK, write_tokenizer

LENGTHS = (35, 20, 60, 5, 17, 9)
SEEDED: dict[str, Any] = dict(temperature=1.0, seed=7)
SETTINGS: dict[str, Any] = dict(
    skip_tokenizer_init=False, max_num_seqs=8, max_logprobs=10
)


def write_spoken_target(path: Any) -> str:
    """The tiny target with a tokenizer."""
    target = write_target(path)
    write_tokenizer(target)
    return target


@contextmanager
def sampling_pair(target: str, draft: str):
    reasoning = dict(reasoning_start_str=THINK, reasoning_end_str=END_THINK)
    with engine_pair(target, draft, reasoning_config=reasoning, **SETTINGS) as pair:
        yield pair


def prompts_of(count: int, seed: int = 1) -> list[list[int]]:
    return random_prompts(tuple(LENGTHS[i % len(LENGTHS)] for i in range(count)), seed)


def check(
    pair: EnginePair, options: list[Any], *, chain: bool = False, seed: int = 1
) -> Comparison:
    """Compare one request for each set of options, in one batch."""
    comparison = pair.compare(prompts_of(len(options), seed), options)
    comparison.assert_equal()
    assert pair.verified_chains if chain else pair.verified_trees, pair.rig.paths
    return comparison
