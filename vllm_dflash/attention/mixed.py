# SPDX-License-Identifier: Apache-2.0
"""Mixed batches: the base backend attends for the requests that verify nothing.

They follow those that verify. Its metadata is built for them alone, so no row is
attended to twice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata

if TYPE_CHECKING:
    from vllm_dflash.attention.metadata import TreeAttention

_PER_REQUEST = (
    "seq_lens",
    "seq_lens_cpu_upper_bound",
    "block_table_tensor",
    "is_prefilling",
    "rswa_prefix_lens",
    "req_idx",
    "dcp_local_seq_lens",
    "dcp_local_seq_lens_cpu_upper_bound",
)
_PER_ROW = ("slot_mapping", "positions")


class MixedBuilderMixin:
    """Hands the base builder the rest of a mixed batch. Stands before all others."""

    def _build_base(
        self,
        tree: TreeAttention | None,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        whole, num_rows = common_attn_metadata, 0
        if tree is not None and not tree.pure:
            num_rows = int(whole.query_start_loc_cpu[tree.num_verify_reqs])
            common_attn_metadata = without_leading(
                whole, tree.num_verify_reqs, num_rows
            )
        metadata = super()._build_base(  # type: ignore[misc]
            tree, common_prefix_len, common_attn_metadata, *args, **kwargs
        )
        # The base backend's first row, and the batch that the rows before it lead.
        metadata.first_row = num_rows
        metadata.verify_batch = whole
        return metadata


def _aligned(part: Any) -> Any:
    """Return a copy of what doesn't begin at 16 bytes.

    Triton compiles other kernels for such pointers, which would happen while serving.
    """
    if isinstance(part, torch.Tensor) and part.data_ptr() % 16:
        return part.clone()
    return part


def without_leading(
    batch: CommonAttentionMetadata, num_reqs: int, num_rows: int
) -> CommonAttentionMetadata:
    """Return the batch without its first `num_reqs` requests, `num_rows` rows."""
    parts: dict[str, Any] = {}
    for names, first in ((_PER_REQUEST, num_reqs), (_PER_ROW, num_rows)):
        for name in names:
            value = getattr(batch, name)
            if value is not None:
                parts[name] = _aligned(value[first:])
    starts_cpu = batch.query_start_loc_cpu[num_reqs:] - num_rows
    if batch.mm_req_doc_ranges is not None:
        parts["mm_req_doc_ranges"] = {
            request - num_reqs: ranges
            for request, ranges in batch.mm_req_doc_ranges.items()
            if request >= num_reqs
        }
    return batch.replace(
        **parts,
        query_start_loc=batch.query_start_loc[num_reqs:] - num_rows,
        query_start_loc_cpu=starts_cpu,
        num_reqs=batch.num_reqs - num_reqs,
        num_actual_tokens=batch.num_actual_tokens - num_rows,
        max_query_len=int((starts_cpu[1:] - starts_cpu[:-1]).max()),
        _num_computed_tokens_cache=None,
        _token_to_req_indices_cache=None,
    )
