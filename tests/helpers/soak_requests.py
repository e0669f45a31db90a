# SPDX-License-Identifier: Apache-2.0
"""Random requests of a soak: prompts, sampling options, arrivals and aborts by a seed.

The options are those that vLLM takes with and without speculation and that decide every
token: greedy, or with a seed of their own. So a request has one right answer, whatever
runs beside it.
"""

import random
from dataclasses import dataclass
from typing import Any

from stepper import PHASES, PREEMPTED, PREFILLING
from tiny_models import VOCAB_SIZE

MAX_MODEL_LEN = 256
LETTERS = "etaoinsr"
# Grammars that end, and ones that max_tokens cuts short.
REGEXES = ("[a-f]{3}-[0-9]{2}", "(yes|no|perhaps)", "[ -~]{4,40}", "([0-9]{2},)+")
# More than the longest of a wave needs.
STEPS_OF_A_WAVE = 40
STREAMS = ("final", "cumulative", "delta")


@dataclass(frozen=True)
class SoakRequest:
    """One request, when it comes, and when it is given up."""

    name: str
    # Number of the engine's step before which it is sent.
    arrival: int
    prompt: list[int]
    # Keyword arguments of SamplingParams; `regex` stands for a structured output.
    options: dict[str, Any]
    # How outputs arrive: one of STREAMS.
    stream: str = "final"
    # The client leaves before the step that finds the request in this phase, after as
    # many others that did; None: it stays.
    leaves_when: str | None = None
    leaves_after: int = 0

    def params(self, stream: str | None = None) -> Any:
        """New SamplingParams: vLLM changes those that it is given."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

        options = dict(self.options)
        regex = options.pop("regex", None)
        if regex is not None:
            options["structured_outputs"] = StructuredOutputsParams(regex=regex)
        kinds = dict(
            final=RequestOutputKind.FINAL_ONLY,
            cumulative=RequestOutputKind.CUMULATIVE,
            delta=RequestOutputKind.DELTA,
        )
        return SamplingParams(**options, output_kind=kinds[stream or self.stream])


def make_waves(largest: int, seed: int) -> list[SoakRequest]:
    """1, 2, ... `largest` short requests at once, each wave after the one before.

    Every number of requests verifies whole trees, which random requests may not do: the
    last of a crowd are rarely all past their prompts.
    """
    rng = random.Random(seed)
    return [
        SoakRequest(
            name=f"w{count}-{index}",
            arrival=(count - 1) * STEPS_OF_A_WAVE,
            prompt=_tokens(rng, 4),
            options=dict(
                temperature=index % 2,
                seed=rng.randrange(2**40),
                max_tokens=20,
                ignore_eos=True,
            ),
        )
        for count in range(1, largest + 1)
        for index in range(count)
    ]


def make_requests(num_requests: int, seed: int, start: int = 0) -> list[SoakRequest]:
    """Requests in the order of their arrival, from the step `start` on.

    The same for the same seed.
    """
    rng = random.Random(seed)
    prefixes = [_tokens(rng, rng.randint(30, 170)) for _ in range(6)]
    requests: list[SoakRequest] = []
    for arrival in _arrivals(rng, num_requests):
        prompt = _prompt(rng, prefixes)
        room = MAX_MODEL_LEN - len(prompt)
        # Some would go on past the model's length.
        longest = rng.choice([8, 32, 32, 64, 64, 150])
        leaves_when = None
        if rng.random() < 0.25:
            # Few requests are ever preempted.
            leaves_when = rng.choice((*PHASES, PREEMPTED, PREEMPTED))
        requests.append(
            SoakRequest(
                name=f"r{len(requests)}",
                arrival=start + arrival,
                prompt=prompt,
                options=random_options(rng, longest, room),
                stream=rng.choice(STREAMS),
                leaves_when=leaves_when,
                # A prompt is cut into two or three pieces.
                leaves_after=0
                if leaves_when == PREFILLING
                else rng.choice([0, 0, 0, 1, 2, 4, 8]),
            )
        )
    return requests


def random_options(rng: random.Random, longest: int, room: int) -> dict[str, Any]:
    """Most requests use a few of many options."""

    def maybe(make: Any, otherwise: Any = None, chance: float = 0.12) -> Any:
        return make() if rng.random() < chance else otherwise

    def words(longest_word: int) -> list[str]:
        return [
            "".join(rng.choices(LETTERS, k=rng.randint(1, longest_word)))
            for _ in range(rng.randint(1, 3))
        ]

    temperature = rng.choice([0.0, 0.0, 0.0, 0.3, 0.8, 1.0, 1.0, 1.5])
    options = dict(
        temperature=temperature,
        seed=rng.randrange(2**40),
        max_tokens=1 if rng.random() < 0.05 else rng.randint(1, longest),
        n=1 if temperature == 0 else maybe(lambda: rng.randint(2, 3), 1),
        top_k=maybe(lambda: rng.randint(1, 60), 0),
        top_p=maybe(lambda: rng.uniform(0.05, 0.99), 1.0),
        min_p=maybe(lambda: rng.uniform(0.001, 0.5), 0.0),
        repetition_penalty=maybe(lambda: rng.uniform(0.6, 2.0), 1.0, 0.06),
        frequency_penalty=maybe(lambda: rng.uniform(-1, 2), 0.0, 0.06),
        presence_penalty=maybe(lambda: rng.uniform(-1, 2), 0.0, 0.06),
        logprobs=maybe(lambda: rng.randint(0, 3)),
        prompt_logprobs=maybe(lambda: rng.randint(0, 2), chance=0.03),
        logit_bias=maybe(
            lambda: {rng.randrange(VOCAB_SIZE): rng.uniform(-20, 20) for _ in range(4)}
        ),
        allowed_token_ids=maybe(
            lambda: rng.sample(range(30, 60), rng.randint(2, 20)), chance=0.08
        ),
        stop_token_ids=maybe(lambda: rng.sample(range(VOCAB_SIZE), 8)),
        bad_words=maybe(lambda: words(4), chance=0.04),
        stop=maybe(lambda: words(2)),
        include_stop_str_in_output=rng.random() < 0.5,
        ignore_eos=rng.random() < 0.5,
    )
    options["min_tokens"] = min(
        maybe(lambda: rng.randint(0, options["max_tokens"]), 0), room - 1
    )
    # Beside a grammar these may leave nothing to say: vLLM then ends the request with
    # an error.
    if options["allowed_token_ids"] is None and options["bad_words"] is None:
        options["regex"] = maybe(lambda: rng.choice(REGEXES), chance=0.08)
    return options


def _tokens(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(10, 500) for _ in range(length)]


def _prompt(rng: random.Random, prefixes: list[list[int]]) -> list[int]:
    kind = rng.random()
    if kind < 0.05:
        return _tokens(rng, rng.randint(1, 3))
    if kind < 0.1:
        # Ends at the model's length within a few tokens, at any node of a tree.
        return _tokens(rng, MAX_MODEL_LEN - rng.randint(1, 40))
    if kind < 0.55:
        return rng.choice(prefixes) + _tokens(rng, rng.randint(1, 50))
    return _tokens(rng, rng.randint(4, 110))


def _arrivals(rng: random.Random, num_requests: int) -> list[int]:
    """Bursts that make a queue, trickles, and lulls in which it is worked off.

    About as many as eight requests at a time can be answered: a longer soak has no
    longer queue.
    """
    arrivals: list[int] = []
    now = 0
    while len(arrivals) < num_requests:
        kind = rng.choice(["burst", "burst", "trickle", "lull"])
        if kind == "lull":
            now += rng.randint(40, 140)
        for _ in range(rng.randint(4, 20) if kind != "lull" else 0):
            arrivals.append(now)
            now += rng.randint(0, 6) if kind == "trickle" else 0
        now += rng.randint(0, 30)
    return arrivals[:num_requests]
