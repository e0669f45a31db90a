# SPDX-License-Identifier: Apache-2.0
"""What the attention of one layer costs the host where no CUDA graph holds it.

    python kernels/benchmarks/bench_launch.py [--calls 1500]

Prints microseconds of the host a call, eager, for a verify batch that is too small to
keep the GPU busy: tree attention launched through Triton, as the first layer of a step
does; the same launches repeated, as its other layers do; and FlashAttention-3 over the
same rows, where vLLM is installed. The two outputs must be equal first.
"""

import argparse
import sys
import time
from collections.abc import Callable

import torch

from vllm_dflash_kernels.tree_attention import TreeAttentionWorkspace
from vllm_dflash_kernels.tree_attention.step import TreeAttentionStep

# Heads, KV heads, head size, requests.
SHAPES = [(9, 3, 64, 1), (9, 3, 64, 8), (32, 8, 128, 1), (32, 8, 128, 8)]
WIDTH, SEQ_LEN, BLOCK_SIZE = 48, 150, 16
WARM_CALLS, CALLS_IN_FLIGHT = 50, 100


def time_calls(run: Callable[[], object], calls: int) -> float:
    """Microseconds of the host a call; the GPU is never far behind."""
    for _ in range(WARM_CALLS):
        run()
    torch.cuda.synchronize()
    elapsed = 0.0
    for first in range(0, calls, CALLS_IN_FLIGHT):
        count = min(CALLS_IN_FLIGHT, calls - first)
        start = time.perf_counter()
        for _ in range(count):
            run()
        elapsed += time.perf_counter() - start
        torch.cuda.synchronize()
    return 1e6 * elapsed / calls


def flash_attention() -> Callable[..., object] | None:
    try:
        from vllm.vllm_flash_attn.flash_attn_interface import flash_attn_varlen_func
    except ImportError:
        return None
    return flash_attn_varlen_func


def bench(shape: tuple[int, int, int, int], calls: int) -> list[str]:
    """One row of the table."""
    heads, kv_heads, size, requests = shape
    device, ints = torch.device("cuda"), dict(device="cuda", dtype=torch.int32)
    torch.manual_seed(0)
    blocks = -(-SEQ_LEN // BLOCK_SIZE)
    kv = torch.randn(requests * blocks, kv_heads, BLOCK_SIZE, 2 * size, device=device)
    kv = kv.to(torch.bfloat16)
    query = torch.randn(requests * WIDTH, heads, size, device=device).to(torch.bfloat16)
    out = torch.empty_like(query)
    scale = size**-0.5
    table = torch.arange(requests * blocks, **ints).view(requests, blocks)
    seq_lens = torch.full((requests,), SEQ_LEN, **ints)
    starts = torch.arange(0, requests * WIDTH + 1, WIDTH, **ints)
    # A chain: every row sees the rows before it.
    bits = (1 << torch.arange(1, WIDTH + 1, dtype=torch.int64)) - 1
    ancestors = bits.view(1, WIDTH, 1).expand(requests, WIDTH, 1).contiguous()
    shared = dict(
        block_table=table,
        seq_lens=seq_lens,
        query_start_loc=starts,
        ancestors=ancestors.to(device),
        tree_len=torch.full((requests,), WIDTH, **ints),
        max_query_len=WIDTH,
        max_seq_len=2048,
        workspace=TreeAttentionWorkspace.allocate(size, device, dtype=query.dtype),
    )
    step = TreeAttentionStep(**shared)

    def first_layer() -> None:
        TreeAttentionStep(**shared)(query, kv, out, scale=scale)

    def other_layer() -> None:
        step(query, kv, out, scale=scale)

    first_layer()
    expected = out.clone()
    for _ in range(2):
        out.zero_()
        other_layer()
        if not torch.equal(out, expected):
            raise SystemExit("the repeated launch differs: not timed.")
    times = [time_calls(first_layer, calls), time_calls(other_layer, calls)]
    flash = flash_attention()
    if flash is not None:
        keys, values = kv.transpose(1, 2).split(size, dim=-1)
        options = dict(
            q=query,
            k=keys,
            v=values,
            out=out,
            cu_seqlens_q=starts,
            max_seqlen_q=WIDTH,
            seqused_k=seq_lens,
            max_seqlen_k=2048,
            softmax_scale=scale,
            causal=True,
            block_table=table,
            fa_version=3,
        )
        times.append(time_calls(lambda: flash(**options), calls))
    cells = [f"{heads}/{kv_heads}/{size}", str(requests), *(f"{t:.1f}" for t in times)]
    return cells if flash is not None else [*cells, "absent"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=1500)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("bench_launch: needs an NVIDIA GPU")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print("| heads/kv/size | requests | first layer | other layers | FA3 |")
    print("|---|---|---|---|---|")
    for shape in SHAPES:
        print("| " + " | ".join(bench(shape, args.calls)) + " |", flush=True)


if __name__ == "__main__":
    main()
