# SPDX-License-Identifier: Apache-2.0
"""A draft whose acceptance the test decides.

The DFlash model and the build run as always (on a GPU inside their CUDA graph); then
the candidates are replaced and the tree is built again: at each depth the token that
the reference run emitted is put at a random rank with probability ``hit_rate``. Deep
paths off the first branch are then accepted, which a random draft never shows.
"""

import random
from dataclasses import dataclass, field

import torch

from vllm_dflash.runner.model_state import DDTreeModelState
from vllm_dflash.runner.speculator import DDTreeSpeculator
from vllm_dflash.sample.tree_sampler import TreeRejectionSampler
from vllm_dflash.tree.builder import TreeBuilder


@dataclass
class RiggedDraft:
    """Install with ``rig.install(monkeypatch)`` before the engine is made."""

    hit_rate: float = 0.85
    seed: int = 0
    # prompt token ids -> prompt + reference continuation, one for each sample
    references: dict[tuple[int, ...], list[list[int]]] = field(default_factory=dict)
    # Whether to stop the engine at the first token that no reference has.
    strict: bool = True
    # Accepted path of every verify, as node indices.
    paths: list[list[int]] = field(default_factory=list)
    tree_lens: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._req_states = None

    def add_reference(self, prompt: list[int], output: list[int]) -> None:
        self.references.setdefault(tuple(prompt), []).append([*prompt, *output])

    def add_references(
        self, prompts: list[list[int]], outputs: list[list[int]]
    ) -> None:
        for prompt, output in zip(prompts, outputs, strict=True):
            self.add_reference(prompt, output)

    def forget(self) -> None:
        """Drop the references and the statistics, and draw as at the start."""
        self.references.clear()
        self.paths.clear()
        self.tree_lens.clear()
        self._random.seed(self.seed)

    @property
    def mean_tokens(self) -> float:
        return sum(len(path) for path in self.paths) / max(1, len(self.paths))

    @property
    def num_branching_paths(self) -> int:
        """Accepted paths that are not a prefix of the node list."""
        return sum(path != list(range(len(path))) for path in self.paths)

    def install(self, monkeypatch) -> None:
        rig = self
        custom_sampler = DDTreeModelState.custom_sampler
        propose = DDTreeSpeculator.propose
        verify = TreeRejectionSampler.__call__

        def spy_sampler(self, sampler):
            rig._req_states = sampler.req_states
            return custom_sampler(self, sampler)

        def rigged_propose(self, input_batch, *args, dummy_run=False, **kwargs):
            tokens = propose(self, input_batch, *args, dummy_run=dummy_run, **kwargs)
            if not dummy_run:
                num_reqs = input_batch.num_reqs
                rig._overwrite(self.builder, num_reqs, self.sample_idx_mapping)
                self.builder.build(num_reqs, self.sample_idx_mapping)
            return tokens

        def spy_verify(self, logits, input_batch, *args, **kwargs):
            output = verify(self, logits, input_batch, *args, **kwargs)
            for req, length in enumerate(output.num_sampled.tolist()):
                if int(self.step.tree_len[req]):
                    rig.paths.append(self.step.path[req, :length].tolist())
                    rig.tree_lens.append(int(self.step.tree_len[req]))
            return output

        monkeypatch.setattr(DDTreeModelState, "custom_sampler", spy_sampler)
        monkeypatch.setattr(DDTreeSpeculator, "propose", rigged_propose)
        monkeypatch.setattr(TreeRejectionSampler, "__call__", spy_verify)

    def _overwrite(
        self, builder: TreeBuilder, num_reqs: int, row_to_slot: torch.Tensor
    ) -> None:
        depth, num_candidates = builder.depth, builder.max_children
        for req in range(num_reqs):
            slot = int(row_to_slot[req * depth])
            if slot < 0:
                continue
            length = int(self._req_states.total_len.gpu[slot])
            prompt_len = int(self._req_states.prompt_len.np[slot])
            tokens = self._req_states.all_token_ids.gpu[slot, :length].tolist()
            reference = self._reference(tokens, prompt_len)
            if reference is None:
                continue
            for level in range(depth):
                row = req * depth + level
                candidates = self._candidates(reference, length + level, num_candidates)
                weights = sorted(
                    (self._random.random() ** 2 + 1e-3 for _ in candidates),
                    reverse=True,
                )
                probs = torch.tensor(weights) / sum(weights) * 0.95
                builder.cand_tokens[row].copy_(torch.tensor(candidates))
                builder.cand_logprobs[row].copy_(probs.log())

    def _reference(self, tokens: list[int], prompt_len: int) -> list[int] | None:
        """The sample that the tokens are a part of, or that they go on from."""
        samples = self.references.get(tuple(tokens[:prompt_len]), [])
        for sample in samples:
            shared = min(len(tokens), len(sample))
            if sample[:shared] == tokens[:shared]:
                return sample
        assert not (samples and self.strict), (
            f"diverged from the reference: {tokens[prompt_len:]} is in none of "
            f"{[sample[prompt_len:] for sample in samples]}"
        )
        return None

    def _candidates(
        self, reference: list[int], index: int, num_candidates: int
    ) -> list[int]:
        candidates = self._random.sample(range(10, 500), num_candidates)
        if index < len(reference) and self._random.random() < self.hit_rate:
            token = reference[index]
            candidates = [9 if c == token else c for c in candidates]
            rank = min(self._random.choice([0, 0, 0, 1, 1, 2, 3]), num_candidates - 1)
            candidates[rank] = token
        return candidates
