# SPDX-License-Identifier: Apache-2.0
"""One small verify round and its tree attention, for compute-sanitizer.

    compute-sanitizer --tool memcheck python kernels/benchmarks/sanitize_round.py
    compute-sanitizer --tool racecheck python kernels/benchmarks/sanitize_round.py 47

Every kernel runs once on odd sizes: vocabulary 49153, 3 requests, trees of 47 and of
100 nodes (or of those named), split and unsplit keys, a given prefix, fp8 bytes, a
sliding window. Memory comes from the driver, without a caching allocator, so that a
write past the end of a tensor is seen. Results are compared with the references.
"""

import os
import sys
from pathlib import Path

# Before torch is imported.
os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "kernels"), str(ROOT / "tests" / "helpers")]

import torch  # noqa: E402
from attention_batches import Batch, check, tree  # noqa: E402

from vllm_dflash_kernels.testing import random_tree  # noqa: E402
from vllm_dflash_kernels.testing_round import VerifyRound  # noqa: E402


def run_round(budget: int) -> None:
    generator = torch.Generator().manual_seed(budget)
    logits = 4 * torch.randn(3 * 15, 49153, generator=generator)
    caches = [torch.randn(30, 3, 16, 128, generator=generator) for _ in range(2)]
    rounds = []
    for device, impl in (("cpu", "reference"), ("cuda", "triton")):
        rounds.append(
            VerifyRound(
                3,
                depth=15,
                budget=budget,
                num_candidates=8,
                logits=logits.to(device),
                caches=[cache.clone().to(device) for cache in caches],
                impl=impl,
            )
        )
    expected, actual = rounds
    expected.topk()
    expected.build()
    expected.accept_deepest_path()
    actual.target_tokens.copy_(expected.target_tokens)
    for round_ in rounds:
        round_.run()
    torch.cuda.synchronize()
    results = actual.results()
    for name in ("parents", "ancestors", "sampled", "path", "rows", "cache 0"):
        assert torch.equal(results[name], expected.results()[name]), name


def run_attention(num_nodes: int) -> None:
    import random

    rng = random.Random(num_nodes)
    requests = [tree(n, random_tree(num_nodes, rng)) for n in (700, 1, 17)]
    device = torch.device("cuda")
    shape = dict(num_heads=8, num_kv_heads=2, head_size=128)
    wide = Batch(requests, device, dtype=torch.bfloat16, padding=1, **shape)
    for options in (dict(num_splits=1), dict(num_splits=5), dict(sliding_window=50)):
        window = options.get("sliding_window", -1)
        expected = wide.expected(sliding_window=window)
        check(str(options), expected, wide.run(**options))
    check("prefix", wide.expected(), wide.run(prefix_state=wide.prefix_state()))
    narrow = Batch(requests, device, dtype=torch.bfloat16, fp8=True, **shape)
    check("fp8", narrow.expected(), narrow.run(num_splits=3))


def main() -> None:
    for budget in [int(word) for word in sys.argv[1:]] or (47, 100):
        run_round(budget)
        run_attention(budget + 1)
    torch.cuda.synchronize()
    print("every kernel ran and agrees with its reference")


if __name__ == "__main__":
    main()
