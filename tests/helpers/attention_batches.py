# SPDX-License-Identifier: Apache-2.0
"""Batches for tree attention tests, with an oracle that works from parent lists."""

import random
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from vllm_dflash_kernels.testing import (
    POISON_INT,
    ancestor_matrix,
    assert_close,
    pack_bits,
    poisoned,
    random_tree,
)
from vllm_dflash_kernels.tree_attention import tree_attention

# RMS error over RMS value: accumulation order (fp32), rounding of P and of the output.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 5e-3}
CHAIN5 = [-1, 0, 1, 2, 3]
#      0
#    1   2
#   3 4   6
#   5
TREE7 = [-1, 0, 0, 1, 1, 3, 2]


@dataclass
class Request:
    """``prefix`` committed keys, ``causal`` plain rows, then a tree (or none)."""

    prefix: int
    causal: int = 0
    parents: tuple[int, ...] = ()

    @property
    def query_len(self) -> int:
        return self.causal + len(self.parents)

    @property
    def seq_len(self) -> int:
        return self.prefix + self.query_len

    def positions(self) -> list[int]:
        start = self.prefix + self.causal
        depths = [sum(row) - 1 for row in ancestor_matrix(list(self.parents))]
        return [*range(start), *(start + depth for depth in depths)]

    def visible(self, row: int, window: int) -> list[int]:
        """Slots that a query row sees."""
        start = self.prefix + self.causal
        slots = list(range(min(self.prefix + row + 1, start)))
        node = row - self.causal
        while node >= 0:
            slots.append(start + node)
            node = self.parents[node]
        at = self.positions()
        here = at[self.prefix + row]
        return sorted(s for s in slots if window <= 0 or here - at[s] < window)


def tree(prefix, parents, causal=0):
    return Request(prefix, causal, tuple(parents))


class Batch:
    """Random queries and a paged cache with NaN in every slot that nobody owns."""

    def __init__(
        self, requests, device, *, num_heads=4, num_kv_heads=2, head_size=64,
        block_size=16, layout="NHD", dtype=torch.float32, fp8=False, width=None,
        padding=0, seed=0,
    ):  # fmt: skip
        generator = torch.Generator().manual_seed(seed)
        self.requests = requests
        self.shape = (num_heads, num_kv_heads, head_size)
        self.width = width or max(r.query_len for r in requests)
        num_rows = len(requests) + padding
        counts = [-(-r.seq_len // block_size) for r in requests]
        num_blocks = sum(counts) + 2
        # Block 0 belongs to nobody, as in vLLM.
        ids = (torch.randperm(num_blocks - 1, generator=generator) + 1).tolist()
        table = torch.full((num_rows, max(counts) + 3), POISON_INT, dtype=torch.int32)
        order = {"NHD": (0, 2, 1, 3), "HND": (0, 1, 2, 3)}[layout]
        size = [num_blocks, num_kv_heads, block_size, 2 * head_size]
        storage = torch.full([size[i] for i in order], torch.nan, dtype=torch.float32)
        kv = storage.permute(order)
        self.keys, self.values = [], []
        for r, request in enumerate(requests):
            mine = [ids.pop() for _ in range(counts[r])]
            table[r, : counts[r]] = torch.tensor(mine)
            rows = torch.randn(
                request.seq_len, num_kv_heads, 2 * head_size, generator=generator
            )
            for slot in range(request.seq_len):
                kv[mine[slot // block_size], :, slot % block_size] = rows[slot]
        if fp8:
            storage = storage.to(torch.float8_e4m3fn)
        elif dtype != torch.float32:
            storage = storage.to(dtype)
        storage = storage.to(device)
        kv = storage.permute(order)
        self.k_scale = torch.tensor(0.5, device=device) if fp8 else None
        self.v_scale = torch.tensor(1.75, device=device) if fp8 else None
        self.key_cache = kv[..., :head_size]
        self.value_cache = kv[..., head_size:]
        starts = np.cumsum([0, *(r.query_len for r in requests), *[0] * padding])
        lengths = [r.seq_len for r in requests] + [0] * padding
        words = -(-self.width // 64)
        self.ancestors = poisoned(num_rows, self.width, words, dtype=torch.int64)
        for r, request in enumerate(requests):
            if request.parents:
                bits = pack_bits(ancestor_matrix(list(request.parents)))
                self.ancestors[r, : bits.shape[0], : bits.shape[1]] = bits
                self.ancestors[r, : bits.shape[0], bits.shape[1] :] = 0
        self.ancestors = self.ancestors.to(device)
        tree_lens = [len(r.parents) for r in requests] + [0] * padding
        self.block_table = table.to(device)
        ints = dict(dtype=torch.int32, device=device)
        self.query_start_loc = torch.tensor(starts, **ints)
        self.seq_lens = torch.tensor(lengths, **ints)
        self.tree_len = torch.tensor(tree_lens, **ints)
        total = int(starts[-1]) + 3
        query = torch.randn(total, num_heads, head_size, generator=generator)
        # A slice of a fused projection: the token stride exceeds the row.
        fused = torch.zeros(total, num_heads + num_kv_heads, head_size, dtype=dtype)
        fused[:, :num_heads] = query.to(dtype)
        self.query = fused.to(device)[:, :num_heads]
        self.out = poisoned(total, num_heads, head_size, dtype=dtype, device=device)

    def prefix_state(self, softcap=0.0):
        """Attention to the committed keys: result into ``out``, log-sum-exps.

        Undefined (NaN, infinite) for a request without committed keys.
        """
        num_heads, num_kv_heads, head_size = self.shape
        total = self.query.shape[0]
        lse = torch.full((num_heads, total), torch.inf, device=self.out.device)
        out = torch.full_like(self.out, torch.nan)
        for r, request in enumerate(self.requests):
            if not request.prefix:
                continue
            group = num_heads // num_kv_heads
            keys = self.cached(self.key_cache, None, r)[: request.prefix]
            values = self.cached(self.value_cache, None, r)[: request.prefix]
            start = int(self.query_start_loc[r])
            rows = slice(start, start + request.query_len)
            logits = torch.einsum(
                "qhd,shd->hqs",
                self.query[rows].double(),
                keys.repeat_interleave(group, 1),
            )
            logits *= head_size**-0.5
            if softcap > 0:
                logits = softcap * torch.tanh(logits / softcap)
            lse[:, rows] = logits.logsumexp(-1).float()
            out[rows] = torch.einsum(
                "hqs,shd->qhd", logits.softmax(-1), values.repeat_interleave(group, 1)
            ).to(out.dtype)
        return out, lse

    def run(self, impl="triton", max_query_len=None, refused=False, **options):
        bf16_on_cpu = self.out.dtype == torch.bfloat16 and not self.out.is_cuda
        if impl == "triton" and bf16_on_cpu and not refused:
            pytest.skip("Triton's interpreter cannot multiply bf16")
        known = options.pop("prefix_state", None)
        self.out.fill_(torch.nan)
        if known is not None:
            self.out.copy_(known[0])
            options["prefix_lse"] = known[1]
        result = tree_attention(
            self.query, self.key_cache, self.value_cache,
            block_table=self.block_table, seq_lens=self.seq_lens,
            query_start_loc=self.query_start_loc, ancestors=self.ancestors,
            tree_len=self.tree_len, max_query_len=max_query_len or self.width,
            scale=self.shape[2] ** -0.5, out=self.out, k_scale=self.k_scale,
            v_scale=self.v_scale, impl=impl, **options,
        )  # fmt: skip
        assert result is self.out
        return self.out.clone()

    def cached(self, cache, scale, r):
        """Keys or values of request ``r``, fp64 [seq_len, num_kv_heads, D]."""
        size = cache.shape[2]
        table = self.block_table[r].tolist()
        slots = range(self.requests[r].seq_len)
        rows = torch.stack([cache[table[s // size], :, s % size] for s in slots])
        return rows.double() * (1.0 if scale is None else scale.double())

    def expected(self, *, sliding_window=-1, softcap=0.0, sinks=None, max_rows=None):
        """Row by row over the visible slots; NaN where nothing may be written."""
        num_heads, num_kv_heads, head_size = self.shape
        out = torch.full_like(self.query, torch.nan, dtype=torch.float64)
        for r, request in enumerate(self.requests):
            keys = self.cached(self.key_cache, self.k_scale, r)
            values = self.cached(self.value_cache, self.v_scale, r)
            keys = keys.repeat_interleave(num_heads // num_kv_heads, 1)
            values = values.repeat_interleave(num_heads // num_kv_heads, 1)
            start = int(self.query_start_loc[r])
            for row in range(min(request.query_len, max_rows or request.query_len)):
                slots = request.visible(row, sliding_window)
                q = self.query[start + row].double()
                logits = torch.einsum("hd,shd->hs", q, keys[slots]) * head_size**-0.5
                if softcap > 0:
                    logits = softcap * torch.tanh(logits / softcap)
                if sinks is not None:
                    logits = torch.cat([logits, sinks.double()[:, None]], 1)
                probs = torch.softmax(logits, 1)[:, : len(slots)]
                out[start + row] = torch.einsum("hs,shd->hd", probs, values[slots])
        return out


def check(name, expected, actual):
    """Written rows agree, and no other row was written."""
    written = ~torch.isnan(expected[:, 0, 0])
    assert torch.isnan(actual[~written]).all(), f"{name}: wrote a row it must not"
    assert_close(name, expected[written], actual[written], TOLERANCE[actual.dtype])


def random_requests(seed, sizes):
    rng = random.Random(seed)
    return [tree(prefix, random_tree(n, rng)) for prefix, n in sizes]
