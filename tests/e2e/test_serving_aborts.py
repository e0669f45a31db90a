# SPDX-License-Identifier: Apache-2.0
"""Clients that leave in every phase, and requests that lose their cache and resume."""

from typing import Any

import pytest
from engine_pair import EnginePair, engine_pair
from engines import params, random_prompts
from schedule_log import ScheduleLog
from stepper import (
    DECODING,
    PHASES,
    PREFILLING,
    WAITING,
    Stepper,
    drain,
    num_free_blocks,
    scheduler,
)
from tiny_models import write_target
from tiny_tokenizer import write_tokenizer

pytestmark = pytest.mark.e2e

# Four requests want more blocks than there are, and prompts are run in pieces.
TIGHT = dict(
    skip_tokenizer_init=False, num_gpu_blocks_override=14, max_num_batched_tokens=140
)
PROMPTS = random_prompts((35, 64, 190, 70, 20, 33, 60), seed=41)


@pytest.fixture(scope="module")
def pair(tmp_path_factory, tiny_draft):
    target = write_target(tmp_path_factory.mktemp("spoken"))
    write_tokenizer(target)
    with engine_pair(target, tiny_draft, **TIGHT) as pair:
        yield pair


@pytest.fixture
def log(monkeypatch, pair) -> ScheduleLog:
    log = ScheduleLog()
    log.install(monkeypatch)
    return log


def expected_answers(pair: EnginePair, options: list[Any]) -> list[list[int]]:
    """Answers without speculation; the draft is rigged to them."""
    comparison = pair.compare(PROMPTS, options)
    comparison.assert_equal()
    assert pair.tree.reset_prefix_cache()
    return [samples[0] for samples in comparison.expected_tokens]


def options() -> list[Any]:
    """New objects for each engine: vLLM changes those that it is given."""
    seeded = [dict(), dict(temperature=1.0, seed=5), dict(repetition_penalty=1.3)]
    return [params(50, **seeded[i % 3]) for i in range(len(PROMPTS))]


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("delay", [0, 2])
def test_client_leaves(pair, phase, delay):
    """The first request found in the phase ends there, the others don't notice."""
    expected = expected_answers(pair, options())
    names = [f"{phase}{delay}-{i}" for i in range(len(PROMPTS))]
    free_blocks = num_free_blocks(pair.tree)
    stepper = Stepper(pair.tree)
    for name, prompt, option in zip(names, PROMPTS, options(), strict=True):
        stepper.add(name, prompt, option)
    left: list[str] = []
    seen = 0
    while pair.tree.llm_engine.has_unfinished_requests():
        if not left:
            found = [n for n in names if phase in stepper.phases(n)]
            seen += bool(found)
            # The last comer, who has the least claim on what it holds.
            if found and (seen > delay or phase == PREFILLING):
                left.append(found[-1])
                stepper.abort(found[-1])
                assert not stepper.phases(found[-1])
        stepper.step()
    drain(pair.tree)
    assert left, "no request was ever in this phase"
    assert pair.rig.num_branching_paths > 10
    for name, tokens in zip(names, expected, strict=True):
        got = stepper.tokens.get(name, [])
        assert got == (tokens[: len(got)] if name in left else tokens)
    assert len(stepper.tokens.get(left[0], [])) < 50
    if phase == DECODING and delay:
        assert stepper.tokens[left[0]]
    if phase in (WAITING, PREFILLING):
        assert left[0] not in stepper.tokens
    assert num_free_blocks(pair.tree) == free_blocks
    assert pair.tree.reset_prefix_cache()
    assert not scheduler(pair.tree).requests


def test_all_clients_leave_at_once(pair):
    """Nothing is in use afterwards, and the next requests find everything in order."""
    expected = expected_answers(pair, options())
    free_blocks = num_free_blocks(pair.tree)
    for steps in (1, 2, 3, 5, 9):
        stepper = Stepper(pair.tree)
        names = [f"all{steps}-{i}" for i in range(len(PROMPTS))]
        for name, prompt, option in zip(names, PROMPTS, options(), strict=True):
            stepper.add(name, prompt, option)
        stepper.step(steps)
        for name in names:
            stepper.abort(name)
        assert not pair.tree.llm_engine.has_unfinished_requests()
        drain(pair.tree)
        for name, tokens in zip(names, expected, strict=True):
            got = stepper.tokens.get(name, [])
            assert got == tokens[: len(got)]
        assert num_free_blocks(pair.tree) == free_blocks
    assert pair.compare(PROMPTS, options()).got_tokens == [[t] for t in expected]


def test_every_kind_of_request_resumes(pair, log):
    """Trees, chains, grammars, samples of one prompt: preempted, and none the wiser."""
    from vllm.sampling_params import StructuredOutputsParams

    seeded = dict(temperature=1.0, seed=6, detokenize=True)
    grammar = StructuredOutputsParams(regex="([0-9]{2},)+")
    kinds = [
        dict(),
        dict(seeded, n=3),
        dict(seeded, structured_outputs=grammar),
        dict(seeded, frequency_penalty=0.7, presence_penalty=0.4),
        dict(seeded, logprobs=2, stop=["qq"]),
        dict(seeded, min_p=0.05, logit_bias={33: 4.0}),
        dict(seeded, bad_words=["e", "th"]),
    ]
    resumed: set[int] = set()
    # Who came last is preempted: everyone has to be that once. A grammar is compiled
    # meanwhile, so who that is differs from run to run.
    for turn in range(3 * len(kinds)):
        order = [(i + 2 * turn) % len(kinds) for i in range(len(kinds))]
        assert pair.tree.reset_prefix_cache()
        log.clear()
        mix = [params(60, **kinds[kind]) for kind in order]
        comparison = pair.compare(PROMPTS, mix)
        comparison.assert_equal()
        assert pair.verified_trees
        hit = log.preempted_requests
        pairs = zip(order, comparison.got, strict=True)
        resumed |= {kind for kind, output in pairs if output.request_id in hit}
        if len(resumed) == len(kinds):
            break
    assert resumed == set(range(len(kinds)))


def test_resumed_while_its_prompt_was_still_run(pair, log):
    """Preempted between two pieces of its prompt, with nothing said yet."""
    prompts = random_prompts((33, 40, 190, 180), seed=43)
    mix = [params(n) for n in (60, 60, 20, 20)]
    pair.compare(prompts, mix).assert_equal()
    assert log.preempted
    assert max(log.num_pieces.values()) > 2
    assert pair.verified_trees
