# SPDX-License-Identifier: Apache-2.0
"""Drawn answers, what a draft proposes along them, and trees that trust the noise."""

import dataclasses

import numpy as np
import pytest
import torch
from evals_modules import import_evals
from tiny_models import VOCAB_SIZE, write_draft, write_target
from training_runs import load_target, random_rows, tiny_config, trainer

from vllm_dflash_kernels.topk_logprobs import topk_logprobs
from vllm_dflash_kernels.topk_logprobs.noise_reference import draw_noise_reference
from vllm_dflash_training.config import EvaluationOptions

DEPTH = 7
WEIGHTS = (0.0, 0.6, 1.0)
OPTIONS = EvaluationOptions(budget=4, max_children=2)


@pytest.fixture(scope="module")
def evals():
    return import_evals(weights="noise_weights", answers="noise_answers")


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return load_target(write_target(tmp_path_factory.mktemp("target")))


@pytest.fixture(scope="module")
def recorder(evals, target, tmp_path_factory):
    """A draft without training, whose logits are kept beside what is recorded."""
    folder = tmp_path_factory.mktemp("draft")
    config = tiny_config(folder, write_draft(folder))
    made = trainer(config, target, random_rows(4))
    training = dataclasses.replace(config.training, sequences_per_batch=1)

    class Recorder(evals.answers.NoiseRecorder):
        seen: list[torch.Tensor] = []

        def logits(self, hidden):
            found = super().logits(hidden)
            self.seen.append(found)
            return found

    return Recorder(target, made.draft, training, weights=WEIGHTS, num_candidates=3)


@pytest.mark.parametrize(
    ("options", "left"),
    [
        ({}, [1, 1, 1, 1]),
        ({"top_k": 2}, [1, 1, 0, 0]),
        # 0.5, 0.3, 0.15, 0.05: the third is needed to come to 0.9.
        ({"top_p": 0.9}, [1, 1, 1, 0]),
        ({"min_p": 0.2}, [1, 1, 1, 0]),
        ({"top_k": 3, "top_p": 0.5}, [1, 0, 0, 0]),
    ],
)
def test_filters(evals, options, left):
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    found = evals.answers.filtered(logits, evals.answers.Sampling(1.0, **options))
    assert found.isfinite().int().tolist() == [left]
    assert torch.equal(found[found.isfinite()], logits[found.isfinite()])


def test_candidates_are_those_of_the_product(evals, target, recorder):
    """At every depth, with its noise: temperature is the weight times that of draws."""
    sampling = evals.answers.Sampling(0.9, top_k=30)
    prompts = [prompt for prompt, _ in random_rows(2)]
    answers = evals.answers.draw_answers(target, prompts, sampling, 12, ends=[2])
    for seed, prompt, answer in zip((1, 2), prompts, answers, strict=True):
        recorder.seen.clear()
        found = recorder.record(prompt, answer, seed, 0.9, OPTIONS)
        logits = torch.cat(recorder.seen)
        assert logits.shape == (len(answer) - 1, DEPTH, VOCAB_SIZE)
        places = torch.arange(len(answer) - 1)[:, None] + torch.arange(DEPTH)
        for weight in WEIGHTS:
            tokens, logprobs = topk_logprobs(
                logits.flatten(0, 1),
                3,
                row_to_slot=torch.zeros(places.numel(), dtype=torch.int64),
                is_scaled=False,
                noise_temperature=torch.tensor([weight * 0.9]),
                seed=torch.tensor([seed]),
                # The token before the drafted one.
                position=(len(prompt) + places).flatten(),
            )
            recorded = torch.from_numpy(found[weight].logprobs)
            expected = logprobs.view_as(recorded)
            torch.testing.assert_close(recorded, expected, atol=1e-5, rtol=1e-5)
            tokens = tokens.view(expected.shape)
            for anchor, depth in np.ndindex(*found[weight].ranks.shape):
                # Past the end of the answer nothing is right.
                right = (answer[anchor + 1 :] + [-1] * DEPTH)[depth]
                row = tokens[anchor, depth].tolist()
                rank = row.index(right) if right in row else -1
                assert found[weight].ranks[anchor, depth] == rank


def test_answers_are_what_the_noise_draws(evals, target):
    sampling = evals.answers.Sampling(0.9, top_k=30)
    prompts = [prompt for prompt, _ in random_rows(3)]
    answers = evals.answers.draw_answers(target, prompts, sampling, 12, ends=[2])
    ended = evals.answers.draw_answers(target, prompts, sampling, 12, [answers[1][3]])
    assert ended[1] == answers[1][: answers[1].index(answers[1][3]) + 1]
    for seed, prompt, answer in zip((1, 2, 3), prompts, answers, strict=True):
        tokens = torch.tensor([prompt + answer])
        logits = target.model(tokens).logits[0].float() / sampling.temperature
        logits = evals.answers.filtered(logits, sampling)
        places = torch.arange(len(prompt) - 1, len(prompt) + len(answer) - 1)
        seeds = torch.full_like(places, seed)
        noise = draw_noise_reference(seeds, places, VOCAB_SIZE)
        assert (logits[places] + noise).argmax(-1).tolist() == answer


def test_a_perfect_draft_is_accepted_to_the_end(evals):
    rows, right = 12, np.zeros((12, DEPTH), dtype=np.int64)
    logprobs = np.log(np.tile([0.9, 0.01], (rows, DEPTH, 1)))
    perfect = evals.answers.Candidates(logprobs, right)
    # A chain of the best candidates, and all of it accepted.
    assert evals.weights.tokens_a_round([perfect], DEPTH) == (rows / 2, 1 + DEPTH)
    wrong = evals.answers.Candidates(logprobs, right - 1)
    assert evals.weights.tokens_a_round([wrong], DEPTH) == (1, 1)


@pytest.mark.parametrize("given", [{"top_p": 0.9}, {"temperature": 1, "typical_p": 1}])
def test_options_that_have_no_meaning_are_named(evals, given):
    with pytest.raises(ValueError, match="Allowed are temperature, top_k, top_p"):
        evals.weights.parse_sampling(given)


def test_greedy_requests_draw_nothing(evals):
    with pytest.raises(ValueError, match="greedy requests draw nothing"):
        evals.weights.parse_sampling({"temperature": 0})
    sampling = evals.weights.parse_sampling({"temperature": 1, "top_k": 20})
    assert evals.weights.describe(sampling) == "temperature 1, top_k 20"
