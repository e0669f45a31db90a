# SPDX-License-Identifier: Apache-2.0
"""What the draft model proposed at every context, in chain and tree engines alike."""

from dataclasses import dataclass
from typing import Any

import torch
from engines import model_runner

# Prompt and output tokens that were committed when the draft was made.
Context = tuple[int, ...]


@dataclass
class DraftRecord:
    """One draft of one request, from the model and as a tree was built of it."""

    # [depth, vocab_size], the draft model's logits over the target's vocabulary
    logits: torch.Tensor
    # [depth, C], the builder's candidates of these logits; None in a chain engine
    cand_tokens: torch.Tensor | None = None
    cand_logprobs: torch.Tensor | None = None
    # [depth, C], what the tree was built from: candidates of a rig, if there is one
    built_tokens: torch.Tensor | None = None
    built_logprobs: torch.Tensor | None = None


def record_drafts(llm: Any) -> dict[Context, DraftRecord]:
    """Record the drafts of a running engine.

    A draft depends on its context alone, so two engines that generate the same tokens
    must draft the same at every context that both of them have drafted from.
    """
    records: dict[Context, DraftRecord] = {}
    runner = model_runner(llm)
    speculator, states = runner.speculator, runner.req_states
    builder = getattr(speculator, "builder", None)
    depth = speculator.num_speculative_steps
    propose, compute_logits = speculator.propose, speculator.compute_draft_logits
    last: dict[str, torch.Tensor] = {}

    def recording_logits(hidden_states, *args, **kwargs):
        logits = compute_logits(hidden_states, *args, **kwargs)
        last["logits"] = logits.clone()
        return logits

    def recording_collect(*args, **kwargs):
        best = collect(*args, **kwargs)
        last["tokens"] = builder.cand_tokens.clone()
        last["logprobs"] = builder.cand_logprobs.clone()
        return best

    def recording_propose(input_batch, *args, dummy_run=False, **kwargs):
        drafts = propose(input_batch, *args, dummy_run=dummy_run, **kwargs)
        if dummy_run:
            return drafts
        for req, slot in enumerate(input_batch.idx_mapping.tolist()):
            length = int(states.total_len.gpu[slot])
            if length == states.prompt_len.np[slot]:
                # Drafted from a part of the prompt, and thrown away.
                continue
            context = tuple(states.all_token_ids.gpu[slot, :length].tolist())
            rows = slice(req * depth, (req + 1) * depth)
            record = records[context] = DraftRecord(last["logits"][rows])
            if builder is not None:
                record.cand_tokens = last["tokens"][rows]
                record.cand_logprobs = last["logprobs"][rows]
                record.built_tokens = builder.cand_tokens[rows].clone()
                record.built_logprobs = builder.cand_logprobs[rows].clone()
        return drafts

    if builder is not None:
        collect = builder.collect_candidates
        builder.collect_candidates = recording_collect
    speculator.compute_draft_logits = recording_logits
    speculator.propose = recording_propose
    return records
