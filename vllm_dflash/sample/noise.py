# SPDX-License-Identifier: Apache-2.0
"""How much of the noise of its draws a request's draft bets on."""

from vllm.sampling_params import SamplingParams

# The most where top-k or min-p leave out tokens.
FILTERED_WEIGHT = 0.65


def noise_temperature(params: SamplingParams | None) -> float:
    """Factor of the noise in the sums that the draft's candidates are ranked by.

    The temperature of the draws, less with filters: the draft does not see what they
    leave out, and finds some of it where there is much noise. With a top-p of one half
    nearly every draw is the likeliest token, and no noise is the best. The line between
    that and all of it, and the bound for other filters, follow what
    `evals/noise_weights.py` measured (docs/sampling.md). 0, ranked without noise, is
    also for requests that don't draw or have one token to draw from.
    """
    if params is None or params.top_k == 1:
        return 0.0
    weight = max(0.0, 2.0 * params.top_p - 1.0)
    if params.top_k > 0 or params.min_p > 0.0:
        weight = min(weight, FILTERED_WEIGHT)
    return params.temperature * weight
