# SPDX-License-Identifier: Apache-2.0
"""One verify round of a batch through all small kernels, for tests and benchmarks."""

from __future__ import annotations

import torch

from .dispatch import Impl
from .kv_compaction import KVCacheTable, compact_kv
from .path_rows import path_rows
from .testing import TreeBuffers, poisoned
from .topk_logprobs import topk_logprobs, topk_workspace
from .tree_build import build_tree
from .tree_prepare import prepare_tree_step
from .tree_walk import walk_tree


class VerifyRound:
    """Buffers of a round in which every request verifies a tree of W rows.

    The stages are methods, so that a benchmark can time each; ``run`` is all of them.
    The target is played by ``target_tokens``: fill it with ``accept_deepest_path``
    after a build, or with anything.
    """

    def __init__(
        self,
        num_reqs: int,
        *,
        depth: int,
        budget: int,
        num_candidates: int,
        logits: torch.Tensor,  # [num_reqs * depth, vocab_size]
        caches: list[torch.Tensor],  # [num_blocks, num_heads, block_size, content]
        impl: Impl = "auto",
    ) -> None:
        self.impl: Impl = impl
        self.num_reqs, self.depth, self.width = num_reqs, depth, budget + 1
        self.logits, self.table = logits, KVCacheTable(caches, keeps_caches=True)
        self.device = logits.device
        width, num_rows = self.width, num_reqs * depth

        def buffer(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return poisoned(*shape, dtype=dtype, device=self.device)

        self.slots = torch.arange(num_reqs, device=self.device).flip(0)
        self.row_to_slot = self.slots.repeat_interleave(depth)
        self.temperature = torch.full((num_reqs,), 0.7, device=self.device)
        self.seed = torch.arange(num_reqs, device=self.device)
        self.draw_positions = torch.arange(num_rows, device=self.device)
        self.workspace = topk_workspace(
            num_rows, logits.shape[1], num_candidates, self.device
        )
        self.cand_tokens = buffer(num_rows, num_candidates, dtype=torch.int32)
        self.cand_logprobs = buffer(num_rows, num_candidates, dtype=torch.float32)
        self.trees = TreeBuffers.allocate(num_reqs, budget, self.device)
        self.chain_only = torch.zeros(num_reqs, dtype=torch.uint8, device=self.device)
        self.draft_tokens = buffer(num_reqs, budget, dtype=torch.int64)
        starts = torch.arange(num_reqs + 1, dtype=torch.int32, device=self.device)
        self.query_start_loc = starts * width
        self.out_query_start_loc = starts * min(depth + 1, width)
        self.positions = buffer(num_reqs * width, dtype=torch.int64)
        self.batch_ancestors = torch.empty_like(self.trees.ancestors)
        self.tree_len = buffer(num_reqs, dtype=torch.int32)
        self.prefix_len = buffer(num_reqs, dtype=torch.int32)
        self.node_tokens = buffer(num_reqs, width, dtype=torch.int32)
        self.target_tokens = torch.zeros(
            num_reqs * width, dtype=torch.int64, device=self.device
        )
        self.sampled = buffer(num_reqs, width, dtype=torch.int64)
        self.num_sampled = buffer(num_reqs, dtype=torch.int32)
        self.path = buffer(num_reqs, depth + 1, dtype=torch.int32)
        num_out = num_reqs * min(depth + 1, width)
        self.rows = buffer(num_out, dtype=torch.int64)
        self.out_positions = buffer(num_out, dtype=torch.int64)
        self.num_padding = buffer(num_reqs, dtype=torch.int32)
        self.slot_mapping = torch.arange(num_reqs * width, device=self.device)

    def topk(self) -> None:
        self._topk()

    def topk_noise(self) -> None:
        self._topk(seed=self.seed, position=self.draw_positions)

    def _topk(self, **noise: torch.Tensor) -> None:
        topk_logprobs(
            self.logits,
            self.cand_tokens.shape[1],
            temperature=self.temperature,
            row_to_slot=self.row_to_slot,
            out_tokens=self.cand_tokens,
            out_logprobs=self.cand_logprobs,
            workspace=self.workspace,
            impl=self.impl,
            **noise,
        )

    def build(self) -> None:
        build_tree(
            self.cand_tokens,
            self.cand_logprobs,
            self.row_to_slot,
            num_reqs=self.num_reqs,
            depth=self.depth,
            **vars(self.trees),
            chain_only=self.chain_only,
            draft_tokens=self.draft_tokens,
            impl=self.impl,
        )

    def prepare(self) -> None:
        # The engine's part: input ids of the rows, and index positions.
        self.node_tokens[:, 0] = 1
        self.node_tokens[:, 1:] = self.draft_tokens
        torch.arange(self.positions.shape[0], out=self.positions)
        self.prepare_only()

    def prepare_only(self) -> None:
        prepare_tree_step(
            self.slots,
            self.query_start_loc,
            self.query_start_loc,
            num_reqs=self.num_reqs,
            num_reqs_padded=self.num_reqs,
            depths=self.trees.depths,
            ancestors=self.trees.ancestors,
            num_nodes=self.trees.num_nodes,
            positions=self.positions,
            batch_ancestors=self.batch_ancestors,
            tree_len=self.tree_len,
            prefix_len=self.prefix_len,
            impl=self.impl,
        )

    def walk(self) -> None:
        walk_tree(
            self.target_tokens,
            self.node_tokens.flatten(),
            self.query_start_loc,
            self.slots,
            self.trees.parents,
            self.tree_len,
            sampled=self.sampled,
            num_sampled=self.num_sampled,
            path=self.path,
            impl=self.impl,
        )

    def list_rows(self) -> None:
        path_rows(
            self.query_start_loc,
            self.tree_len,
            self.path,
            self.num_sampled,
            self.positions,
            self.out_query_start_loc,
            num_reqs=self.num_reqs,
            rows=self.rows,
            out_positions=self.out_positions,
            num_padding=self.num_padding,
            impl=self.impl,
        )

    def compact(self) -> None:
        compact_kv(
            self.table,
            self.slot_mapping,
            self.query_start_loc,
            self.tree_len,
            self.path,
            self.num_sampled,
            num_reqs=self.num_reqs,
            impl=self.impl,
        )

    def run(self) -> None:
        self.topk()
        self.build()
        self.prepare()
        self.walk()
        self.list_rows()
        self.compact()

    def accept_deepest_path(self) -> None:
        """Let the target draw what leads to the last of each tree's deepest nodes.

        Reads the tree on the host.
        """
        self.target_tokens.fill_(-1)
        for req, slot in enumerate(self.slots.tolist()):
            parents = self.trees.parents[slot].tolist()
            depths = self.trees.depths[slot].tolist()
            node = max(range(self.width), key=lambda n: (depths[n], n))
            while node > 0:
                row = req * self.width + parents[node]
                self.target_tokens[row] = self.draft_tokens[req, node - 1]
                node = parents[node]

    def results(self) -> dict[str, torch.Tensor]:
        """Every tensor that ``run`` writes, copied to the host."""
        written = {
            "cand_tokens": self.cand_tokens,
            **{name: buffer for name, buffer in vars(self.trees).items()},
            "draft_tokens": self.draft_tokens,
            "positions": self.positions,
            "batch_ancestors": self.batch_ancestors,
            "tree_len": self.tree_len,
            "sampled": self.sampled,
            "num_sampled": self.num_sampled,
            "path": self.path,
            "rows": self.rows,
            "out_positions": self.out_positions,
            "num_padding": self.num_padding,
            **{f"cache {i}": cache for i, cache in enumerate(self.table.caches)},
        }
        return {name: tensor.clone().cpu() for name, tensor in written.items()}
