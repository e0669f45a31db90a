# SPDX-License-Identifier: Apache-2.0
"""The verify step as the draft model should see it: a chain that accepted the path.

DFlash reads one context row per target row and drops the last ``num_rejected`` of each
request. Rows of a tree are not in path order, so a batch is made in which a request
that verified a tree contributes ``min(rows, K + 1)`` rows, the accepted path first and
padding after it. Its sizes are known on the host; its contents stay on the device.
"""

import copy

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.input_batch import InputBatch

from vllm_dflash.tree.verify_step import VerifyStep
from vllm_dflash_kernels.path_rows import path_rows


class PathBatchMaker:
    """Persistent buffers of the path batch."""

    def __init__(
        self, num_slots: int, max_num_tokens: int, depth: int, device: torch.device
    ):
        self.rows_per_tree = depth + 1
        self.rows = torch.zeros(max_num_tokens, dtype=torch.int64, device=device)
        self.positions = torch.zeros(max_num_tokens, dtype=torch.int64, device=device)
        self.num_padding = torch.zeros(num_slots, dtype=torch.int32, device=device)
        self.query_start_loc = torch.zeros(
            num_slots + 1, dtype=torch.int32, device=device
        )
        # Every decode batch that verifies full trees has these starts: no transfer.
        self._uniform_start_loc = (
            torch.arange(num_slots + 1, dtype=torch.int32, device=device)
            * self.rows_per_tree
        )

    def make(
        self,
        input_batch: InputBatch,
        step: VerifyStep,
        # [max_num_reqs], bool: the slot's drafts came with a tree
        has_tree_np: np.ndarray,
        # [num_reqs], int32: emitted tokens, i.e. the length of the accepted path
        num_sampled: torch.Tensor,
        # [num_reqs], int32
        num_rejected: torch.Tensor,
    ) -> tuple[InputBatch, torch.Tensor, torch.Tensor]:
        """Return (path batch, target rows to gather [num_tokens], its num_rejected)."""
        num_reqs = input_batch.num_reqs
        assert step.num_tree_rows_np is not None
        tree_rows = np.where(
            has_tree_np[input_batch.idx_mapping_np], step.num_tree_rows_np, 0
        )
        num_rows = np.where(
            tree_rows > 0,
            np.minimum(tree_rows, self.rows_per_tree),
            input_batch.num_scheduled_tokens,
        ).astype(np.int32)
        starts_np = np.zeros(num_reqs + 1, dtype=np.int32)
        np.cumsum(num_rows, out=starts_np[1:])
        if (num_rows == self.rows_per_tree).all():
            starts = self._uniform_start_loc[: num_reqs + 1]
        else:
            starts = self.query_start_loc[: num_reqs + 1]
            async_tensor_h2d(starts_np, out=starts)
        num_tokens = int(starts_np[-1])
        rows, positions = self.rows[:num_tokens], self.positions[:num_tokens]
        num_padding = self.num_padding[:num_reqs]
        path_rows(
            input_batch.query_start_loc,
            step.tree_len,
            step.path,
            num_sampled,
            input_batch.positions,
            starts,
            num_reqs=num_reqs,
            rows=rows,
            out_positions=positions,
            num_padding=num_padding,
        )
        if ((step.num_tree_rows_np > 0) & (tree_rows == 0)).any():
            # Placeholder drafts without a tree: a chain that accepted nothing.
            num_padding = torch.where(
                step.tree_len[:num_reqs] > 0, num_padding, num_rejected
            )
        # dataclasses.replace would run over some forty fields in every step.
        batch = copy.copy(input_batch)
        batch.num_scheduled_tokens = num_rows
        batch.num_tokens = batch.num_tokens_after_padding = num_tokens
        batch.query_start_loc = starts
        batch.query_start_loc_np = starts_np
        batch.positions = positions
        return batch, rows, num_padding
