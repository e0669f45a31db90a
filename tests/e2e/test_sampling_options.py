# SPDX-License-Identifier: Apache-2.0
"""Every option of SamplingParams on a tree: what it gives without speculation.

Both engines are up at once; a rigged draft hits the reference at random ranks, so that
options that verify trees are seen to accept off the first branch, and options that
need a linear history are seen to verify chains.
"""

import pytest
from custom_processor import OPTION, NoEcho
from engine_pair import engine_pair
from engines import chain_config, engine, generate, params
from sampling_checks import (
    SEEDED,
    check,
    prompts_of,
    sampling_pair,
)
from tiny_tokenizer import END_THINK, THINK

from vllm_dflash import patches

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def pair(spoken_target, tiny_draft):
    with sampling_pair(spoken_target, tiny_draft) as pair:
        yield pair


@pytest.fixture(scope="module")
def tokenizer(pair):
    return pair.plain.get_tokenizer()


TREE_OPTIONS = {
    "temperature": [dict(temperature=t, seed=1) for t in (0.0, 0.3, 1.0, 1.7)],
    "top_k": [dict(SEEDED, top_k=k) for k in (1, 2, 20, 600)],
    "top_p": [dict(SEEDED, top_p=p) for p in (0.1, 0.5, 0.9)],
    "min_p": [dict(SEEDED, min_p=p) for p in (0.02, 0.2, 0.9)],
    "seed": [dict(SEEDED, seed=s) for s in (0, 1, 2**40)],
    "logit_bias": [
        dict(SEEDED, logit_bias={17: 6.0, 18: 5.5, 19: -100.0}),
        dict(temperature=0.0, logit_bias={40: 8.0, 41: 8.0}),
    ],
    "allowed_token_ids": [
        dict(SEEDED, allowed_token_ids=list(range(30, 45))),
        dict(temperature=0.0, allowed_token_ids=[50, 51, 52]),
    ],
    "ignore_eos": [dict(SEEDED, allowed_token_ids=[2, 30, 31], ignore_eos=True)] * 2,
    "max_tokens": [dict(SEEDED, max_tokens=n) for n in (1, 2, 7, 23)],
}


@pytest.mark.parametrize("option", TREE_OPTIONS)
def test_option_of_a_row(pair, option):
    check(pair, [params(**kwargs) for kwargs in TREE_OPTIONS[option]])


def test_everything_of_a_row_at_once(pair):
    options = dict(temperature=0.9, top_k=40, top_p=0.95, min_p=0.01, min_tokens=9)
    options |= dict(logit_bias={2: 3.0, 30: 2.0}, ignore_eos=False)
    check(pair, [params(40, seed=seed, **options) for seed in range(6)])


class TestStops:
    """The accepted path is cut where the run without speculation would have ended."""

    def lengths(self, comparison) -> set[int]:
        return {len(output.outputs[0].token_ids) for output in comparison.got}

    def test_eos_inside_a_path(self, pair):
        options = dict(SEEDED, allowed_token_ids=[2, *range(30, 42)], ignore_eos=False)
        comparison = check(pair, [params(**{**options, "seed": s}) for s in range(8)])
        assert any(o.outputs[0].finish_reason == "stop" for o in comparison.got)
        assert len(self.lengths(comparison)) > 3

    def test_min_tokens_holds_eos_and_stop_tokens_back(self, pair):
        options = dict(SEEDED, allowed_token_ids=[2, 30, 31, 32], ignore_eos=False)
        comparison = check(
            pair,
            [
                params(**{**options, "seed": s}, min_tokens=m, stop_token_ids=[31])
                for s, m in enumerate((1, 5, 9, 13))
            ],
        )
        for output, least in zip(comparison.got, (1, 5, 9, 13), strict=True):
            tokens = output.outputs[0].token_ids
            assert least <= len(tokens) < 32
            assert not {2, 31} & set(tokens[:-1][:least])

    def test_stop_token_ids(self, pair):
        options = dict(SEEDED, allowed_token_ids=list(range(30, 45)))
        comparison = check(
            pair,
            [
                params(**{**options, "seed": s}, stop_token_ids=[30 + s, 44])
                for s in range(6)
            ],
        )
        reasons = {output.outputs[0].stop_reason for output in comparison.got}
        assert len(reasons) > 2

    @pytest.mark.parametrize("include", [False, True])
    def test_stop_strings(self, pair, tokenizer, include):
        """Strings from the middle of a token to the middle of another."""
        prompts = prompts_of(6)
        free = [params(**SEEDED, detokenize=True) for _ in prompts]
        texts = [o.outputs[0].text for o in generate(pair.plain, prompts, free)]
        options = [
            params(
                **SEEDED,
                detokenize=True,
                stop=[text[place : place + 3], "never said"],
                include_stop_str_in_output=include,
            )
            for text, place in zip(texts, range(5, 29, 4), strict=True)
        ]
        comparison = check(pair, options)
        for output, option in zip(comparison.got, options, strict=True):
            completion = output.outputs[0]
            assert completion.stop_reason == option.stop[0]
            assert completion.text.endswith(option.stop[0]) == include

    def test_stop_string_after_min_tokens(self, pair):
        options = dict(SEEDED, allowed_token_ids=list(range(40, 48)), detokenize=True)
        check(pair, [params(**options, stop=["A"], min_tokens=m) for m in (0, 6, 12)])

    def test_repetition_detection(self, pair):
        from vllm.sampling_params import RepetitionDetectionParams

        detection = RepetitionDetectionParams(
            max_pattern_size=3, min_pattern_size=1, min_count=3
        )
        options = dict(SEEDED, allowed_token_ids=[30, 31, 32])
        comparison = check(
            pair,
            [
                params(**{**options, "seed": s}, repetition_detection=detection)
                for s in range(6)
            ],
        )
        assert min(self.lengths(comparison)) < 32

    def test_stopped_requests_report_what_they_used(self, pair):
        """Usage counts leave out what the path held past the stop."""
        options = dict(SEEDED, allowed_token_ids=[2, *range(30, 36)], ignore_eos=False)
        comparison = check(pair, [params(**{**options, "seed": s}) for s in range(8)])
        for ours, theirs in zip(comparison.got, comparison.expected, strict=True):
            assert ours.prompt_token_ids == theirs.prompt_token_ids
            assert ours.finished
            assert ours.metrics.num_generation_tokens == len(ours.outputs[0].token_ids)
            assert theirs.metrics.num_generation_tokens == (
                ours.metrics.num_generation_tokens
            )


def test_samples_of_one_prompt(pair):
    options = [params(**SEEDED, n=3), params(temperature=0.7, seed=8, top_k=9, n=2)]
    comparison = check(pair, options)
    first, second, third = comparison.got_tokens[0]
    assert first != second != third


def test_beam_search(pair):
    from vllm.sampling_params import BeamSearchParams

    beams = BeamSearchParams(beam_width=3, max_tokens=6)
    prompts = [{"prompt_token_ids": prompt} for prompt in prompts_of(2)]
    ours, theirs = (
        [
            [list(sequence.tokens) for sequence in output.sequences]
            for output in llm.beam_search(prompts, beams)
        ]
        for llm in (pair.tree, pair.plain)
    )
    assert ours == theirs


CHAIN_OPTIONS = {
    "repetition_penalty": [dict(SEEDED, repetition_penalty=r) for r in (0.7, 1.3, 1.9)],
    "frequency_penalty": [dict(SEEDED, frequency_penalty=f) for f in (-0.5, 0.8, 2.0)],
    "presence_penalty": [dict(SEEDED, presence_penalty=p) for p in (-1.0, 0.8, 2.0)],
    "all penalties": [
        dict(
            temperature=0.8,
            seed=s,
            top_p=0.9,
            repetition_penalty=1.2,
            frequency_penalty=0.4,
            presence_penalty=0.4,
        )
        for s in range(4)
    ],
}


@pytest.mark.parametrize("option", CHAIN_OPTIONS)
def test_penalties(pair, option):
    # Few tokens, so that they repeat within a block.
    allowed = dict(allowed_token_ids=list(range(30, 60)))
    options = [params(40, **kwargs, **allowed) for kwargs in CHAIN_OPTIONS[option]]
    check(pair, options, chain=True)


def test_bad_words(pair, tokenizer):
    """Words of one and of several tokens, which the free run would have said."""
    prompts = prompts_of(4)
    allowed = dict(SEEDED, allowed_token_ids=list(range(40, 56)))
    free = generate(pair.plain, prompts, [params(**allowed) for _ in prompts])
    options = []
    for output, length in zip(free, (1, 2, 3, 2), strict=True):
        tokens = output.outputs[0].token_ids
        words = [tokenizer.decode(tokens[i : i + length]) for i in (4, 9)]
        options.append(params(**allowed, bad_words=words))
    comparison = check(pair, options, chain=True)
    assert comparison.got_tokens != [[list(o.outputs[0].token_ids)] for o in free]
    for output, option in zip(comparison.got, options, strict=True):
        text = tokenizer.decode(output.outputs[0].token_ids)
        assert not any(word in text for word in option.bad_words)


def test_thinking_token_budget(pair, tokenizer):
    start, end = tokenizer.convert_tokens_to_ids([THINK, END_THINK])
    prompts = [[*prompt, start] for prompt in prompts_of(4)]
    budgets = (0, 3, 7, 12)
    options = [params(**SEEDED, thinking_token_budget=b) for b in budgets]
    comparison = pair.compare(prompts, options)
    comparison.assert_equal()
    assert pair.verified_chains
    for output, budget in zip(comparison.got, budgets, strict=True):
        assert output.outputs[0].token_ids.index(end) <= budget


LOGPROBS = [
    dict(SEEDED, logprobs=0),
    dict(SEEDED, logprobs=3, top_k=5),
    dict(temperature=0.0, logprobs=5, prompt_logprobs=2),
    dict(temperature=1.5, seed=2, logprobs=1, logit_bias={30: 5.0}),
    dict(SEEDED, logprob_token_ids=[5, 77, 500]),
    dict(SEEDED, logprobs=2, repetition_penalty=1.3),
    dict(SEEDED, logprobs=10, allowed_token_ids=[2, 30, 31, 32], ignore_eos=False),
    dict(SEEDED),
]
TOLERANCE = 2e-3


def assert_same_logprobs(ours, theirs) -> None:
    assert (ours is None) == (theirs is None)
    for a, b in zip(ours or (), theirs or (), strict=True):
        assert (a is None) == (b is None)
        if a is None:
            continue
        assert a.keys() == b.keys()
        for token, entry in b.items():
            assert a[token].logprob == pytest.approx(
                entry.logprob, rel=TOLERANCE, abs=TOLERANCE
            )
            assert a[token].rank == entry.rank


def check_logprobs(pair, options) -> None:
    comparison = pair.compare(prompts_of(len(options)), options)
    comparison.assert_equal()
    assert pair.verified_trees
    for ours, theirs in zip(comparison.got, comparison.expected, strict=True):
        assert_same_logprobs(ours.prompt_logprobs, theirs.prompt_logprobs)
        a, b = ours.outputs[0], theirs.outputs[0]
        assert_same_logprobs(a.logprobs, b.logprobs)
        if b.cumulative_logprob is not None:
            assert a.cumulative_logprob == pytest.approx(
                b.cumulative_logprob, rel=TOLERANCE, abs=TOLERANCE
            )


def test_raw_logprobs(pair):
    check_logprobs(pair, [params(**kwargs) for kwargs in LOGPROBS])


def test_front_end_refuses_what_it_refused(pair):
    """The refusal of two options is lifted, not the checks beside it."""
    from vllm.exceptions import VLLMValidationError

    for wrong in (
        params(logit_bias={9999: 1.0}),
        params(allowed_token_ids=[]),
        params(logprobs=11),
        params(trace_decode_token_ids=[1]),
    ):
        with pytest.raises((ValueError, VLLMValidationError)):
            generate(pair.tree, prompts_of(1), wrong)


def test_chains_of_vllm_still_refuse_min_p_and_logit_bias(
    tiny_target, tiny_draft, pair
):
    """Also beside an engine with trees in the same process."""
    from vllm.exceptions import VLLMValidationError

    assert patches.is_applied("input_processor")
    with engine(tiny_target, chain_config(tiny_draft)) as llm:
        for refused in (dict(min_p=0.1), dict(logit_bias={7: 1.0})):
            with pytest.raises(VLLMValidationError, match="min_p and logit_bias"):
                generate(llm, prompts_of(1), params(**SEEDED, **refused))


def test_custom_logits_processor(tiny_target, tiny_draft):
    """Its requests verify chains, those that it declines verify trees."""
    few = dict(SEEDED, allowed_token_ids=list(range(30, 38)))
    used = [params(**few, extra_args={OPTION: n}) for n in (1, 3, 5)]
    with engine_pair(
        tiny_target, tiny_draft, logits_processors=[NoEcho], max_num_seqs=8
    ) as pair:
        comparison = check(pair, used, chain=True)
        for output, window in zip(comparison.got, (1, 3, 5), strict=True):
            tokens = output.outputs[0].token_ids
            for i in range(window, len(tokens)):
                assert tokens[i] not in tokens[i - window : i]
        check(pair, [params(**SEEDED), params(**few)])
        mixed = pair.compare(prompts_of(6), [*used, params(), *used[:1], params(**few)])
        mixed.assert_equal()
        assert pair.rig.num_branching_paths > 0


@pytest.mark.parametrize(
    "mode", ["processed_logprobs", "raw_logits", "processed_logits"]
)
def test_other_logprobs_modes(tiny_target, tiny_draft, mode):
    with engine_pair(
        tiny_target, tiny_draft, logprobs_mode=mode, max_num_seqs=8
    ) as pair:
        check_logprobs(pair, [params(**kwargs) for kwargs in LOGPROBS])
