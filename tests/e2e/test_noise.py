# SPDX-License-Identifier: Apache-2.0
"""Drafts that know the noise of the draws: what a perfect draft drafts is drawn."""

import pytest
import torch
from engines import (
    acceptance_counts,
    engine,
    generate,
    model_runner,
    params,
    random_prompts,
    token_ids,
    tree_config,
)
from evals_modules import import_evals
from training_runs import load_target

from vllm_dflash.sample.noise import FILTERED_WEIGHT

pytestmark = pytest.mark.e2e

VOCAB_SIZE = 512
NUM_TOKENS = 24
TEMPERATURES = (1.0, 0.6, 1.7, 0.0)


class PerfectDraft:
    """Gives the draft the target's own logits along the answers that will be given."""

    def __init__(self, llm, logits):
        runner = model_runner(llm)
        self.speculator, self.states = runner.speculator, runner.req_states
        # Prompt -> [num_tokens, vocab_size]
        self.logits = logits
        self.compute = self.speculator.compute_draft_logits
        self.speculator.compute_draft_logits = self

    def __call__(self, hidden_states, *args, **kwargs):
        logits = self.compute(hidden_states, *args, **kwargs)
        depth = self.speculator.num_speculative_steps
        slots = self.speculator.sample_idx_mapping[: len(logits)].tolist()
        for row, slot in enumerate(slots):
            if slot < 0:
                continue
            length = int(self.states.total_len.gpu[slot])
            prompt_len = int(self.states.prompt_len.np[slot])
            prompt = self.states.all_token_ids.gpu[slot, :prompt_len].tolist()
            known = self.logits.get(tuple(prompt))
            place = length - prompt_len + row % depth
            if known is not None and 0 <= place < len(known):
                logits[row] = known[place].to(logits)
        return logits


def raw_logits(output) -> torch.Tensor:
    rows = torch.full((len(output.outputs[0].logprobs), VOCAB_SIZE), -torch.inf)
    for row, found in zip(rows, output.outputs[0].logprobs, strict=True):
        for token, entry in found.items():
            row[token] = entry.logprob
    return rows


@pytest.fixture(scope="module")
def answers(tiny_target):
    prompts = random_prompts((20, 35, 11, 27), seed=6)
    options = [
        params(NUM_TOKENS, temperature=t, seed=100 + i, logprobs=VOCAB_SIZE)
        for i, t in enumerate(TEMPERATURES)
    ]
    with engine(tiny_target, max_logprobs=VOCAB_SIZE) as llm:
        outputs = generate(llm, prompts, options)
    logits = {
        tuple(prompt): raw_logits(output)
        for prompt, output in zip(prompts, outputs, strict=True)
    }
    return prompts, token_ids(outputs), logits


@pytest.mark.parametrize("use_noise", [True, False])
def test_a_perfect_draft_is_accepted_to_the_end(
    tiny_target, tiny_draft, answers, use_noise
):
    prompts, expected, logits = answers
    # One candidate a depth: the draft's best token is right or it is not.
    config = tree_config(tiny_draft, use_noise=use_noise, max_children=1)
    for place, temperature in enumerate(TEMPERATURES):
        options = params(NUM_TOKENS, temperature=temperature, seed=100 + place)
        with engine(tiny_target, config) as llm:
            PerfectDraft(llm, logits)
            output = generate(llm, [prompts[place]], [options])
            rounds, accepted = acceptance_counts(llm)
        assert token_ids(output) == [expected[place]]
        tokens_a_round = 1 + accepted / rounds
        depth = 7
        # The first token comes from the prompt, and the last round is cut off.
        everything = (NUM_TOKENS - 1) / -(-(NUM_TOKENS - 1) // (depth + 1))
        if use_noise or temperature == 0:
            assert tokens_a_round >= everything
        else:
            assert tokens_a_round < 0.8 * everything


def test_a_slot_knows_the_noise_of_its_request_only(tiny_target, tiny_draft, answers):
    """Filters of the last two leave out tokens; the draft does not know which."""
    prompts = answers[0]
    options = [
        params(NUM_TOKENS, temperature=t, seed=i, **filters)
        for i, (t, filters) in enumerate(
            [
                (0.0, {}),
                (0.6, {}),
                (0.8, {"top_k": 9}),
                (1.0, {"top_p": 0.8}),
            ]
        )
    ]
    with engine(tiny_target) as llm:
        expected = token_ids(generate(llm, prompts, options))
    with engine(tiny_target, tree_config(tiny_draft), max_num_seqs=4) as llm:
        assert token_ids(generate(llm, prompts, options)) == expected
        runner = model_runner(llm)
        known = runner.speculator.runtime.trees.noise_temperature.tolist()
        drawn = runner.sampler.sampling_states.temperature.gpu.tolist()
    # By slot: the temperatures tell the requests apart.
    weights = {0.0: 0.0, 0.6: 1.0, 0.8: FILTERED_WEIGHT, 1.0: 0.6}
    slots = {round(t, 3): factor for t, factor in zip(drawn, known, strict=True)}
    assert slots == pytest.approx({t: t * weight for t, weight in weights.items()})


def test_the_experiment_draws_what_the_engine_draws(tiny_target):
    """`evals/noise_weights.py` measures on answers that vLLM would give."""
    answers = import_evals(answers="noise_answers").answers
    filters = {"temperature": 0.9, "top_k": 40, "top_p": 0.9, "min_p": 0.02}
    prompts = random_prompts((20, 35, 11), seed=8)
    options = [params(NUM_TOKENS, seed=seed, **filters) for seed in (1, 2, 3)]
    with engine(tiny_target) as llm:
        expected = token_ids(generate(llm, prompts, options))
    drawn = answers.draw_answers(
        load_target(tiny_target), prompts, answers.Sampling(**filters), NUM_TOKENS, []
    )
    assert drawn == expected
