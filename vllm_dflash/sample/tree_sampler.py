# SPDX-License-Identifier: Apache-2.0
"""Target logits + draft trees -> accepted paths and bonus tokens.

The target's token is drawn at every node with that node's own processed logits; the
walk then follows the drawn tokens down the tree, and the first one that matches no
child is the bonus token. Draws off the path are discarded, so the emitted tokens are
exact samples of the target at any temperature, without draft probabilities. The noise
is keyed by (seed, position, token) and a node's position is its depth position, so a
seeded request gets the tokens of a run without speculation.
"""

from typing import Any

import torch
from vllm.config import SpeculativeConfig
from vllm.config.model import PROCESSED_LOGPROBS_MODES
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.input_batch import InputBatch, get_num_sampled_and_rejected
from vllm.v1.worker.gpu.metrics.logits import get_num_nans
from vllm.v1.worker.gpu.sample import gumbel
from vllm.v1.worker.gpu.sample.logprob import compute_topk_scores
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import (
    RejectionSampler,
    _iter_request_chunks,
    get_max_chunk_logits,
)

from vllm_dflash.kv_cache.compaction import KVCompactor
from vllm_dflash.tree.verify_step import VerifyStep
from vllm_dflash_kernels.tree_walk import walk_tree


def _cut(tensor: torch.Tensor, first: int, last: int) -> torch.Tensor:
    """Return rows of a tensor. Most batches are one chunk, whose rows are all of them.

    A view is host time of every step.
    """
    return tensor if last - first == tensor.shape[0] else tensor[first:last]


class TreeRejectionSampler(RejectionSampler):
    """Draws at every node, walks the tree, and compacts the accepted KV.

    After the call the step looks like a chain step that accepted the path: KV entries
    of the path are contiguous, and ``num_sampled`` / ``num_rejected`` count rows.
    """

    def __init__(
        self,
        sampler: Sampler,
        spec_config: SpeculativeConfig,
        device: torch.device,
        step: VerifyStep,
        compactor: KVCompactor,
        # metrics.observer.RoundObserver, None: nobody counts
        observer: Any = None,
    ):
        super().__init__(sampler, spec_config, device)
        self.step = step
        self.compactor = compactor
        self.observer = observer

    def __call__(
        self,
        # [num_logits, vocab_size]
        logits: torch.Tensor,
        input_batch: InputBatch,
        draft_logits: torch.Tensor | None = None,
        # [num_logits], bool: drafts that a grammar forbids
        invalid_drafts: torch.Tensor | None = None,
    ) -> SamplerOutput:
        if self.observer is not None:
            self.observer.mark("target")
        num_nans = get_num_nans(logits) if self.sampler.compute_nans else None
        logprobs_dims = self.sampler.get_logprobs_dims(input_batch.idx_mapping_np)
        rows = input_batch.logits_indices
        positions = input_batch.positions.index_select(0, rows)
        node_tokens = input_batch.input_ids.index_select(0, rows)

        num_reqs = input_batch.num_reqs
        sampled = torch.empty(
            num_reqs, self.step.trees.width, dtype=torch.int64, device=logits.device
        )
        num_sampled = torch.empty(num_reqs, dtype=torch.int32, device=logits.device)
        logprobs: list[LogprobsTensors] = []
        max_rows = get_max_chunk_logits(logits.shape[1])
        for start, end in self._request_chunks(logits.shape[0], input_batch, max_rows):
            chunk = self._verify_chunk(
                logits,
                input_batch,
                positions,
                node_tokens,
                invalid_drafts,
                start,
                end,
                _cut(sampled, start, end),
                _cut(num_sampled, start, end),
                logprobs_dims,
            )
            if chunk is not None:
                logprobs.append(chunk)

        if self.observer is not None:
            self.observer.mark("sample")
        self.compactor.compact(
            self.step, input_batch.query_start_loc, num_sampled, num_reqs
        )
        if self.observer is not None:
            self.observer.mark("commit")
            self.observer.walked(
                input_batch, self.step, node_tokens, positions, sampled, num_sampled
            )
        num_sampled, num_rejected = get_num_sampled_and_rejected(
            num_sampled,
            input_batch.seq_lens,
            input_batch.cu_num_logits,
            input_batch.idx_mapping,
            self.sampler.req_states.prefill_len.gpu,
        )
        return SamplerOutput(
            sampled_token_ids=sampled,
            logprobs_tensors=self._join_logprobs(logprobs, num_reqs),
            num_nans=num_nans,
            num_sampled=num_sampled,
            num_rejected=num_rejected,
            sampling_mask_tensors=None,
        )

    @staticmethod
    def _request_chunks(num_logits: int, input_batch: InputBatch, max_rows: int):
        """Request ranges whose fp32 logits fit vLLM's memory cap."""
        if num_logits <= max_rows:
            return ((0, input_batch.num_reqs),)
        return _iter_request_chunks(input_batch.cu_num_logits_np, max_rows)

    def _verify_chunk(
        self,
        logits: torch.Tensor,
        input_batch: InputBatch,
        positions: torch.Tensor,
        node_tokens: torch.Tensor,
        invalid_drafts: torch.Tensor | None,
        start: int,
        end: int,
        # [end - start, W], int64, written
        sampled: torch.Tensor,
        # [end - start], int32, written
        num_sampled: torch.Tensor,
        # (top logprobs, logprob_token_ids of a request), None: nobody wants logprobs
        logprobs_dims: tuple[int, int] | None,
    ) -> LogprobsTensors | None:
        """Sample and walk requests ``start`` to ``end``; their logprobs if asked."""
        lo, hi = (int(input_batch.cu_num_logits_np[i]) for i in (start, end))
        slots = _cut(input_batch.idx_mapping, start, end)
        row_slots = _cut(input_batch.expanded_idx_mapping, lo, hi)
        cu_num_logits = _cut(input_batch.cu_num_logits, start, end + 1)
        if lo:
            cu_num_logits = cu_num_logits - lo
        logits, positions = _cut(logits, lo, hi), _cut(positions, lo, hi)
        node_tokens = _cut(node_tokens, lo, hi)
        processed = self.sampler.apply_sampling_params(
            logits,
            row_slots,
            slots,
            input_batch.idx_mapping_np[start:end],
            positions,
            node_tokens,
            _cut(input_batch.expanded_local_pos, lo, hi),
            input_batch.seq_lens_cpu_upper_bound.numpy()[start:end],
        )
        states = self.sampler.sampling_states
        target_tokens = gumbel.gumbel_sample(
            processed,
            row_slots,
            states.temperature.gpu,
            states.seeds.gpu,
            positions,
            apply_temperature=False,
            is_drafting=False,
            use_fp64=self.sampler.use_fp64_gumbel,
        )
        path = self.step.path[start:end]
        walk_tree(
            target_tokens,
            node_tokens,
            cu_num_logits,
            slots,
            self.step.trees.parents,
            self.step.tree_len[start:] if start else self.step.tree_len,
            invalid_drafts=None if invalid_drafts is None else invalid_drafts[lo:hi],
            sampled=sampled,
            num_sampled=num_sampled,
            path=path,
            rank_counts=None if self.observer is None else self.observer.rank_counts,
        )
        if logprobs_dims is None:
            return None
        if self.sampler.logprobs_mode in PROCESSED_LOGPROBS_MODES:
            source = processed
        else:
            source = logits
        return self._path_logprobs(
            source, cu_num_logits, slots, path, sampled, *logprobs_dims
        )

    def _path_logprobs(
        self,
        # [num_logits, vocab_size]
        logits: torch.Tensor,
        # [num_reqs + 1], int32
        cu_num_logits: torch.Tensor,
        # [num_reqs], int64
        slots: torch.Tensor,
        # [num_reqs, K + 1], int32
        path: torch.Tensor,
        # [num_reqs, W], int64, -1 padded
        sampled: torch.Tensor,
        num_logprobs: int,
        max_per_req_token_ids: int,
    ) -> LogprobsTensors:
        """Logprobs of the emitted tokens: K + 1 rows a request, in path order."""
        num_reqs, rows_per_req = path.shape
        rows = (cu_num_logits[:-1, None] + path).reshape(-1).to(torch.int64)
        return compute_topk_scores(
            logits[rows],
            num_logprobs,
            sampled[:, :rows_per_req].clamp(min=0).reshape(-1),
            [i * rows_per_req for i in range(num_reqs + 1)],
            logprob_token_ids_state=self.sampler.logprob_token_ids_state,
            expanded_idx_mapping=slots.repeat_interleave(
                rows_per_req, output_size=num_reqs * rows_per_req
            ),
            max_per_req_token_ids=max_per_req_token_ids,
            logits_mode=self.sampler.logprobs_mode
            in ("raw_logits", "processed_logits"),
        )

    def _join_logprobs(
        self, chunks: list[LogprobsTensors], num_reqs: int
    ) -> LogprobsTensors | None:
        if not chunks:
            return None
        if len(chunks) == 1:
            return chunks[0]
        rows_per_req = self.step.path.shape[1]
        return LogprobsTensors.cat(
            chunks,
            cu_num_generated_tokens=[i * rows_per_req for i in range(num_reqs + 1)],
        )
