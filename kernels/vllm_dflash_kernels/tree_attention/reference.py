# SPDX-License-Identifier: Apache-2.0
"""Tree attention in plain torch: the meaning of the kernel, and the CPU's path.

One request at a time: gather its keys and values through the block table, scale, cap,
mask, softmax, in fp32. Reads lengths on the host, so it is for CPU tensors and tests.
"""

from __future__ import annotations

import torch


def unpack_ancestors(
    ancestors: torch.Tensor,  # [num_nodes, words], int64
) -> torch.Tensor:
    """Ancestor bits as bool ``[num_nodes, num_nodes]``; row sees column."""
    num_nodes = ancestors.shape[0]
    columns = torch.arange(num_nodes, device=ancestors.device)
    return ((ancestors[:, columns // 64] >> (columns % 64)) & 1).bool()


def visible_keys(
    ancestors: torch.Tensor,  # [W, words], int64: this request's batch row
    seq_len: int,
    query_len: int,
    tree_len: int,
    sliding_window: int,
) -> torch.Tensor:
    """Visible keys of one request as bool ``[query_len, seq_len]``."""
    slots = torch.arange(seq_len, device=ancestors.device)
    prefix = seq_len - query_len
    tree_start = seq_len - tree_len
    mask = slots[None, :] <= slots[prefix:, None]
    positions = slots.clone()
    if tree_len:
        seen = unpack_ancestors(ancestors[:tree_len])
        mask[query_len - tree_len :, tree_start:] &= seen
        positions[tree_start:] = tree_start + seen.sum(1) - 1
    if sliding_window > 0:
        distance = positions[prefix:, None] - positions[None, :]
        mask &= distance < sliding_window
    return mask


def gather_cache(
    cache: torch.Tensor,  # [num_blocks, num_kv_heads, block_size, head_size]
    block_table: torch.Tensor,  # [max_blocks], int32
    seq_len: int,
) -> torch.Tensor:
    """One request's keys or values as fp32 ``[num_kv_heads, seq_len, head_size]``."""
    block_size = cache.shape[2]
    blocks = block_table[: -(-seq_len // block_size)].long()
    rows = cache[blocks].transpose(0, 1).flatten(1, 2)[:, :seq_len]
    return rows.float()


def attend(
    query: torch.Tensor,  # [num_rows, num_heads, head_size], fp32
    keys: torch.Tensor,  # [num_kv_heads, num_keys, head_size], fp32
    values: torch.Tensor,  # [num_kv_heads, num_keys, head_size], fp32
    mask: torch.Tensor,  # [num_rows, num_keys], bool
    scale: float,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,  # [num_heads]
    # ([num_rows, num_heads, head_size], [num_heads, num_rows]): result and natural
    # log-sum-exps of other keys
    known: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Masked softmax attention of one request, ``[num_rows, num_heads, head_size]``."""
    num_rows, num_heads, head_size = query.shape
    num_kv_heads, num_keys, _ = keys.shape
    group = num_heads // num_kv_heads
    # Query heads h * group .. h * group + group - 1 share KV head h.
    q = query.transpose(0, 1).reshape(num_kv_heads, group * num_rows, head_size)
    scores = torch.bmm(q, keys.transpose(1, 2)) * scale
    scores = scores.view(num_kv_heads, group, num_rows, num_keys)
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, float("-inf"))
    if known is not None:
        # The known keys enter as one more key each row, with their result as its value.
        lse = known[1].view(num_kv_heads, group, num_rows, 1)
        scores = torch.cat([scores, lse], -1)
    if sinks is not None:
        sink = sinks.float().view(num_kv_heads, group, 1, 1)
        scores = torch.cat([scores, sink.expand(-1, -1, num_rows, 1)], -1)
    probs = torch.softmax(scores, -1)
    own = probs[..., :num_keys].reshape(num_kv_heads, group * num_rows, num_keys)
    out = torch.bmm(own, values).view(num_heads, num_rows, head_size)
    if known is not None:
        share = probs[..., num_keys].reshape(num_heads, num_rows, 1)
        out = out + share * known[0].float().transpose(0, 1)
    return out.transpose(0, 1)


def tree_attention_reference(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    *,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    ancestors: torch.Tensor,
    tree_len: torch.Tensor,
    max_query_len: int,
    scale: float,
    out: torch.Tensor,
    sliding_window: int = -1,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    prefix_lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """Reference of ``tree_attention`` (see there); waits for the device."""
    if key_cache.dtype == torch.uint8:
        key_cache = key_cache.view(torch.float8_e4m3fn)
        value_cache = value_cache.view(torch.float8_e4m3fn)
    quantised = key_cache.dtype == torch.float8_e4m3fn
    starts = query_start_loc.tolist()
    tree_lens = tree_len.tolist()
    for r, seq_len in enumerate(seq_lens.tolist()):
        start, query_len = starts[r], starts[r + 1] - starts[r]
        num_rows = min(query_len, max_query_len)
        if seq_len == 0 or num_rows <= 0:
            continue
        keys = gather_cache(key_cache, block_table[r], seq_len)
        values = gather_cache(value_cache, block_table[r], seq_len)
        if quantised and k_scale is not None:
            keys = keys * k_scale.float()
        if quantised and v_scale is not None:
            values = values * v_scale.float()
        mask = visible_keys(
            ancestors[r], seq_len, query_len, tree_lens[r], sliding_window
        )
        rows = slice(start, start + num_rows)
        prefix, known = seq_len - query_len, None
        if prefix_lse is not None and prefix > 0:
            known = (out[rows], prefix_lse[:, rows].float())
            keys, values, mask = keys[:, prefix:], values[:, prefix:], mask[:, prefix:]
        result = attend(
            query[rows].float(),
            keys,
            values,
            mask[:num_rows],
            scale,
            softcap,
            sinks,
            known,
        )
        out[rows] = result.to(out.dtype)
    return out
