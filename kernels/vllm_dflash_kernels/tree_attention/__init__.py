# SPDX-License-Identifier: Apache-2.0
"""Attention of tree rows over the paged KV cache, next to plain causal rows."""

from __future__ import annotations

import torch

from ..dispatch import Impl, use_triton
from ..relaunch import KeptLaunch
from .reference import tree_attention_reference
from .tiles import MAX_WIDTH
from .workspace import TreeAttentionWorkspace

__all__ = ["TreeAttentionWorkspace", "tree_attention"]

_FP8_DTYPES = (torch.uint8, torch.float8_e4m3fn)


def _check(
    query, key_cache, value_cache, max_query_len, ancestors, scales, prefix_lse, window
):
    if key_cache.stride() != value_cache.stride() or key_cache.stride(3) != 1:
        raise ValueError(
            "key_cache and value_cache must have equal strides and unit stride in the "
            f"head dimension (got {key_cache.stride()} and {value_cache.stride()}). "
            "Pass the two halves of one cache, or two caches of one layout."
        )
    if query.stride(2) != 1:
        raise ValueError(f"query must be contiguous per head (got {query.stride()}).")
    if key_cache.dtype not in (*_FP8_DTYPES, query.dtype):
        raise ValueError(
            f"Unsupported KV cache dtype (got {key_cache.dtype} for {query.dtype} "
            "queries). Allowed: the query's dtype, float8_e4m3fn, or its bytes (uint8)."
        )
    if (scales[0] is None) != (scales[1] is None):
        raise ValueError("k_scale and v_scale must be given together.")
    if prefix_lse is not None and (window > 0 or key_cache.dtype != query.dtype):
        raise ValueError(
            "prefix_lse needs an unquantised cache and no sliding window (got "
            f"{key_cache.dtype}, window {window}). Leave prefix_lse away."
        )
    if not 1 <= max_query_len <= MAX_WIDTH or ancestors.shape[2] > MAX_WIDTH // 64:
        raise ValueError(
            f"Wrong tree width (got max_query_len={max_query_len}, "
            f"{ancestors.shape[2]} words). Allowed: 1 to {MAX_WIDTH} rows."
        )


def tree_attention(
    # [num_tokens, num_heads, head_size], bf16 / fp16 / fp32
    query: torch.Tensor,
    # [num_blocks, num_kv_heads, block_size, head_size], any strides but the last;
    # query's dtype, float8_e4m3fn, or e4m3 bytes as uint8
    key_cache: torch.Tensor,
    # as key_cache, with equal strides (kv[..., :D] and kv[..., D:] of one cache)
    value_cache: torch.Tensor,
    *,
    block_table: torch.Tensor,  # [>= num_reqs, max_blocks], int32, unit column stride
    seq_lens: torch.Tensor,  # [num_reqs], int32, query rows included; 0 = padding
    query_start_loc: torch.Tensor,  # [>= num_reqs + 1], int32
    ancestors: torch.Tensor,  # [>= num_reqs, W, words], int64, row r = request r
    tree_len: torch.Tensor,  # [>= num_reqs], int32, 0 = no tree
    max_query_len: int,
    scale: float,
    out: torch.Tensor,  # [num_tokens, num_heads, head_size]
    sliding_window: int = -1,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,  # [num_heads]
    k_scale: torch.Tensor | None = None,  # one element, fp32
    v_scale: torch.Tensor | None = None,  # one element, fp32
    prefix_lse: torch.Tensor | None = None,  # [num_heads, num_tokens], fp32
    max_seq_len: int | None = None,
    workspace: TreeAttentionWorkspace | None = None,
    num_splits: int | None = None,
    impl: Impl = "auto",
    kept: list[KeptLaunch] | None = None,
) -> torch.Tensor:
    """Write the attention output of the first rows of every request into ``out``.

    The last ``tree_len[r]`` query rows of request ``r`` are a tree: row ``i`` of it is
    node ``i``, its key sits in slot ``seq_len - tree_len + i``, and it sees everything
    before the tree and the nodes of its ancestor bits. All other rows are causal by
    slot. An ancestor must not come after its node; rows and bits at or beyond
    ``tree_len`` are never used, so stale ones are harmless.

    Of each request the first ``max_query_len`` rows are written. Requests with
    ``seq_len`` 0 or without query rows are skipped, and nothing else of ``out`` is
    touched. Keys and values must be in the cache already, the query's own included.

    Everything but shapes and the Python arguments is read on the device: the launches
    can be captured in a CUDA graph and replayed for other lengths and trees.

    Args:
        max_query_len: Host bound of the rows a request (the tree's width); sizes the
            grid. At most 256.
        scale: Factor of the logits, positive.
        sliding_window: Keys that a row sees, itself included, by position: the
            position of a tree row is the tree's start plus its depth. <= 0: all.
        softcap: ``cap * tanh(logits / cap)`` if positive.
        sinks: One logit without value a head, natural units.
        k_scale: Factor of the stored keys of an fp8 cache; other caches ignore it.
        v_scale: The same for values.
        prefix_lse: Natural log-sum-exps of attention to the committed keys, those
            before the query rows; ``out`` holds its result, without sinks, on entry.
            Only the query rows' own keys are then read. Not with a window or fp8.
        max_seq_len: Host bound of ``seq_lens``, for the number of splits. None: what
            ``block_table`` can hold.
        workspace: Scratch for split keys; None allocates it at every call.
        num_splits: Key splits, 1 to 32; None chooses from the host-side sizes.
        impl: ``"triton"``, ``"reference"``, or by device.
        kept: Is given the launches, which ``TreeAttentionStep`` repeats.
    """
    _check(
        query,
        key_cache,
        value_cache,
        max_query_len,
        ancestors,
        (k_scale, v_scale),
        prefix_lse,
        sliding_window,
    )
    if not use_triton(impl, query):
        return tree_attention_reference(
            query,
            key_cache,
            value_cache,
            block_table=block_table,
            seq_lens=seq_lens,
            query_start_loc=query_start_loc,
            ancestors=ancestors,
            tree_len=tree_len,
            max_query_len=max_query_len,
            scale=scale,
            out=out,
            sliding_window=sliding_window,
            softcap=softcap,
            sinks=sinks,
            k_scale=k_scale,
            v_scale=v_scale,
            prefix_lse=prefix_lse,
        )
    from .launch import launch_tree_attention

    if query.dtype == torch.bfloat16 and not query.is_cuda:
        raise ValueError(
            "Triton's interpreter multiplies bf16 matrices wrongly (as integers). "
            "On the CPU use fp16 or fp32, or impl='reference'."
        )
    if key_cache.dtype == torch.float8_e4m3fn:
        key_cache = key_cache.view(torch.uint8)
        value_cache = value_cache.view(torch.uint8)
    if max_seq_len is None:
        max_seq_len = block_table.shape[1] * key_cache.shape[2]
    return launch_tree_attention(
        query,
        key_cache,
        value_cache,
        block_table=block_table,
        seq_lens=seq_lens,
        query_start_loc=query_start_loc,
        ancestors=ancestors,
        tree_len=tree_len,
        max_query_len=max_query_len,
        scale=scale,
        out=out,
        sliding_window=sliding_window,
        softcap=softcap,
        sinks=sinks,
        k_scale=k_scale,
        v_scale=v_scale,
        max_seq_len=max_seq_len,
        workspace=workspace,
        num_splits=num_splits,
        prefix_lse=prefix_lse,
        kept=kept,
    )
