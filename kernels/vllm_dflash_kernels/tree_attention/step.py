# SPDX-License-Identifier: Apache-2.0
"""Tree attention for the layers of one step."""

from __future__ import annotations

import torch

from ..dispatch import Impl
from ..relaunch import KeptLaunch, are_aligned
from . import TreeAttentionWorkspace, tree_attention


class TreeAttentionStep:
    """``tree_attention`` with what the layers of a step share bound.

    The first layer of a kind launches through Triton, the others repeat its launches
    with their own pointers. Arguments as in ``tree_attention``; they must stay as they
    are while the step runs.
    """

    def __init__(
        self,
        *,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        query_start_loc: torch.Tensor,
        ancestors: torch.Tensor,
        tree_len: torch.Tensor,
        max_query_len: int,
        max_seq_len: int | None = None,
        workspace: TreeAttentionWorkspace | None = None,
        impl: Impl = "auto",
    ):
        self._shared = dict(
            block_table=block_table,
            seq_lens=seq_lens,
            query_start_loc=query_start_loc,
            ancestors=ancestors,
            tree_len=tree_len,
            max_query_len=max_query_len,
            max_seq_len=max_seq_len,
            workspace=workspace,
            impl=impl,
        )
        # A scratch that a call allocates for itself is gone when it is repeated.
        self._keeps = workspace is not None
        self._kept: dict[tuple, list[KeptLaunch]] = {}

    def __call__(
        self,
        query: torch.Tensor,  # [num_tokens, num_heads, head_size]
        # [num_blocks, num_kv_heads, block_size, 2 * head_size], keys, then values
        kv_cache: torch.Tensor,
        out: torch.Tensor,  # [num_tokens, num_heads, head_size], written
        *,
        scale: float,
        sliding_window: int = -1,
        softcap: float = 0.0,
        sinks: torch.Tensor | None = None,
        k_scale: torch.Tensor | None = None,
        v_scale: torch.Tensor | None = None,
        prefix_lse: torch.Tensor | None = None,
    ) -> None:
        """Attend for one layer."""
        kind = (
            *(query.dtype, query.shape, query.stride(), out.dtype, out.stride()),
            *(kv_cache.dtype, kv_cache.shape, kv_cache.stride()),
            *(scale, sliding_window, softcap, k_scale is None, v_scale is None),
            None if sinks is None else sinks.dtype,
            None if prefix_lse is None else prefix_lse.stride(),
        )
        tensors = (out, query, kv_cache, sinks, k_scale, v_scale, prefix_lse)
        pointers = [0 if part is None else part.data_ptr() for part in tensors]
        is_aligned = are_aligned(pointers)
        kept = self._kept.get(kind) if is_aligned else None
        if kept is not None:
            for launch in kept:
                launch.again(pointers)
            return
        kept = [] if self._keeps and is_aligned else None
        keys, values = kv_cache.split(query.shape[2], dim=-1)
        tree_attention(
            query,
            keys,
            values,
            scale=scale,
            out=out,
            sliding_window=sliding_window,
            softcap=softcap,
            sinks=sinks,
            k_scale=k_scale,
            v_scale=v_scale,
            prefix_lse=prefix_lse,
            kept=kept,
            **self._shared,  # type: ignore[arg-type]
        )
        if kept:
            self._kept[kind] = kept
