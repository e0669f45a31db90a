# SPDX-License-Identifier: Apache-2.0
"""How much of the noise of its draws a draft bets on."""

import pytest
from vllm import SamplingParams

from vllm_dflash.sample.noise import FILTERED_WEIGHT, noise_temperature


@pytest.mark.parametrize(
    ("options", "weight"),
    [
        ({}, 1.0),
        ({"top_k": -1, "top_p": 1.0, "min_p": 0.0}, 1.0),
        ({"top_k": 0}, 1.0),
        ({"logprobs": 3, "seed": 1}, 1.0),
        # The narrower the nucleus, the less.
        ({"top_p": 0.99}, 0.98),
        ({"top_p": 0.9}, 0.8),
        ({"top_p": 0.6}, 0.2),
        ({"top_p": 0.5}, 0.0),
        ({"top_p": 0.1}, 0.0),
        ({"top_k": 20}, FILTERED_WEIGHT),
        ({"min_p": 0.05}, FILTERED_WEIGHT),
        ({"top_k": 20, "top_p": 0.95}, FILTERED_WEIGHT),
        ({"top_k": 20, "top_p": 0.8}, 0.6),
        # One token is left, whatever its noise.
        ({"top_k": 1}, 0.0),
    ],
)
def test_filters_make_the_noise_count_less(options, weight):
    params = SamplingParams(**{"temperature": 0.7, **options})
    assert noise_temperature(params) == pytest.approx(0.7 * weight)


def test_requests_that_draw_nothing():
    assert noise_temperature(None) == 0.0
    assert noise_temperature(SamplingParams(temperature=0)) == 0.0
