# SPDX-License-Identifier: Apache-2.0
"""What each rank of a tensor-parallel engine saw of every round, as digests.

``worker_extension_cls="rank_worker.RankWorker"``, with this folder on PYTHONPATH. Two
ranks that give the same list built the same trees of the same logits and accepted the
same paths, bit for bit.
"""

import hashlib

import torch
from rigged_worker import RiggedWorker, _rig

from vllm_dflash.runner.speculator import DDTreeSpeculator
from vllm_dflash.sample.tree_sampler import TreeRejectionSampler

_digests: list[tuple[str, str]] = []


def _record(stage: str, *tensors: torch.Tensor) -> None:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.contiguous().cpu().numpy().tobytes())
    _digests.append((stage, digest.hexdigest()[:16]))


_propose = DDTreeSpeculator.propose
_verify = TreeRejectionSampler.__call__


def _recorded_propose(self, input_batch, *args, dummy_run=False, **kwargs):
    tokens = _propose(self, input_batch, *args, dummy_run=dummy_run, **kwargs)
    if not dummy_run:
        trees, builder = self.runtime.trees, self.builder
        num_rows = input_batch.num_reqs * builder.depth
        _record(
            "candidates",
            builder.cand_tokens[:num_rows],
            builder.cand_logprobs[:num_rows],
        )
        _record("trees", tokens, trees.parents, trees.depths, trees.ancestors)
        _record("sizes", trees.num_nodes, trees.chain_only)
    return tokens


def _recorded_verify(self, logits, input_batch, *args, **kwargs):
    rows = input_batch.logits_indices
    _record("nodes", input_batch.input_ids[rows], input_batch.positions[rows])
    # The sampling options are applied in place.
    _record("logits", logits)
    output = _verify(self, logits, input_batch, *args, **kwargs)
    num_reqs = input_batch.num_reqs
    _record("paths", self.step.path[:num_reqs], self.step.tree_len[:num_reqs])
    _record("emitted", output.sampled_token_ids, output.num_sampled)
    return output


DDTreeSpeculator.propose = _recorded_propose
TreeRejectionSampler.__call__ = _recorded_verify


class RankWorker(RiggedWorker):
    """Mixed into the worker, beside the rigged draft."""

    def take_digests(self) -> list[tuple[str, str]]:
        """(stage, digest) of every round since the last call."""
        taken = list(_digests)
        _digests.clear()
        return taken

    def draw_differently_on(self, rank: int) -> None:
        """Rig one rank's draft with other random numbers from now on."""
        if self.rank == rank:
            _rig._random.seed(99)
