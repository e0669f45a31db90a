# SPDX-License-Identifier: Apache-2.0
"""Which requests' drafts know the noise of the draws."""

import pytest
from vllm import SamplingParams

from vllm_dflash.sample.noise import noise_temperature


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 0.7),
        ({"temperature": 0}, 0.0),
        ({"top_k": -1, "top_p": 1.0}, 0.7),
        ({"top_p": 0.9}, 0.7),
        ({"top_p": 0.89}, 0.0),
        ({"top_k": 20}, 0.0),
        ({"top_k": 20, "top_p": 0.8}, 0.0),
        ({"min_p": 0.05}, 0.0),
        ({"logprobs": 3, "seed": 1}, 0.7),
    ],
)
def test_filters_that_leave_few_tokens_need_no_noise(options, expected):
    assert noise_temperature(SamplingParams(**{"temperature": 0.7, **options})) == (
        expected
    )


def test_requests_that_draw_nothing():
    assert noise_temperature(None) == 0.0
