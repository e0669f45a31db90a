# SPDX-License-Identifier: Apache-2.0
"""All small kernels in their order: equal to the references, and as a CUDA graph."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import vllm_dflash_kernels
from vllm_dflash_kernels.testing_round import VerifyRound


def spread_logits(num_rows, vocab_size, seed):
    """Logits a few ulp of fp32 cannot reorder: distinct, and so are their sums."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.rand(num_rows, vocab_size, generator=generator)
    return logits + 4 * torch.randn(num_rows, vocab_size, generator=generator)


def make_round(impl, device, *, num_reqs=3, seed=0, budget=20):
    depth, vocab_size = 6, 500
    generator = torch.Generator().manual_seed(1)
    return VerifyRound(
        num_reqs,
        depth=depth,
        budget=budget,
        num_candidates=4,
        logits=spread_logits(num_reqs * depth, vocab_size, seed).to(device),
        caches=[
            torch.randn(24, 4, 2, 8, generator=generator).to(device).transpose(1, 2)
            for _ in range(2)
        ],
        impl=impl,
    )


def check_equal(round_, reference):
    expected = reference.results()
    for name, tensor in round_.results().items():
        assert torch.equal(tensor, expected[name]), name


@pytest.fixture
def rounds(device):
    """The same inputs for both implementations, with drafts that get accepted."""
    pair = [make_round("triton", device), make_round("reference", torch.device("cpu"))]
    reference = pair[1]
    reference.topk()
    reference.build()
    reference.accept_deepest_path()
    pair[0].target_tokens.copy_(reference.target_tokens)
    return pair


def test_round_equals_the_references(rounds):
    for round_ in rounds:
        round_.run()
    check_equal(*rounds)
    assert rounds[0].num_sampled.min() > 1
    places = torch.arange(rounds[0].path.shape[1], device=rounds[0].path.device)
    assert (rounds[0].path > places).any(), "no accepted path had to be moved"


def test_operations_import_without_triton():
    # Every operation, through the helper that uses them all.
    process = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys, vllm_dflash_kernels.testing_round as _; "
            "sys.exit('triton' in sys.modules)",
        ],
        cwd=Path(vllm_dflash_kernels.__file__).parent.parent,
        check=False,
    )
    assert process.returncode == 0


@pytest.mark.gpu
def test_round_is_captured_without_waiting_for_the_device(rounds, device):
    round_, reference = rounds
    caches = [cache.clone() for cache in round_.table.caches]
    round_.run()  # compiles
    for cache, before in zip(round_.table.caches, caches, strict=True):
        cache.copy_(before)
    torch.cuda.synchronize()
    allocated = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        round_.topk()
        round_.build()
        round_.prepare_only()
        round_.walk()
        round_.list_rows()
        round_.compact()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == allocated

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        round_.run()
    # Another draft on the same addresses.
    logits = spread_logits(*reference.logits.shape, seed=9)
    reference.logits.copy_(logits)
    reference.topk()
    reference.build()
    reference.accept_deepest_path()
    reference.run()
    round_.logits.copy_(logits)
    round_.target_tokens.copy_(reference.target_tokens)
    for cache, before in zip(round_.table.caches, caches, strict=True):
        cache.copy_(before)
    graph.replay()
    torch.cuda.synchronize()
    check_equal(round_, reference)
