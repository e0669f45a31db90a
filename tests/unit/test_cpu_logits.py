# SPDX-License-Identifier: Apache-2.0
"""Twins of vocabulary-sized kernels compute what the interpreted kernels compute."""

import importlib

import numpy as np
import pytest
import torch
import vllm.v1.worker.cpu.shm  # noqa: F401  (patches torch before the next imports)

from vllm_dflash.cpu import logits as twins
from vllm_dflash.cpu import replacements

SAMPLE = "vllm.v1.worker.gpu.sample"
NUM_ROWS, NUM_SLOTS = 6, 4
SLOTS = torch.tensor([0, 1, 2, 3, 3, 3], dtype=torch.int32)
# Log-sums are added in another order than the kernel's blocks of 1024.
LOGPROB_TOLERANCE = 2e-6
# One multiplication and two subtractions in fp32.
PENALTY_TOLERANCE = 1e-6

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="compares with interpreted kernels"
)


def interpreted(target: str):
    if target in replacements.originals:
        return replacements.originals[target]
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


def random_logits(vocab_size: int, seed: int = 0, dtype=torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    wide = torch.randn(NUM_ROWS, vocab_size + 3, generator=generator) * 3
    return wide[:, :vocab_size].to(dtype)


@pytest.mark.parametrize("vocab_size", [1, 257, 8193])
def test_apply_temperature(vocab_size):
    temperature = torch.tensor([0.0, 1.0, 0.3, 1.7])
    expected, actual = random_logits(vocab_size), random_logits(vocab_size)
    interpreted(f"{SAMPLE}.gumbel:apply_temperature")(expected, SLOTS, temperature)
    twins.apply_temperature(actual, SLOTS, temperature)
    assert torch.equal(actual, expected)
    assert not torch.equal(actual, random_logits(vocab_size))


@pytest.mark.parametrize("vocab_size", [2, 257, 1025])
def test_apply_min_p(vocab_size):
    min_p = torch.tensor([0.0, 0.5, 0.05, 1.0])
    expected, actual = random_logits(vocab_size), random_logits(vocab_size)
    interpreted(f"{SAMPLE}.min_p:apply_min_p")(expected, SLOTS, min_p)
    twins.apply_min_p(actual, SLOTS, min_p)
    assert torch.equal(actual, expected)
    assert torch.isfinite(actual[0]).all()
    assert torch.isfinite(actual[3]).sum() == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [5, 1025])
def test_compute_token_logprobs(vocab_size, dtype):
    logits = random_logits(vocab_size, dtype=dtype)
    logits[2, 1:] = -torch.inf
    tokens = torch.randint(0, vocab_size, (NUM_ROWS, 4))
    name = f"{SAMPLE}.logprob:compute_token_logprobs"
    expected = interpreted(name)(logits, tokens)
    actual = twins.compute_token_logprobs(logits, tokens)
    assert actual.dtype == torch.float32
    torch.testing.assert_close(
        actual, expected, atol=LOGPROB_TOLERANCE, rtol=LOGPROB_TOLERANCE
    )
    torch.testing.assert_close(actual, logits.float().log_softmax(-1).gather(1, tokens))


@pytest.mark.parametrize("vocab_size", [5, 8193])
def test_ranks_kernel(vocab_size):
    logits = random_logits(vocab_size)
    # Ties count.
    logits[1] = logits[1].round()
    tokens = torch.randint(0, vocab_size, (NUM_ROWS,))
    kernel = interpreted(f"{SAMPLE}.logprob:_ranks_kernel")
    args = (logits, logits.stride(0), tokens, vocab_size)
    expected = torch.full((NUM_ROWS,), -1)
    actual = torch.full((NUM_ROWS,), -1)
    kernel[(NUM_ROWS,)](expected, *args, BLOCK_SIZE=8192)
    replacements.TwinKernel(twins.ranks_kernel)[(NUM_ROWS,)](
        actual, *args, BLOCK_SIZE=8192
    )
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("vocab_size", [40, 300])
@pytest.mark.parametrize(
    ("repetition", "frequency", "presence"),
    [(1.3, 0.0, 0.0), (1.0, 0.4, 0.0), (1.0, 0.0, 0.7), (0.8, 0.2, -0.3)],
)
def test_apply_penalties(vocab_size, repetition, frequency, presence):
    generator = torch.Generator().manual_seed(3)
    words = -(-vocab_size // 32)
    prompt_bits = torch.randint(
        -(2**31), 2**31 - 1, (NUM_SLOTS, words), generator=generator
    ).int()
    counts = torch.randint(0, 3, (NUM_SLOTS, vocab_size), generator=generator).int()
    penalties = [
        torch.tensor([neutral, value, value, value])
        for neutral, value in ((1.0, repetition), (0.0, frequency), (0.0, presence))
    ]
    # The three rows of slot 3 are its last token and two drafts, one of them twice.
    tokens = torch.tensor([1, 2, 3, 7, 9, 9], dtype=torch.int32)
    local = torch.tensor([0, 0, 0, 0, 1, 2], dtype=torch.int32)
    args = (SLOTS, tokens, local, *penalties, prompt_bits, counts)
    expected, actual = random_logits(vocab_size), random_logits(vocab_size)
    interpreted(f"{SAMPLE}.penalties:apply_penalties")(expected, *args)
    twins.apply_penalties(actual, *args)
    torch.testing.assert_close(
        actual, expected, atol=PENALTY_TOLERANCE, rtol=PENALTY_TOLERANCE
    )
    assert torch.equal(actual[0], random_logits(vocab_size)[0])
    assert not torch.equal(actual[1], random_logits(vocab_size)[1])


def test_apply_grammar_bitmask_kernel_by_hand():
    """Not against vLLM's kernel, which the interpreter can't run."""
    vocab_size, words, stride = 70, 3, 8
    generator = torch.Generator().manual_seed(5)
    bitmask = torch.randint(-(2**31), 2**31 - 1, (4, words), generator=generator).int()
    # Request 0 has two rows, request 2 three; position 5 of request 2 does not exist.
    cu_num_logits = torch.tensor([0, 2, 3, 6], dtype=torch.int32)
    indices = torch.tensor([1, 2 * stride, 2 * stride + 2, 2 * stride + 5]).int()
    logits, expected = random_logits(vocab_size), random_logits(vocab_size)
    replacements.TwinKernel(twins.apply_grammar_bitmask_kernel)[(4, 1)](
        logits,
        logits.stride(0),
        indices,
        cu_num_logits,
        bitmask,
        bitmask.stride(0),
        vocab_size,
        MASK_STRIDE=stride,
        BLOCK_SIZE=8192,
    )
    for mask, row in ((0, 1), (1, 3), (2, 5)):
        for token in range(vocab_size):
            word = int(bitmask[mask, token // 32]) & 0xFFFFFFFF
            if not word >> (token % 32) & 1:
                expected[row, token] = -torch.inf
    assert torch.equal(logits, expected)


@pytest.mark.parametrize("top_k", [None, [1, 3, 20, 20, 2, 20]])
@pytest.mark.parametrize("top_p", [None, [1.0, 0.1, 0.5, 0.9, 1.0, 0.3]])
def test_apply_top_k_top_p_by_hand(top_k, top_p):
    logits = random_logits(20)
    expected = logits.clone()
    for row in range(NUM_ROWS):
        order = logits[row].argsort(descending=True)
        if top_k is not None:
            expected[row, order[top_k[row] :]] = -torch.inf
        if top_p is not None:
            probs = expected[row].softmax(-1)[order].numpy().astype(np.float64)
            before = np.concatenate([[0.0], np.cumsum(probs)[:-1]])
            expected[row, order[torch.from_numpy(before >= top_p[row])]] = -torch.inf
    actual = twins.apply_top_k_top_p(
        logits,
        None if top_k is None else torch.tensor(top_k, dtype=torch.int32),
        None if top_p is None else torch.tensor(top_p),
    )
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("use_top_k", [False, True])
@pytest.mark.parametrize("use_top_p", [False, True])
def test_apply_top_k_top_p_equals_the_torch_path(use_top_k, use_top_p):
    """vLLM's torch path, because the interpreter can't run vLLM's kernel."""
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch

    if not (use_top_k or use_top_p):
        return
    generator = torch.Generator().manual_seed(9)
    vocab_size = 4099
    k = torch.randint(1, vocab_size, (NUM_ROWS,), generator=generator).int()
    k[0] = vocab_size
    p = torch.rand(NUM_ROWS, generator=generator).clamp(min=0.05)
    # Below the smallest probability of the likeliest token.
    p[1] = 1e-6
    args = (k if use_top_k else None, p if use_top_p else None)
    expected = apply_top_k_top_p_pytorch(random_logits(vocab_size), *args)
    actual = twins.apply_top_k_top_p(random_logits(vocab_size), *args)
    assert torch.equal(actual, expected)
    assert torch.isfinite(actual).any(1).all()


def test_top_k_keeps_ties():
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0, 3.0]])
    actual = twins.apply_top_k_top_p(logits, torch.tensor([2]), None)
    assert torch.isfinite(actual).tolist() == [[False, True, True, False, True]]
