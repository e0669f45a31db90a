# SPDX-License-Identifier: Apache-2.0
"""Which requests need a linear history, and why.

vLLM's processors for these options rebuild a row's history from the input ids of the
rows before it, which is the node's path only when the block is a chain. Such requests
verify their block as a chain, in the same batch as requests that verify trees.
"""

from vllm.sampling_params import SamplingParams


def linear_history_reason(params: SamplingParams | None) -> str | None:
    """Name of the first option that needs a chain, or None for a tree."""
    if params is None:
        return None
    if params.repetition_penalty != 1.0:
        return "repetition_penalty"
    if params.frequency_penalty != 0.0:
        return "frequency_penalty"
    if params.presence_penalty != 0.0:
        return "presence_penalty"
    if params.bad_words:
        return "bad_words"
    if params.structured_outputs is not None:
        return "structured_outputs"
    if getattr(params, "thinking_token_budget", None) is not None:
        return "thinking_token_budget"
    return None
