# SPDX-License-Identifier: Apache-2.0
"""Top candidates of every draft row with their log-probabilities, in one pass."""

from __future__ import annotations

import torch

from ..dispatch import Impl, use_triton
from .reference import topk_logprobs_reference
from .workspace import topk_workspace

__all__ = ["topk_logprobs", "topk_workspace"]


def topk_logprobs(
    # [num_rows, vocab_size], bf16 / fp16 / fp32, columns contiguous, any row stride
    logits: torch.Tensor,
    num_candidates: int,
    *,
    # [max_num_reqs], fp32; 0 = greedy, scored unscaled
    temperature: torch.Tensor | None = None,
    # [>= num_rows], int64, -1 = inert row, scored unscaled
    row_to_slot: torch.Tensor | None = None,
    # Whether the log-probabilities are those at the temperature
    is_scaled: bool = True,
    # [max_num_reqs], fp32, T of the noise; 0 = without; None = the temperature
    noise_temperature: torch.Tensor | None = None,
    # [max_num_reqs], int64; None = candidates by the logits alone
    seed: torch.Tensor | None = None,
    # [>= num_rows], int64, of the token before the one that the row is about
    position: torch.Tensor | None = None,
    # [num_rows, num_candidates], int32, contiguous
    out_tokens: torch.Tensor | None = None,
    # [num_rows, num_candidates], fp32, contiguous
    out_logprobs: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    impl: Impl = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the largest logits of each row as (token ids, log-probabilities).

    Log-probabilities are natural, over the whole vocabulary, computed in fp32 from
    ``logits / T`` with ``T = temperature[row_to_slot[row]]``. Candidates descend by
    the logit itself (T > 0 does not change the order), ties go to the lower token id.

    With ``seed`` and ``position`` the noise of the target's draw is taken into account,
    which is known beforehand (noise_reference.py): a logit becomes ``logit + T *
    noise`` wherever T > 0, so that the best candidate is what would be drawn from the
    draft's own distribution. The log-probabilities are those of these sums: how likely
    the target, whose logits differ from the draft's, draws the candidate too.

    NaN, -inf and anything at or below -3e38 count as probability zero: log-probability
    -inf. A row without any other logit gives -inf everywhere, and so does a candidate
    past the vocabulary (``num_candidates > vocab_size``: token 0). +inf counts as the
    largest finite number.

    With ``out_tokens``, ``out_logprobs`` and ``workspace`` (see ``topk_workspace``)
    nothing is allocated. The host never waits.

    Args:
        num_candidates: 1 to 32.
        temperature: Read only together with ``row_to_slot``.
        seed: Needs ``position``, a temperature and ``row_to_slot``.
    """
    num_rows = logits.shape[0]
    if not 1 <= num_candidates <= 32:
        raise ValueError(f"num_candidates must be in [1, 32] (got {num_candidates}).")
    if out_tokens is None:
        out_tokens = torch.empty(
            num_rows, num_candidates, dtype=torch.int32, device=logits.device
        )
    if out_logprobs is None:
        out_logprobs = torch.empty(
            num_rows, num_candidates, dtype=torch.float32, device=logits.device
        )
    if row_to_slot is None:
        temperature = None
    if temperature is None:
        is_scaled = False
    if noise_temperature is None:
        noise_temperature = temperature
    if seed is not None and (
        position is None or noise_temperature is None or row_to_slot is None
    ):
        raise ValueError(
            "The noise of a draw needs seed, position, a temperature and row_to_slot "
            "(got only some of them)."
        )
    inputs = (
        logits,
        num_candidates,
        temperature,
        row_to_slot,
        is_scaled,
        noise_temperature,
        seed,
        position,
    )
    if use_triton(impl, logits):
        from .kernel import topk_logprobs as launch

        launch(*inputs, out_tokens, out_logprobs, workspace)
    else:
        tokens, logprobs = topk_logprobs_reference(*inputs)
        out_tokens.copy_(tokens)
        out_logprobs.copy_(logprobs)
    return out_tokens, out_logprobs
