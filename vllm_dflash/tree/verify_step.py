# SPDX-License-Identifier: Apache-2.0
"""What one verify step knows about its trees, in batch order.

The target's CUDA graph reads these buffers at replay, so they are allocated once and
refilled in place before every step that verifies drafts.
"""

from dataclasses import dataclass, field

import numpy as np
import torch

from vllm_dflash.tree.draft_tree import DraftTreeBuffers, num_words
from vllm_dflash_kernels.tree_prepare import prepare_tree_step


@dataclass
class VerifyStep:
    """Batch-order copies of the trees, and the accepted paths of the last walk."""

    trees: DraftTreeBuffers
    # [S, W, num_words], int64.
    batch_ancestors: torch.Tensor
    # [S], int32. Rows of the request's tree, root included; 0: causal rows.
    tree_len: torch.Tensor
    # [S], int32. Committed tokens of the request: the position of its first row.
    prefix_len: torch.Tensor
    # [S, K + 1], int32. Node indices of the accepted path, root first, 0 padded.
    path: torch.Tensor
    # Host mirror, [num_reqs]: rows of each request that verify drafts; None when the
    # current batch verifies nothing.
    num_tree_rows_np: np.ndarray | None = field(default=None)

    @classmethod
    def allocate(
        cls, trees: DraftTreeBuffers, depth: int, device: torch.device
    ) -> "VerifyStep":
        num_slots, width = trees.parents.shape
        return cls(
            trees=trees,
            batch_ancestors=torch.zeros(
                num_slots, width, num_words(width), dtype=torch.int64, device=device
            ),
            tree_len=torch.zeros(num_slots, dtype=torch.int32, device=device),
            prefix_len=torch.zeros(num_slots, dtype=torch.int32, device=device),
            path=torch.zeros(num_slots, depth + 1, dtype=torch.int32, device=device),
        )

    @property
    def num_verify_reqs(self) -> int:
        """Leading requests of the batch that carry drafts."""
        if self.num_tree_rows_np is None:
            return 0
        return int(np.count_nonzero(self.num_tree_rows_np))

    @property
    def max_tree_rows(self) -> int:
        if self.num_tree_rows_np is None:
            return 0
        return int(self.num_tree_rows_np.max())

    def clear(self) -> None:
        """The next batch verifies nothing."""
        self.num_tree_rows_np = None

    def prepare(
        self,
        # [num_reqs], int64
        slots: torch.Tensor,
        # [num_reqs + 1], int32
        query_start_loc: torch.Tensor,
        # [num_reqs + 1], int32
        cu_num_logits: torch.Tensor,
        # [num_tokens], int64; written in place: index positions become depth positions
        positions: torch.Tensor,
        # [num_reqs], drafts scheduled for each request
        num_drafts_np: np.ndarray,
    ) -> None:
        """Bring the scheduled trees into batch order and set rotary positions.

        Must run after the slot mapping was computed from the index positions.
        """
        self.num_tree_rows_np = np.where(num_drafts_np > 0, num_drafts_np + 1, 0)
        prepare_tree_step(
            slots,
            query_start_loc,
            cu_num_logits,
            num_reqs=len(num_drafts_np),
            num_reqs_padded=self.tree_len.shape[0],
            depths=self.trees.depths,
            ancestors=self.trees.ancestors,
            num_nodes=self.trees.num_nodes,
            positions=positions,
            batch_ancestors=self.batch_ancestors,
            tree_len=self.tree_len,
            prefix_len=self.prefix_len,
        )
