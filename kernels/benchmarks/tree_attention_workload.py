# SPDX-License-Identifier: Apache-2.0
"""Inputs of the tree attention benchmark, and the attention calls it compares.

Every call takes the index of a cache pool: successive calls read different memory, so
that the L2 cache doesn't serve what a model would read from HBM.
"""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable
from dataclasses import dataclass

import torch

from vllm_dflash_kernels.testing import ancestor_matrix, pack_bits, random_tree
from vllm_dflash_kernels.tree_attention import TreeAttentionWorkspace, tree_attention
from vllm_dflash_kernels.tree_attention.tiles import MAX_SPLITS

BLOCK_SIZE = 16
# Bound that a served engine would capture its graphs with.
MAX_MODEL_LEN = 40960
# Distinct cache bytes that successive calls walk through: four L2 caches of an H200.
ROTATED_BYTES = 240e6
VLLM_MAX_SPLITS = 32

Call = Callable[[int], object]


class Absent(Exception):
    """The comparator isn't installed or can't do this shape; the text says why."""


@dataclass(frozen=True)
class Shape:
    num_heads: int
    num_kv_heads: int
    head_size: int

    def __str__(self) -> str:
        return f"{self.num_heads}/{self.num_kv_heads}/{self.head_size}"


class Workload:
    """``batch`` requests of ``context`` committed tokens and ``width`` query rows."""

    def __init__(
        self,
        shape: Shape,
        context: int | list[int],
        batch: int,
        width: int,
        *,
        device: str = "cuda",
        dtype: torch.dtype = torch.bfloat16,
        chain: bool = False,
        one_tree: bool = False,
        rotate: bool = True,
    ):
        contexts = context if isinstance(context, list) else [context] * batch
        self.shape, self.batch, self.width = shape, batch, width
        self.seq_len = max(contexts) + width
        self.scale = shape.head_size**-0.5
        row_bytes = shape.num_kv_heads * 2 * shape.head_size * dtype.itemsize
        self.kv_bytes = sum(c + width for c in contexts) * row_bytes
        io = 2 * batch * width * shape.num_heads * shape.head_size * dtype.itemsize
        self.bytes_moved = self.kv_bytes + io
        self.num_pools = 1
        if rotate:
            self.num_pools = max(1, min(20, int(-(-ROTATED_BYTES // self.kv_bytes))))
        blocks = -(-self.seq_len // BLOCK_SIZE)
        num_blocks = self.num_pools * batch * blocks + 1
        cache = torch.empty(
            num_blocks,
            BLOCK_SIZE,
            shape.num_kv_heads,
            2 * shape.head_size,
            dtype=dtype,
            device=device,
        )
        cache.normal_()
        # vLLM's logical order [block, head, slot, K || V] over its default layout.
        self.cache = cache.permute(0, 2, 1, 3)
        ids = torch.randperm(num_blocks - 1, device=device).int() + 1
        ids = ids.view(self.num_pools, batch, blocks)
        # Row strides that are multiples of 16 compile to one variant.
        padded = torch.zeros(
            self.num_pools,
            batch,
            -(-blocks // 16) * 16,
            dtype=torch.int32,
            device=device,
        )
        padded[..., :blocks] = ids
        self.block_tables = padded
        total = batch * width
        self.query = torch.randn(
            total, shape.num_heads, shape.head_size, device=device
        ).to(dtype)
        self.out = torch.empty_like(self.query)
        self.query_start_loc = (torch.arange(batch + 1, device=device) * width).int()
        self.seq_lens = torch.tensor(
            [c + width for c in contexts], dtype=torch.int32, device=device
        )
        self.tree_len = torch.full_like(self.seq_lens, width)
        rng = random.Random(0)
        trees = []
        for _ in range(1 if one_tree else min(batch, 4)):
            parents = list(range(-1, width - 1))
            if not chain:
                parents = random_tree(width, rng)
            trees.append(pack_bits(ancestor_matrix(parents)))
        bits = [trees[r % len(trees)] for r in range(batch)]
        self.ancestors = torch.stack(bits).to(device)

    @property
    def key_cache(self) -> torch.Tensor:
        return self.cache[..., : self.shape.head_size]

    @property
    def value_cache(self) -> torch.Tensor:
        return self.cache[..., self.shape.head_size :]

    def tensors(self, pool: int = 0) -> dict[str, object]:
        return dict(
            block_table=self.block_tables[pool % self.num_pools],
            seq_lens=self.seq_lens,
            query_start_loc=self.query_start_loc,
            ancestors=self.ancestors,
            tree_len=self.tree_len,
            max_query_len=self.width,
            scale=self.scale,
            out=self.out,
        )


def tree_call(w: Workload, **overrides: object) -> Call:
    """Our kernel as the plugin calls it; overrides go to the launcher."""
    from vllm_dflash_kernels.tree_attention.launch import launch_tree_attention

    if not overrides:
        workspace = TreeAttentionWorkspace.allocate(w.shape.head_size, w.query.device)
        return lambda pool: tree_attention(
            w.query,
            w.key_cache,
            w.value_cache,
            max_seq_len=MAX_MODEL_LEN,
            workspace=workspace,
            **w.tensors(pool),
        )
    workspace = TreeAttentionWorkspace.of_rows(
        MAX_SPLITS * w.batch * w.width * w.shape.num_heads,
        w.shape.head_size,
        w.query.device,
    )
    options = dict(
        sliding_window=-1,
        softcap=0.0,
        sinks=None,
        k_scale=None,
        v_scale=None,
        max_seq_len=MAX_MODEL_LEN,
        workspace=workspace,
        num_splits=None,
    )
    return lambda pool: launch_tree_attention(
        w.query, w.key_cache, w.value_cache, **w.tensors(pool), **options | overrides
    )


def _flash(w: Workload, *, committed_only: bool = False, scheduled: bool = True):
    """vLLM's FlashAttention-3 over all keys (causal) or the committed ones.

    ``scheduled``: as vLLM's backend calls it in a full CUDA graph, with scheduler
    metadata and at most 32 splits; else with its own choice from the true lengths.
    """
    from vllm.vllm_flash_attn.flash_attn_interface import (
        flash_attn_varlen_func,
        get_scheduler_metadata,
        is_fa_version_supported,
    )

    if not is_fa_version_supported(3):
        raise Absent("FlashAttention-3 needs compute capability 9.x")
    keys, values = w.cache.transpose(1, 2).split(w.shape.head_size, dim=-1)
    lengths = w.seq_lens - w.width if committed_only else w.seq_lens
    options: dict[str, object] = {}
    if scheduled:
        options["num_splits"] = VLLM_MAX_SPLITS
        options["scheduler_metadata"] = get_scheduler_metadata(
            batch_size=w.batch,
            max_seqlen_q=w.width,
            max_seqlen_k=w.seq_len,
            num_heads_q=w.shape.num_heads,
            num_heads_kv=w.shape.num_kv_heads,
            headdim=w.shape.head_size,
            cache_seqlens=lengths,
            qkv_dtype=w.query.dtype,
            cu_seqlens_q=w.query_start_loc,
            page_size=BLOCK_SIZE,
            causal=not committed_only,
            window_size=(-1, -1),
            num_splits=VLLM_MAX_SPLITS,
        )
    return lambda pool: flash_attn_varlen_func(
        q=w.query,
        k=keys,
        v=values,
        out=w.out,
        cu_seqlens_q=w.query_start_loc,
        max_seqlen_q=w.width,
        seqused_k=lengths,
        max_seqlen_k=w.seq_len,
        softmax_scale=w.scale,
        causal=not committed_only,
        block_table=w.block_tables[pool % w.num_pools],
        fa_version=3,
        return_softmax_lse=committed_only,
        **options,
    )


def flash_attention_3(w: Workload) -> Call:
    """FlashAttention-3 as vLLM captures it."""
    return _flash(w)


def flash_attention_3_free(w: Workload) -> Call:
    """FlashAttention-3 with its own choice of splits."""
    return _flash(w, scheduled=False)


def prefix_call(w: Workload) -> Call:
    """Committed keys by FlashAttention-3, own keys by our kernel."""
    committed = _flash(w, committed_only=True)

    def call(pool: int) -> None:
        _, lse = committed(pool)
        tree_attention(
            w.query, w.key_cache, w.value_cache, prefix_lse=lse, **w.tensors(pool)
        )

    return call


def vllm_triton(w: Workload) -> Call:
    """vLLM's Triton unified attention, causal."""
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention

    keys, values = w.cache.transpose(1, 2).split(w.shape.head_size, dim=-1)
    scales = torch.ones(1, device=w.query.device).expand(w.batch, w.shape.num_kv_heads)
    return lambda pool: unified_attention(
        q=w.query,
        k=keys,
        v=values,
        out=w.out,
        cu_seqlens_q=w.query_start_loc,
        max_seqlen_q=w.width,
        seqused_k=w.seq_lens,
        max_seqlen_k=w.seq_len,
        softmax_scale=w.scale,
        causal=True,
        window_size=(-1, -1),
        block_table=w.block_tables[pool % w.num_pools],
        softcap=0.0,
        q_descale=None,
        k_descale=scales,
        v_descale=scales,
    )


def _bool_masks(w: Workload) -> list[torch.Tensor]:
    from vllm_dflash_kernels.tree_attention.reference import visible_keys

    lengths = w.seq_lens.tolist()
    return [
        visible_keys(w.ancestors[r], lengths[r], w.width, w.width, -1)
        for r in range(w.batch)
    ]


def flashinfer_custom_mask(w: Workload) -> Call:
    """FlashInfer's paged prefill with the tree as a custom mask, planned outside.

    Its FA2 kernels, the only ones that take a mask, over the cache as it is: key and
    value views of equal strides.
    """
    try:
        flashinfer = importlib.import_module("flashinfer")
    except ImportError as error:
        raise Absent(f"flashinfer is not importable: {error}") from error
    keys, values = w.cache.transpose(1, 2).split(w.shape.head_size, dim=-1)
    device = w.query.device
    lengths = w.seq_lens.tolist()
    blocks = [-(-n // BLOCK_SIZE) for n in lengths]
    indptr = torch.tensor([0, *blocks], device=device).cumsum(0).int()
    last = [(n - 1) % BLOCK_SIZE + 1 for n in lengths]
    mask = torch.cat([m.flatten() for m in _bool_masks(w)])
    # Calls follow one another, so that they can share the buffer of partial results.
    buffer = torch.empty(512 << 20, dtype=torch.uint8, device=device)
    wrappers = []
    for table in w.block_tables:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
            buffer, "NHD", backend="fa2"
        )
        wrapper.plan(
            w.query_start_loc,
            indptr,
            torch.cat([table[r, : blocks[r]] for r in range(w.batch)]),
            torch.tensor(last, dtype=torch.int32, device=device),
            w.shape.num_heads,
            w.shape.num_kv_heads,
            w.shape.head_size,
            BLOCK_SIZE,
            custom_mask=mask,
            sm_scale=w.scale,
            q_data_type=w.query.dtype,
            kv_data_type=w.query.dtype,
        )
        wrappers.append(wrapper)
    # run() allocates nothing and reads nothing on the host: a graph can hold it.
    return lambda pool: wrappers[pool % w.num_pools].run(
        w.query, (keys, values), out=w.out
    )


def xformers_tree(w: Workload) -> Call:
    """xformers' tree attention over contiguous copies of the cache.

    Its paged kernels want pages of 64 slots and more, and it takes one tree for the
    whole batch: the first request's.
    """
    try:
        module = importlib.import_module("xformers.ops.tree_attention")
        fmha = importlib.import_module("xformers.ops.fmha")
    except ImportError as error:
        raise Absent(f"xformers is not importable: {error}") from error
    if w.num_pools * w.kv_bytes > 8e9:
        raise Absent("the copied cache would exceed 8 GB")
    shape, group = w.shape, w.shape.num_heads // w.shape.num_kv_heads
    prefixes = [n - w.width for n in w.seq_lens.tolist()]
    padded = max(prefixes)
    slots = torch.arange(max(w.seq_lens.tolist()), device=w.query.device)
    rows = w.cache.transpose(1, 2)

    def expand(copied: torch.Tensor) -> tuple[torch.Tensor, ...]:
        # [batch, row, kv head, query head of it, D]: stride 0 says that heads share.
        parts = copied.split(shape.head_size, dim=-1)
        return tuple(
            part.contiguous().unsqueeze(3).expand(-1, -1, -1, group, -1)
            for part in parts
        )

    def copies(table: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Own keys and values, then committed ones."""
        committed = rows[
            table[:, slots[:padded] // BLOCK_SIZE], slots[:padded] % BLOCK_SIZE
        ]
        at = torch.stack([slots[p : p + w.width] for p in prefixes])
        own = rows[table.gather(1, at // BLOCK_SIZE).long(), at % BLOCK_SIZE]
        return *expand(own), *expand(committed)

    pools = [copies(table) for table in w.block_tables]
    tree = _bool_masks(w)[0][:, -w.width :]
    spec_bias = torch.zeros_like(tree, dtype=w.query.dtype)
    spec_bias.masked_fill_(~tree, float("-inf"))
    prefix_bias = fmha.attn_bias.BlockDiagonalPaddedKeysMask.from_seqlens(
        q_seqlen=[w.width] * w.batch,
        kv_seqlen=prefixes,
        kv_padding=padded,
        device=w.query.device,
    )
    query = w.query.view(w.batch, w.width, shape.num_kv_heads, group, shape.head_size)
    # Its own rule for the committed keys; left to itself, 0.0.35 raises TypeError.
    prefix_op = fmha.flash.FwOp
    if module.use_triton_splitk_for_prefix(w.batch, shape.num_kv_heads, w.width):
        prefix_op = fmha.triton_splitk.FwOp
    return lambda pool: module.tree_attention(
        query, *pools[pool % w.num_pools], spec_bias, prefix_bias, prefix_op=prefix_op
    ).view_as(w.query)


COMPARATORS: dict[str, Callable[[Workload], Call]] = {
    "FA prefix": prefix_call,
    "FA3": flash_attention_3,
    "FA3 free": flash_attention_3_free,
    "vLLM Triton": vllm_triton,
    "FlashInfer mask": flashinfer_custom_mask,
    "xformers tree": xformers_tree,
}

# Comparators that take a tree, and so can be held against the reference: whether all
# requests must share one.
ONE_TREE = {"FlashInfer mask": False, "xformers tree": True}
