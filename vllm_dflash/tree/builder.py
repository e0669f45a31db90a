# SPDX-License-Identifier: Apache-2.0
"""Draft logits -> draft trees, on the device, inside the draft's CUDA graph."""

import torch

from vllm_dflash.tree.draft_tree import DraftTreeBuffers
from vllm_dflash_kernels.topk_logprobs import topk_logprobs, topk_workspace
from vllm_dflash_kernels.tree_build import build_tree


class TreeBuilder:
    """Candidates of every depth, then the best tree under the budget.

    The candidate buffers are persistent because the two stages run inside a captured
    graph: rows are (request, depth) pairs in batch order.
    """

    def __init__(
        self,
        trees: DraftTreeBuffers,
        depth: int,
        max_children: int,
        scale_by_temperature: bool,
        use_noise: bool,
        vocab_size: int,
        device: torch.device,
    ):
        num_slots, width = trees.parents.shape
        self.trees = trees
        self.depth = depth
        self.max_children = max_children
        self.scale_by_temperature = scale_by_temperature
        self.use_noise = use_noise
        num_rows = num_slots * depth
        # [S * K, C]
        self.cand_tokens = torch.zeros(
            num_rows, max_children, dtype=torch.int32, device=device
        )
        self.cand_logprobs = torch.zeros(
            num_rows, max_children, dtype=torch.float32, device=device
        )
        # [S, N], int64: node tokens in node order, root excluded, unused nodes 0.
        self.draft_tokens = torch.zeros(
            num_slots, width - 1, dtype=torch.int64, device=device
        )
        self.workspace = topk_workspace(num_rows, vocab_size, max_children, device)

    def collect_candidates(
        self,
        # [num_reqs * K, vocab_size]
        logits: torch.Tensor,
        # [num_reqs * K], int64, request state slot, -1: inert row
        row_to_slot: torch.Tensor,
        # [S], float32
        temperature: torch.Tensor,
        # [S], int64
        seeds: torch.Tensor,
        # [num_reqs * K], int64, of the token before the drafted one
        positions: torch.Tensor,
    ) -> torch.Tensor:
        """Store the best candidates of each row; return the best token, int64."""
        num_rows = logits.shape[0]
        is_slot_read = self.scale_by_temperature or self.use_noise
        tokens, _ = topk_logprobs(
            logits,
            self.max_children,
            temperature=temperature if self.scale_by_temperature else None,
            row_to_slot=row_to_slot if is_slot_read else None,
            is_scaled=self.scale_by_temperature,
            noise_temperature=self.trees.noise_temperature if self.use_noise else None,
            seed=seeds if self.use_noise else None,
            position=positions if self.use_noise else None,
            out_tokens=self.cand_tokens[:num_rows],
            out_logprobs=self.cand_logprobs[:num_rows],
            workspace=self.workspace,
        )
        return tokens[:, 0].to(torch.int64)

    def build(
        self,
        num_reqs: int,
        # [>= num_reqs * K], int64, request state slot of each row, -1: inert
        row_to_slot: torch.Tensor,
    ) -> None:
        """Build the trees of the rows stored by :meth:`collect_candidates`."""
        num_rows = num_reqs * self.depth
        build_tree(
            self.cand_tokens[:num_rows],
            self.cand_logprobs[:num_rows],
            row_to_slot,
            num_reqs=num_reqs,
            depth=self.depth,
            parents=self.trees.parents,
            depths=self.trees.depths,
            ancestors=self.trees.ancestors,
            num_nodes=self.trees.num_nodes,
            chain_only=self.trees.chain_only,
            draft_tokens=self.draft_tokens,
        )
