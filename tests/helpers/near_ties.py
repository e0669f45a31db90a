# SPDX-License-Identifier: Apache-2.0
"""Whether two tokens were as good as tied where an answer left the right one.

In fp32 two kernels agree to the last few bits. Where two tokens' scores, the processed
logits plus the noise of the draw, are closer than that, either is right.
"""

from typing import Any

from soak_requests import SoakRequest

from vllm_dflash.cpu.gumbel import gumbel_noise

# Of scores around 10: a few roundings of the logits.
TOLERANCE = 2e-5
# Options of the engine that is asked.
ENGINE = dict(max_logprobs=-1, logprobs_mode="processed_logits")


def score_gap(
    llm: Any, request: SoakRequest, sample: int, position: int, token: int
) -> float:
    """How much better than `token` the right token's score is.

    Args:
        llm: An engine without speculation, started with `ENGINE`.
        request: Whose answer left the right one.
        sample: Of the request, if it has several.
        position: Of the first token that differs, in the answer.
        token: The token that was said there.

    Returns:
        The difference; infinite if `token` was not allowed there.
    """
    params = request.params("final")
    params.logprobs = -1
    (output,) = llm.generate(
        [{"prompt_token_ids": request.prompt}], [params], use_tqdm=False
    )
    right = output.outputs[sample]
    entry = right.logprobs[position]
    if token not in entry:
        return float("inf")
    scores = {t: entry[t].logprob for t in (right.token_ids[position], token)}
    if params.temperature:
        seed = request.options["seed"] + sample
        place = len(request.prompt) + position - 1
        noise = gumbel_noise(seed, place, max(entry) + 1, use_fp64=False)
        scores = {t: value + float(noise[t]) for t, value in scores.items()}
    return scores[right.token_ids[position]] - scores[token]
