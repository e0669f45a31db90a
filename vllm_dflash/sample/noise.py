# SPDX-License-Identifier: Apache-2.0
"""Which draws a draft may bet on by their noise."""

from vllm.sampling_params import SamplingParams

# The smallest top-p with which knowing the noise was seen to gain (docs/sampling.md).
SMALLEST_TOP_P = 0.9


def noise_temperature(params: SamplingParams | None) -> float:
    """Temperature of the draws whose noise the draft's candidates are ranked with.

    0 where they are ranked without it: greedy requests, and those with filters that
    leave few tokens. The filters are the target's; among all tokens the draft would
    find many with much noise that they drop.
    """
    if params is None:
        return 0.0
    is_filtered = (
        params.top_k > 0 or params.top_p < SMALLEST_TOP_P or params.min_p > 0.0
    )
    return 0.0 if is_filtered else params.temperature
