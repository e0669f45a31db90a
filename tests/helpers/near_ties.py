# SPDX-License-Identifier: Apache-2.0
"""Whether two tokens were as good as tied where an answer left the right one.

In fp32 two kernels agree to the last few bits. Where two tokens' scores, the processed
logits plus the noise of the draw, are closer than that, either is right.
"""

from dataclasses import dataclass
from typing import Any

from soak_requests import SoakRequest

from vllm_dflash.cpu.gumbel import gumbel_noise

# Of scores around 10: a few roundings of the logits.
TOLERANCE = 2e-5
# Options of the engine that is asked.
ENGINE = dict(max_logprobs=-1, logprobs_mode="processed_logits")


@dataclass(frozen=True)
class Departure:
    """Where an answer left the right one.

    Attributes:
        name: Of the request.
        sample: Of the request, if it has several.
        before: The tokens that both have.
        right: The right token after them.
        said: The token that was said instead.
    """

    name: str
    sample: int
    before: list[int]
    right: int
    said: int


def score_gap(llm: Any, request: SoakRequest, departure: Departure) -> float:
    """How much better than the token that was said the right one's score is.

    Args:
        llm: An engine without speculation, started with `ENGINE`.
        request: The one that was answered otherwise.
        departure: The place.

    Returns:
        The difference; infinite if one of the tokens was not allowed there, or if the
        engine does not even come to that place.
    """
    params = request.params("final")
    params.logprobs = -1
    (output,) = llm.generate(
        [{"prompt_token_ids": request.prompt}], [params], use_tqdm=False
    )
    answer, position = output.outputs[departure.sample], len(departure.before)
    if list(answer.token_ids[:position]) != departure.before:
        return float("inf")
    if len(answer.token_ids) == position:
        return float("inf")
    entry = answer.logprobs[position]
    tokens = (departure.right, departure.said)
    if any(token not in entry for token in tokens):
        return float("inf")
    right, said = (entry[token].logprob for token in tokens)
    if params.temperature:
        seed = request.options["seed"] + departure.sample
        place = len(request.prompt) + position - 1
        noise = gumbel_noise(seed, place, max(entry) + 1, use_fp64=False)
        right, said = (
            score + float(noise[token])
            for score, token in zip((right, said), tokens, strict=True)
        )
    return right - said
