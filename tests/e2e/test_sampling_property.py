# SPDX-License-Identifier: Apache-2.0
"""Same seed, same tokens: random sampling parameters, trees against no speculation.

Both engines stay up, so an example is one batch of requests with parameters of their
own, and hypothesis can shrink a difference to the request that shows it. The marker
`slow` runs thousands of requests instead of hundreds.
"""

import random
from dataclasses import dataclass
from typing import Any

import pytest
from engine_pair import EnginePair, engine_pair
from engines import params
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_models import VOCAB_SIZE, write_target
from tiny_tokenizer import END_THINK, SPECIALS, THINK, write_tokenizer

pytestmark = pytest.mark.e2e

BATCH_SIZE = 8
MAX_TOKENS = 16
LETTERS = "etaoinsr"
# Grammars that end, and ones that max_tokens cuts short.
REGEXES = ("[a-f]{3}-[0-9]{2}", "(yes|no|perhaps)", "[ -~]{4,40}", "([0-9]{2},)+")


def maybe(strategy: st.SearchStrategy, otherwise: Any = None) -> st.SearchStrategy:
    """The option in one request of four: most requests use a few of many options."""
    return st.integers(0, 3).flatmap(
        lambda i: strategy if i == 3 else st.just(otherwise)
    )


token_ids = st.integers(0, VOCAB_SIZE - 1)
# Ids of one letter or two: few enough to repeat, and to say words of LETTERS.
common_ids = st.integers(30, 60)


@st.composite
def requests(
    draw: st.DrawFn, thinking_token_budget: int | None = None
) -> dict[str, Any]:
    """Sampling parameters as keyword arguments; valid for vLLM."""
    options: dict[str, Any] = dict(
        temperature=draw(st.sampled_from([0.0, 0.2, 0.7, 1.0, 1.0, 1.3, 2.0])),
        seed=draw(st.integers(0, 2**62)),
        max_tokens=draw(st.integers(1, MAX_TOKENS)),
        n=draw(maybe(st.just(2), 1)),
        top_k=draw(maybe(st.integers(1, 60), 0)),
        top_p=draw(maybe(st.floats(0.05, 0.99), 1.0)),
        min_p=draw(maybe(st.floats(0.001, 0.5), 0.0)),
        repetition_penalty=draw(maybe(st.floats(0.6, 2.0), 1.0)),
        frequency_penalty=draw(maybe(st.floats(-1.0, 2.0), 0.0)),
        presence_penalty=draw(maybe(st.floats(-1.0, 2.0), 0.0)),
        logprobs=draw(maybe(st.integers(0, 3))),
        logit_bias=draw(
            maybe(
                st.dictionaries(token_ids, st.floats(-20, 20), min_size=1, max_size=5)
            )
        ),
        allowed_token_ids=draw(
            maybe(st.lists(common_ids, min_size=2, max_size=20, unique=True))
        ),
        stop_token_ids=draw(maybe(st.lists(token_ids, min_size=1, max_size=8))),
        bad_words=draw(
            maybe(st.lists(st.text(LETTERS, min_size=1, max_size=4), min_size=1))
        ),
        stop=draw(
            maybe(st.lists(st.text(LETTERS, min_size=1, max_size=2), min_size=1))
        ),
        thinking_token_budget=thinking_token_budget,
        ignore_eos=draw(st.booleans()),
        detokenize=True,
    )
    if options["temperature"] == 0:
        options["n"] = 1
    options["min_tokens"] = draw(maybe(st.integers(0, options["max_tokens"]), 0))
    # Beside a grammar these may leave nothing to say, or force what it forbids: vLLM
    # then ends the request with an error.
    others = ("allowed_token_ids", "bad_words", "thinking_token_budget")
    if all(options[name] is None for name in others):
        options["regex"] = draw(maybe(st.sampled_from(REGEXES)))
    return options


@dataclass
class Batch:
    """One example: the requests, their prompts, and how the draft is rigged."""

    options: list[dict[str, Any]]
    prompt_seed: int
    hit_rate: float

    def prompts(self) -> list[list[int]]:
        rng = random.Random(self.prompt_seed)
        return [
            [rng.randrange(10, 500) for _ in range(rng.randint(1, 40))]
            + (
                [SPECIALS.index(THINK)]
                if options["thinking_token_budget"] is not None
                else []
            )
            for options in self.options
        ]

    def params(self) -> list[Any]:
        from vllm.sampling_params import StructuredOutputsParams

        result = []
        for options in self.options:
            options = dict(options)
            regex = options.pop("regex", None)
            if regex is not None:
                options["structured_outputs"] = StructuredOutputsParams(regex=regex)
            result.append(params(**options))
        return result


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    # Interpreted, the kernel of the thinking budget costs more than all the rest.
    budget = draw(maybe(maybe(st.integers(0, 8))))
    options = [draw(requests(budget))]
    options += [draw(requests()) for _ in range(BATCH_SIZE - 1)]
    return Batch(
        options, draw(st.integers(0, 2**32)), draw(st.sampled_from([0.3, 0.85, 1.0]))
    )


@pytest.fixture(scope="module")
def pair(tmp_path_factory, tiny_draft):
    target = write_target(tmp_path_factory.mktemp("spoken"))
    write_tokenizer(target)
    with engine_pair(
        target,
        tiny_draft,
        reasoning_config=dict(reasoning_start_str=THINK, reasoning_end_str=END_THINK),
        skip_tokenizer_init=False,
        max_num_seqs=BATCH_SIZE,
    ) as pair:
        yield pair


@dataclass
class Seen:
    """What the examples have covered."""

    num_requests: int = 0
    num_tokens: int = 0
    num_branching: int = 0


def check(pair: EnginePair, batch: Batch, seen: Seen) -> None:
    pair.rig.hit_rate = batch.hit_rate
    comparison = pair.compare(batch.prompts(), batch.params())
    comparison.assert_equal()
    seen.num_requests += len(batch.options)
    seen.num_tokens += sum(map(len, sum(comparison.got_tokens, [])))
    seen.num_branching += pair.rig.num_branching_paths


def run(pair: EnginePair, num_examples: int) -> Seen:
    seen = Seen()

    @settings(
        max_examples=num_examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(batches())
    def same_seed_same_tokens(batch: Batch) -> None:
        check(pair, batch, seen)

    same_seed_same_tokens()
    print(seen)
    return seen


def test_same_seed_gives_the_tokens_of_no_speculation(pair):
    seen = run(pair, 40)
    assert seen.num_requests >= 300
    assert seen.num_branching > 100


@pytest.mark.slow
def test_same_seed_gives_the_tokens_of_no_speculation_thousands_of_times(pair):
    seen = run(pair, 625)
    assert seen.num_requests >= 5000
    assert seen.num_branching > 1000
