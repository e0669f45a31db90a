# SPDX-License-Identifier: Apache-2.0
"""Custom logits processors beside trees: their requests are verified as chains.

A processor finds a row's drafts in the rows before it, as vLLM documents. Only the
processor knows which requests it works on; it says so when it is told of a new one.
"""

import copy
from collections.abc import Callable

import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu.sample.bad_words import BadWordsState
from vllm.v1.worker.gpu.sample.logit_bias import LogitBiasState
from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext, LogitsProcessor
from vllm.v1.worker.gpu.sample.penalties import PenaltiesState
from vllm.v1.worker.gpu.sample.sampler import Sampler

_VLLMS_OWN = (BadWordsState, LogitBiasState, PenaltiesState)


class HistoryReader(LogitsProcessor):
    """A custom logits processor that passes on which requests need a chain."""

    def __init__(
        self, processor: LogitsProcessor, require_chain: Callable[[int], None]
    ):
        self.processor = processor
        self.require_chain = require_chain

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        works_on_it = self.processor.add_request(req_idx, sampling_params)
        if works_on_it:
            self.require_chain(req_idx)
        return works_on_it

    def apply_staged_writes(self) -> None:
        self.processor.apply_staged_writes()

    def apply(
        self,
        # [num_logits, vocab_size], fp32, possibly in place
        logits: torch.Tensor,
        ctx: LogitsContext,
    ) -> torch.Tensor:
        return self.processor.apply(logits, ctx)


def watch_custom_processors(
    sampler: Sampler, require_chain: Callable[[int], None]
) -> Sampler:
    """Return the sampler with a :class:`HistoryReader` around each custom processor.

    ``require_chain`` is called with the slot of a request after the slot was reset.
    """
    if all(isinstance(p, _VLLMS_OWN) for p in sampler.logits_processors):
        return sampler
    watched = copy.copy(sampler)
    watched.logits_processors = [
        p if isinstance(p, _VLLMS_OWN) else HistoryReader(p, require_chain)
        for p in sampler.logits_processors
    ]
    return watched
