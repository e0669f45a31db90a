# SPDX-License-Identifier: Apache-2.0
"""topk_logprobs against sorting each row in Python floats."""

import math

import pytest
import torch

from vllm_dflash_kernels.dispatch import next_power_of_2
from vllm_dflash_kernels.testing import assert_close, poisoned
from vllm_dflash_kernels.topk_logprobs import topk_logprobs, topk_workspace
from vllm_dflash_kernels.topk_logprobs import workspace as splitting
from vllm_dflash_kernels.topk_logprobs.noise_reference import draw_noise_reference

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


def rotate(x, bits):
    return (x << bits | x >> 32 - bits) & 0xFFFFFFFF


def scramble(word):
    return rotate(word * 0xCC9E2D51 & 0xFFFFFFFF, 15) * 0x1B873593 & 0xFFFFFFFF


def mix(h, word):
    return (rotate(h ^ scramble(word & 0xFFFFFFFF), 13) * 5 + 0xE6546B64) & 0xFFFFFFFF


def noise_of(seeds, positions, vocab_size):
    """MurmurHash3 of four words and the Gumbel noise of it, in Python's integers."""
    rows = []
    for seed, position in zip(seeds, positions, strict=True):
        row = []
        for token in range(vocab_size):
            h = 0
            for word in (seed, seed >> 32, position, token):
                h = mix(h, word)
            h ^= 16
            h = (h ^ h >> 16) * 0x85EBCA6B & 0xFFFFFFFF
            h = (h ^ h >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
            row.append(noise_of_hash(h ^ h >> 16))
        rows.append(row)
    return torch.tensor(rows)


def noise_of_hash(h):
    return -math.log(-math.log1p(-(h + 0.5) / 2**32))


def position_with_hash(h, seed, token):
    """The position at which a token's hash is h: MurmurHash3 backwards."""

    def divide(x, factor):
        return x * pow(factor, -1, 2**32) & 0xFFFFFFFF

    def unmix(h):
        return rotate(divide(h - 0xE6546B64 & 0xFFFFFFFF, 5), 19)

    h = divide(h ^ h >> 16, 0xC2B2AE35)
    h = divide(h ^ h >> 13 ^ h >> 26, 0x85EBCA6B)
    h = unmix(h ^ h >> 16 ^ 16) ^ scramble(token)
    state = 0
    for word in (seed, seed >> 32):
        state = mix(state, word)
    word = divide(unmix(h) ^ state, 0x1B873593)
    return divide(rotate(word, 17), 0xCC9E2D51)


SEEDS = [0, -5, 2**40 + 7, 123456789]
POSITIONS = [3, 0, 70_000, 9, 4, 2**31 + 1]


def test_noise_is_the_hash_of_seed_position_and_token():
    slots = torch.tensor([0, 1, 2, 3, 1, 2])
    seeds = torch.tensor(SEEDS)[slots]
    got = draw_noise_reference(seeds, torch.tensor(POSITIONS), 300)
    expected = noise_of(seeds.tolist(), POSITIONS, 300)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    assert got.min() > -2.5 and got.max() > 5


@pytest.mark.parametrize(
    ("vocab_size", "steps"), [(5, 1), (1009, 4), (12289, 16), (9001, 32)]
)
def test_noise_decides_where_there_is_a_temperature(
    vocab_size, steps, impl, device, monkeypatch
):
    if steps == 32:
        monkeypatch.setattr(splitting, "_MAX_PROGRAMS", 1)
    assert splitting.split_vocab(7, vocab_size)[0] == steps
    torch.manual_seed(vocab_size)
    logits = torch.randn(7, vocab_size) * 3
    logits[2, : vocab_size // 2] = -torch.inf
    logits[4, 0] = math.nan
    # Slots 0 and 3 are drawn at T = 1 and 0.5, slot 1 is greedy; one row is inert.
    temperature = torch.tensor([1.0, 0.0, 2.0, 0.5])
    slots = torch.tensor([0, 1, 3, 3, 2, -1, 0])
    positions = torch.tensor([*POSITIONS, 77])
    seeds = torch.tensor(SEEDS)
    tokens, logprobs = topk_logprobs(
        logits.to(device),
        4,
        temperature=temperature.to(device),
        row_to_slot=slots.to(device),
        is_scaled=False,
        seed=seeds.to(device),
        position=positions.to(device),
        impl=impl,
    )
    drawn = slots.clamp(min=0)
    noise = noise_of(seeds[drawn].tolist(), positions.tolist(), vocab_size)
    row_temperature = torch.where(slots >= 0, temperature[drawn], 0.0)
    noisy = logits + row_temperature[:, None] * noise
    expected_tokens, expected = brute_force(noisy, 4)
    assert torch.equal(tokens.cpu(), expected_tokens)
    torch.testing.assert_close(logprobs.cpu(), expected, atol=1e-4, rtol=1e-4)
    # The greedy and the inert row are those without noise.
    plain, _ = topk_logprobs(logits.to(device), 4, impl=impl)
    assert torch.equal(tokens[[1, 5]].cpu(), plain[[1, 5]].cpu())
    if vocab_size > 1000:
        assert not torch.equal(tokens[0].cpu(), plain[0].cpu())


def test_noise_has_a_temperature_of_its_own(impl, device):
    """Scores at T without the noise, and with the noise of T but not at T."""
    logits = torch.randn(2, 300, generator=torch.Generator().manual_seed(2))
    tokens, logprobs = topk_logprobs(
        logits.to(device),
        3,
        temperature=torch.tensor([2.0, 0.0], device=device),
        noise_temperature=torch.tensor([0.0, 1.5], device=device),
        row_to_slot=torch.tensor([0, 1], device=device),
        seed=torch.tensor([11, 12], device=device),
        position=torch.tensor([5, 6], device=device),
        impl=impl,
    )
    logits[1] += 1.5 * noise_of([12], [6], 300)[0]
    expected_tokens, expected = brute_force(logits, 3, [2.0, 1.0])
    assert torch.equal(tokens.cpu(), expected_tokens)
    torch.testing.assert_close(logprobs.cpu(), expected, atol=1e-4, rtol=1e-4)


def test_scaled_noise_is_divided_by_the_temperature(impl, device):
    logits = torch.randn(1, 200, generator=torch.Generator().manual_seed(1))
    values = dict(
        temperature=torch.tensor([2.0], device=device),
        row_to_slot=torch.tensor([0], device=device),
        seed=torch.tensor([11], device=device),
        position=torch.tensor([5], device=device),
    )
    tokens, logprobs = topk_logprobs(logits.to(device), 3, impl=impl, **values)
    noisy = logits + 2.0 * noise_of([11], [5], 200)
    expected_tokens, expected = brute_force(noisy, 3, [2.0])
    assert torch.equal(tokens.cpu(), expected_tokens)
    torch.testing.assert_close(logprobs.cpu(), expected, atol=1e-4, rtol=1e-4)


# The smallest and the largest hash, both sides of u = 1/16, 1/8 and 1/2, and between.
HASHES = [0, 1, 2, 255, 2**16 + 1, 2**20, 2**24 - 1, 2**24 + 1, 2**26 + 3, 2**27]
HASHES += [2**28 - 1, 2**28 + 1, 2**29 - 1, 2**29, 2**29 + 99, 2**30, 2**31 - 1, 2**31]
HASHES += [2**32 - 2**i for i in (30, 28, 26, 24, 20, 12, 8, 4, 0)]


@pytest.mark.parametrize("seed", [3, -(2**40) - 77])
def test_noise_of_every_hash(seed, impl, device):
    """Of two possible tokens one has the hash; the last row is greedy."""
    num_rows, vocab_size, token, other = len(HASHES) + 1, 4400, 4133, 70
    logits = torch.full((num_rows, vocab_size), -torch.inf)
    logits[:, token], logits[:, other] = -1.5, 2.0
    positions = [position_with_hash(h, seed, token) for h in HASHES] + [5]
    tokens, logprobs = topk_logprobs(
        logits.to(device),
        3,
        temperature=torch.tensor([0.0, 0.75], device=device),
        row_to_slot=torch.tensor([1] * len(HASHES) + [0], device=device),
        is_scaled=False,
        seed=torch.tensor([seed, seed], device=device),
        position=torch.tensor(positions, device=device),
        impl=impl,
    )
    tokens, logprobs = tokens.cpu(), logprobs.cpu()
    assert (logprobs[:, 2] == -torch.inf).all()
    difference = (logprobs * torch.where(tokens == token, 1.0, -1.0))[:, :2].sum(1)
    torch.testing.assert_close(difference[-1].item(), -3.5, atol=2e-6, rtol=0)
    others = noise_of([seed] * num_rows, positions, other + 1)[:, other].tolist()
    for row, h in enumerate(HASHES):
        expected = noise_of_hash(h)
        got = (difference[row].item() + 3.5) / 0.75 + others[row]
        rest = 1 - (h + 0.5) / 2**32
        # Twice what a GPU's logarithm and the sums around it may be off.
        tolerance = 2e-5
        if rest < 0.5:
            # 1 - u is a difference in fp32.
            tolerance += 2**-22 / rest / -math.log(rest)
        if rest > 2**-22:
            assert abs(got - expected) < tolerance, (h, got, expected)
        else:
            assert -3.2 < got < -2.5, (h, got)


def test_noise_leaves_impossible_and_infinite_logits(impl, device):
    inf = torch.inf
    logits = torch.full((4, 700), -inf)
    logits[1, 650] = -5.0
    logits[2] = -3.3895e38  # the mask value of bf16 models
    logits[3, 600:] = torch.randn(100)
    logits[3, 3] = inf
    tokens, logprobs = topk_logprobs(
        logits.to(device),
        2,
        temperature=torch.tensor([1.5], device=device),
        row_to_slot=torch.zeros(4, dtype=torch.int64, device=device),
        seed=torch.tensor([9], device=device),
        position=torch.arange(4, device=device),
        impl=impl,
    )
    assert tokens[:3].tolist() == [[0, 1], [650, 0], [0, 1]]
    assert tokens[3, 0] == 3
    possible = [[-inf, -inf], [0.0, -inf], [-inf, -inf]]
    assert logprobs[:3].tolist() == possible and logprobs[3, 0] == 0.0


def test_noise_needs_all_that_it_depends_on(device):
    logits = torch.zeros(1, 9, device=device)
    seed = torch.zeros(1, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match="needs seed, position, a temperature"):
        topk_logprobs(logits, 2, seed=seed)
