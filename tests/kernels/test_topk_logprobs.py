# SPDX-License-Identifier: Apache-2.0
"""topk_logprobs against sorting each row in Python floats."""

import math

import pytest
import torch

from vllm_dflash_kernels.dispatch import next_power_of_2
from vllm_dflash_kernels.testing import assert_close, poisoned
from vllm_dflash_kernels.topk_logprobs import topk_logprobs, topk_workspace
from vllm_dflash_kernels.topk_logprobs import workspace as splitting

# fp32 sum of exponentials over a few thousand terms.
LOGPROB_RATIO = 1e-5


def brute_force(logits, num_candidates, temperatures=None):
    tokens, logprobs = [], []
    for row, values in enumerate(logits.tolist()):
        values = [-math.inf if math.isnan(v) else v for v in values]
        scale = 1.0 / temperatures[row] if temperatures else 1.0
        order = sorted(range(len(values)), key=lambda i: (-values[i], i))
        order = order[:num_candidates]
        top = values[order[0]]
        if top == -math.inf:
            logprob = [-math.inf] * len(order)
        else:
            total = math.log(math.fsum(math.exp((v - top) * scale) for v in values))
            logprob = [(values[i] - top) * scale - total for i in order]
        missing = num_candidates - len(order)
        tokens.append(order + [0] * missing)
        logprobs.append(logprob + [-math.inf] * missing)
    return torch.tensor(tokens, dtype=torch.int32), torch.tensor(logprobs)


def check(logits, num_candidates, impl, temperatures=None, **kwargs):
    expected_tokens, expected = brute_force(logits, num_candidates, temperatures)
    tokens, logprobs = topk_logprobs(logits, num_candidates, impl=impl, **kwargs)
    assert tokens.dtype == torch.int32 and logprobs.dtype == torch.float32
    assert torch.equal(tokens.cpu(), expected_tokens)
    assert_close("logprobs", expected, logprobs, LOGPROB_RATIO)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("vocab_size", "num_candidates"),
    [(1, 1), (1, 3), (5, 8), (31, 32), (257, 1), (1009, 5), (4099, 8), (12289, 32)],
)
def test_matches_sorting_at_odd_vocabularies(
    vocab_size, num_candidates, dtype, impl, device
):
    torch.manual_seed(vocab_size)
    logits = (torch.randn(3, vocab_size) * 5).to(dtype).to(device)
    check(logits, num_candidates, impl)


@pytest.mark.parametrize("vocab_size", [7, 300, 8200])
def test_ties_go_to_the_lower_token(vocab_size, impl, device):
    torch.manual_seed(0)
    logits = torch.randint(0, 4, (4, vocab_size)).float()
    logits[1] = 2.5  # all equal
    logits[2, : vocab_size // 2] = -torch.inf
    check(logits.to(device), 8, impl)


def test_ties_across_split_borders_go_to_the_lower_token(impl, device):
    span = splitting.BLOCK * splitting.split_vocab(1, 12289)[0]
    logits = torch.zeros(1, 12289)
    logits[0, [span - 1, span, span + 1, 2 * span, 12288]] = 1.0
    tokens, _ = topk_logprobs(logits.to(device), 4, impl=impl)
    assert tokens.tolist() == [[span - 1, span, span + 1, 2 * span]]


def test_zero_signs_tie(impl, device):
    tokens, _ = topk_logprobs(
        torch.tensor([[-1.0, -0.0, 0.0, -0.0]], device=device), 3, impl=impl
    )
    assert tokens.tolist() == [[1, 2, 3]]


def test_impossible_tokens_have_no_probability(impl, device):
    inf, nan = torch.inf, torch.nan
    logits = torch.full((5, 600), -inf)
    logits[1, 599] = 3.0
    logits[2, [4, 300]] = torch.tensor([nan, -2.0])
    logits[3] = nan
    logits[4, 10] = -3.3895e38  # the mask value of bf16 models
    logits[4, 11] = 0.0
    check(logits[:4].to(device), 3, impl)
    tokens, logprobs = topk_logprobs(logits.to(device), 3, impl=impl)
    assert tokens[0].tolist() == [0, 1, 2] and tokens[1].tolist() == [599, 0, 1]
    assert logprobs[1].tolist() == [0.0, -inf, -inf]
    assert tokens[4].tolist()[0] == 11
    assert logprobs[4].tolist() == [0.0, -inf, -inf]


def test_infinite_logit_takes_all_the_probability(impl, device):
    logits = torch.zeros(1, 40)
    logits[0, 7] = torch.inf
    tokens, logprobs = topk_logprobs(logits.to(device), 2, impl=impl)
    assert tokens.tolist() == [[7, 0]] and logprobs[0, 0] == 0.0


@pytest.mark.parametrize("row_stride", [4111, 4112])
def test_rows_need_not_be_contiguous(row_stride, impl, device):
    torch.manual_seed(1)
    storage = torch.full((4, row_stride), 1e4, dtype=torch.bfloat16, device=device)
    logits = storage[:, :4100]
    logits.copy_(torch.randn(4, 4100))
    check(logits[::2], 4, impl)


def test_temperature_scales_the_row_of_its_slot(impl, device):
    torch.manual_seed(2)
    logits = torch.randn(5, 700, device=device) * 3
    temperature = torch.tensor([torch.nan, 0.3, 0.0, 2.0], device=device)
    row_to_slot = torch.tensor([3, 1, -1, 2, 1, 77], device=device)
    check(
        logits,
        6,
        impl,
        temperatures=[2.0, 0.3, 1.0, 1.0, 0.3],
        temperature=temperature,
        row_to_slot=row_to_slot,
    )


def test_temperature_without_slots_is_not_applied(impl, device):
    logits = torch.randn(2, 50, device=device)
    check(logits, 2, impl, temperature=torch.full((2,), 5.0, device=device))


def test_long_splits_give_the_same(impl, device, monkeypatch):
    monkeypatch.setattr(splitting, "_MAX_PROGRAMS", 1)
    assert splitting.split_vocab(2, 9001) == (32, 2)
    torch.manual_seed(3)
    check(torch.randn(2, 9001, device=device), 8, impl)


def test_given_outputs_and_workspace_allocate_nothing(device, monkeypatch):
    logits = torch.randn(3, 5000, device=device)
    tokens = poisoned(3, 8, dtype=torch.int32, device=device)
    logprobs = poisoned(3, 8, dtype=torch.float32, device=device)
    workspace = topk_workspace(3, 5000, 8, device)
    expected = topk_logprobs(logits, 8, impl="triton")

    def refuse(*args, **kwargs):
        raise AssertionError("allocated")

    launched = []
    with monkeypatch.context() as patch:
        for name in ("empty", "zeros", "full", "empty_like"):
            patch.setattr(torch, name, refuse)
        import vllm_dflash_kernels.topk_logprobs.kernel as kernel

        launch = kernel.topk_logprobs
        patch.setattr(
            kernel, "topk_logprobs", lambda *a: launched.append(a) or launch(*a)
        )
        out = topk_logprobs(
            logits,
            8,
            out_tokens=tokens,
            out_logprobs=logprobs,
            workspace=workspace,
            impl="triton",
        )
    assert launched and out[0] is tokens and out[1] is logprobs
    assert torch.equal(tokens, expected[0]) and torch.equal(logprobs, expected[1])


def test_workspace_serves_every_smaller_batch():
    for vocab_size in (1, 300, 32000, 151936, 262144):
        for max_rows in (1, 15, 120, 121, 480, 1000):
            size = topk_workspace(max_rows, vocab_size, 5, "meta").numel()
            planes = 2 * next_power_of_2(5) + 2
            for num_rows in range(1, max_rows + 1):
                _, splits = splitting.split_vocab(num_rows, vocab_size)
                assert num_rows * splits * planes <= size


def test_candidate_count_is_checked():
    with pytest.raises(ValueError, match=r"\[1, 32\] \(got 33\)"):
        topk_logprobs(torch.zeros(1, 4), 33)
