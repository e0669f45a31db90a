# SPDX-License-Identifier: Apache-2.0
"""Time of the small kernels of a verify round, each in a CUDA graph.

    python kernels/benchmarks/bench_small_kernels.py [--num-reqs 1 8 32] [--budget 48]

Prints microseconds a call, launch gaps between kernels of one graph included, the
median of several replays of a graph with many calls. Inputs stay in L2, as the logits
of a draft step do. Refuses to time kernels whose results differ from the references.
"""

import argparse
import statistics

import torch

from vllm_dflash_kernels.testing import assert_close
from vllm_dflash_kernels.testing_round import VerifyRound

CALLS_PER_GRAPH = 20
REPLAYS = 15
STAGES = ["topk", "build", "prepare_only", "walk", "list_rows", "compact"]


def make_round(args, num_reqs: int, device: str) -> VerifyRound:
    generator = torch.Generator().manual_seed(0)
    num_rows = num_reqs * args.depth
    logits = 4 * torch.randn(num_rows, args.vocab_size, generator=generator)
    num_blocks = num_reqs * (args.budget + 1) // 16 + 1
    caches = [
        torch.zeros(num_blocks, 16, args.kv_heads, 256, dtype=torch.bfloat16)
        .to(device)
        .transpose(1, 2)
        for _ in range(args.layers)
    ]
    return VerifyRound(
        num_reqs,
        depth=args.depth,
        budget=args.budget,
        num_candidates=args.num_candidates,
        logits=logits.to(device, torch.bfloat16),
        caches=caches,
    )


def check(round_: VerifyRound, reference: VerifyRound) -> None:
    """Run both and compare; leaves long accepted paths to be timed."""
    for stage, most in (("topk_noise", 1e-4), ("topk", 1e-5)):
        for each in (reference, round_):
            getattr(each, stage)()
        assert_close(stage, reference.cand_logprobs, round_.cand_logprobs, most)
    # bf16 logits give equal scores, which the last bit of a logarithm would order.
    reference.cand_logprobs.copy_(round_.cand_logprobs)
    for each in (reference, round_):
        each.build()
        each.accept_deepest_path()
        for stage in ("prepare", "walk", "list_rows"):
            getattr(each, stage)()
    for name in ("cand_tokens", "draft_tokens", "path", "sampled", "rows"):
        expected = getattr(reference, name)
        if not torch.equal(getattr(round_, name).cpu(), expected):
            raise SystemExit(f"{name} differs from the reference: not timed.")


def time_us(function) -> float:
    function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS_PER_GRAPH):
            function()
    times = []
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / CALLS_PER_GRAPH)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-reqs", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--budget", type=int, default=48)
    parser.add_argument("--depth", type=int, default=15)
    parser.add_argument("--num-candidates", type=int, default=8)
    parser.add_argument("--vocab-size", type=int, default=151936)
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--kv-heads", type=int, default=8)
    args = parser.parse_args()
    print(torch.cuda.get_device_name(), vars(args))
    for num_reqs in args.num_reqs:
        round_ = make_round(args, num_reqs, "cuda")
        reference = make_round(args, num_reqs, "cpu")
        check(round_, reference)

        def all_stages(round_=round_):
            for stage in STAGES:
                getattr(round_, stage)()

        times = {stage: time_us(getattr(round_, stage)) for stage in STAGES}
        times["all"] = time_us(all_stages)
        # Instead of topk, for requests with a temperature.
        times["topk_noise"] = time_us(round_.topk_noise)
        line = "  ".join(f"{stage} {us:.1f}" for stage, us in times.items())
        print(f"num_reqs {num_reqs} [us]: {line}")


if __name__ == "__main__":
    main()
