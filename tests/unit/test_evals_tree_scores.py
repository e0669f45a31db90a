# SPDX-License-Identifier: Apache-2.0
"""Walks with rescaled scores: the candidates, and what they are compared with."""

import dataclasses

import numpy as np
import pytest
import torch
from evals_modules import import_evals
from tiny_models import write_draft, write_target
from training_runs import load_target, random_rows, tiny_config, trainer

from vllm_dflash_training.config import EvaluationOptions
from vllm_dflash_training.data import Responses


@pytest.fixture(scope="module")
def scores():
    return import_evals(scores="tree_scores").scores


@pytest.fixture(scope="module")
def recorded(scores, tmp_path_factory):
    """Recorded candidates, responses, options, and what `evaluate` found."""
    target = load_target(write_target(tmp_path_factory.mktemp("target")))
    draft = write_draft(tmp_path_factory.mktemp("draft"))
    config = tiny_config(tmp_path_factory.mktemp("run"), draft)
    made = trainer(config, target, random_rows(4))
    training = dataclasses.replace(config.training, sequences_per_batch=1)
    forward = scores.RecordingForward(target, made.draft, training)
    rows = random_rows(5, seed=9)
    # Some right tokens, which a draft without training hardly has: its own.
    responses = Responses(rows)
    options = EvaluationOptions(budget=12, max_children=4)
    scores.record(forward, responses, options)
    # The first that is met, and the token after its first anchor.
    met = int(np.argmin(responses.lens))
    first = int(responses.starts[met] + responses.prompt_lens[met]) + 1
    best = forward.tokens[0][0]
    responses.tokens[first : first + 2] = [int(best[0, 0]), int(best[1, 1])]
    fresh = scores.RecordingForward(target, made.draft, training)
    anchors, expected = scores.record(fresh, responses, options)
    return anchors, responses, options, expected


def test_plain_scores_walk_as_evaluate_does(scores, recorded):
    anchors, responses, options, expected = recorded
    name, rescale, count = next(scores.cases(options.max_children))
    found = scores.tokens_a_round(anchors, rescale, options.budget, count)
    assert found == pytest.approx(expected, abs=1e-4)
    assert found > 1 and name == "log-probabilities, as they are"
    # A response of n tokens has n - 1 anchors.
    assert sum(len(one.ranks) for one in anchors) == (
        responses.num_response_tokens - len(responses)
    )


def test_ranks_are_those_of_the_right_tokens(recorded):
    anchors = recorded[0]
    assert anchors[0].ranks[0, :2].tolist() == [0, 1]
    # Nothing is right after the end.
    assert (anchors[0].ranks[-1, 1:] == -1).all()


def test_temperatures_are_of_the_whole_distribution(scores, recorded):
    one = recorded[0][0]
    plain = torch.from_numpy(one.logprobs[1.0]).double()
    for temperature in scores.TEMPERATURES:
        warm = torch.from_numpy(one.logprobs[temperature]).double()
        # The differences of two candidates are divided, their sum stays below one.
        expected = (plain - plain[..., :1]) / temperature
        torch.testing.assert_close(warm - warm[..., :1], expected, atol=1e-5, rtol=1e-5)
        assert (warm.exp().sum(-1) < 1).all()


def test_fewer_candidates_never_find_more(scores, recorded):
    anchors, _, options, _ = recorded
    names = [name for name, *_ in scores.cases(options.max_children)]
    assert len(set(names)) == len(names)
    plain = lambda one: one.logprobs[1.0]  # noqa: E731
    # With room for every node, more candidates are more right ones.
    found = [scores.tokens_a_round(anchors, plain, 4000, n) for n in (1, 2, 4)]
    assert found == sorted(found) and found[2] > found[0]
