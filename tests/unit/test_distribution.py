# SPDX-License-Identifier: Apache-2.0
"""The first three tokens through trees are distributed as the target says.

The target is a table of logits for every prefix of a vocabulary of five, so the exact
distribution of three tokens is a product of three rows. Requests with seeds of their
own go through drafts, sampler and walk until they have three tokens.
"""

import importlib
from types import SimpleNamespace

import pytest
import torch

VOCAB_SIZE = 5
NUM_TOKENS = 3
DEPTH = 2
BUDGET = 4
NUM_SAMPLES = 20480
BATCH_SIZE = 2048
PROMPT_LEN = 11
# Chi-square of a right sampler is beyond this once in 10^4 runs; the seeds are fixed.
LEAST_P = 1e-4


@pytest.fixture(scope="module")
def target() -> torch.Tensor:
    """Logits of the next token, [prefix number, VOCAB_SIZE]."""
    generator = torch.Generator().manual_seed(3)
    num_prefixes = sum(VOCAB_SIZE**n for n in range(NUM_TOKENS + DEPTH + 1))
    return torch.randn(num_prefixes, VOCAB_SIZE, generator=generator) * 1.5


def child(prefix: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
    """Number of the prefix with one token more; the empty one is 0."""
    return prefix * VOCAB_SIZE + token + 1


def exact(target: torch.Tensor, temperature: float, top_p: float) -> torch.Tensor:
    """Probabilities of the sequences of NUM_TOKENS, in the order of their numbers."""
    probs = (target.double() / temperature).softmax(-1)
    ranked, order = probs.sort(dim=-1, descending=True)
    # The likeliest tokens up to the one that reaches top_p.
    kept = ranked * (ranked.cumsum(-1) - ranked < top_p)
    probs = torch.zeros_like(probs).scatter(1, order, kept)
    probs /= probs.sum(-1, keepdim=True)
    prefixes, joint = torch.zeros(1, dtype=torch.long), torch.ones(1).double()
    for _ in range(NUM_TOKENS):
        joint = (joint[:, None] * probs[prefixes]).flatten()
        prefixes = child(prefixes[:, None], torch.arange(VOCAB_SIZE)).flatten()
    return joint


class Toy:
    """The verify rounds of a batch of requests, without a model around them."""

    def __init__(
        self, target: torch.Tensor, device: torch.device, use_noise: bool, **options
    ):
        # On the CPU vLLM has to patch torch before it imports the runner's modules.
        if device.type == "cpu":
            importlib.import_module("vllm.v1.worker.cpu.shm")
            from vllm_dflash import plugin

            plugin.register()
        from vllm import SamplingParams
        from vllm.v1.worker.gpu.sample.sampler import Sampler
        from vllm.v1.worker.gpu.states import RequestState

        from vllm_dflash.sample.tree_sampler import TreeRejectionSampler
        from vllm_dflash.tree.builder import TreeBuilder
        from vllm_dflash.tree.draft_tree import DraftTreeBuffers
        from vllm_dflash.tree.verify_step import VerifyStep

        self.target, self.device = target.to(device), device
        states = RequestState(BATCH_SIZE, 32, 64, BUDGET, VOCAB_SIZE, device)
        config = SimpleNamespace(reasoning_config=None)
        self.sampler = Sampler(config, BATCH_SIZE, VOCAB_SIZE, device, states)
        self.params = lambda seed: SamplingParams(seed=seed, **options)
        self.trees = DraftTreeBuffers.allocate(BATCH_SIZE, BUDGET + 1, device)
        self.step = VerifyStep.allocate(self.trees, DEPTH, device)
        self.use_noise = use_noise
        self.builder = TreeBuilder(
            self.trees, DEPTH, 3, True, use_noise, VOCAB_SIZE, device
        )
        spec_config = SimpleNamespace(
            num_speculative_tokens=BUDGET,
            enable_adaptive_verification=False,
            rejection_sample_method="standard",
        )
        self.verify = TreeRejectionSampler(
            self.sampler, spec_config, device, self.step, Compactor()
        )
        self.generator = torch.Generator().manual_seed(17)
        self.num_accepted = 0

    def sample(self, first_seed: int) -> torch.Tensor:
        """Numbers of the sequences that BATCH_SIZE seeds lead to."""
        for slot in range(BATCH_SIZE):
            self.sampler.add_request(slot, self.params(first_seed + slot))
        self.sampler.apply_staged_writes()
        # All of it, also with filters for which a request's draft has a part.
        temperature = self.sampler.sampling_states.temperature.gpu
        self.trees.noise_temperature.copy_(temperature[:BATCH_SIZE])
        prefixes = torch.zeros(BATCH_SIZE, dtype=torch.long, device=self.device)
        lengths = torch.zeros_like(prefixes)
        while len(slots := (lengths < NUM_TOKENS).nonzero()[:, 0]):
            prefixes[slots], lengths[slots] = self.verify_round(
                slots, prefixes[slots], lengths[slots]
            )
        return prefixes

    def verify_round(self, slots, prefixes, lengths):
        """Draft and verify once; return the prefixes and lengths after it."""
        num_reqs, width = len(slots), BUDGET + 1
        logits = torch.randn(num_reqs * DEPTH, VOCAB_SIZE, generator=self.generator) * 2
        logits = logits.to(self.device)
        row_to_slot = slots.repeat_interleave(DEPTH)
        if self.use_noise:
            # A good draft, whose candidates follow the draws as closely as can be.
            known = prefixes.clamp(max=len(self.target) - 1).repeat_interleave(DEPTH)
            logits = self.target[known] + 0.1 * logits
        states = self.sampler.sampling_states
        first = PROMPT_LEN - 1 + lengths
        depths = torch.arange(DEPTH, device=self.device)
        self.builder.collect_candidates(
            logits,
            row_to_slot,
            states.temperature.gpu,
            states.seeds.gpu,
            (first[:, None] + depths).flatten(),
        )
        self.builder.build(num_reqs, row_to_slot)

        drafts = self.builder.draft_tokens[:num_reqs]
        row_prefixes = [prefixes]
        for node in range(1, width):
            parents = self.trees.parents[slots, node].long()
            parent_prefixes = torch.stack(row_prefixes, 1).gather(1, parents[:, None])
            row_prefixes.append(child(parent_prefixes[:, 0], drafts[:, node - 1]))
        # Beyond the table nothing is emitted.
        rows = torch.stack(row_prefixes, 1).clamp(max=len(self.target) - 1).flatten()

        starts = (
            torch.arange(num_reqs + 1, device=self.device, dtype=torch.int32) * width
        )
        linear = torch.arange(width, device=self.device)
        positions = (PROMPT_LEN - 1 + lengths[:, None] + linear).flatten()
        self.step.prepare(
            slots,
            starts,
            starts,
            positions,
            torch.full((num_reqs,), BUDGET).numpy(),
        )
        roots = torch.zeros(num_reqs, 1, dtype=torch.long, device=self.device)
        output = self.verify(
            self.target[rows],
            SimpleNamespace(
                num_reqs=num_reqs,
                idx_mapping=slots,
                idx_mapping_np=slots.cpu().numpy(),
                expanded_idx_mapping=slots.repeat_interleave(width),
                expanded_local_pos=linear.repeat(num_reqs).int(),
                cu_num_logits=starts,
                cu_num_logits_np=starts.cpu().numpy(),
                query_start_loc=starts,
                logits_indices=torch.arange(num_reqs * width, device=self.device),
                positions=positions,
                input_ids=torch.cat([roots, drafts], 1).flatten().int(),
                seq_lens=starts.new_full((num_reqs,), 32),
                seq_lens_cpu_upper_bound=torch.full((num_reqs,), 32),
            ),
        )
        counts = output.num_sampled.long()
        self.num_accepted += int((counts - 1).sum())
        for place in range(DEPTH + 1):
            emitted = (place < counts) & (lengths < NUM_TOKENS)
            tokens = output.sampled_token_ids[:, place].clamp(min=0)
            prefixes = torch.where(emitted, child(prefixes, tokens), prefixes)
            lengths = lengths + emitted
        return prefixes, lengths


class Compactor:
    """There is no KV cache to compact."""

    def compact(self, *args) -> None:
        pass


def p_value(counts: torch.Tensor, probs: torch.Tensor) -> float:
    """Chi-square test of goodness of fit; rare outcomes share a bin."""
    expected = probs * counts.sum()
    rare = expected < 5
    observed = torch.cat([counts[~rare].double(), counts[rare].sum()[None].double()])
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    if expected[-1] < 5:
        observed[-2], expected[-2] = observed[-2:].sum(), expected[-2:].sum()
        observed, expected = observed[:-1], expected[:-1]
    statistic = ((observed - expected) ** 2 / expected).sum()
    freedom = torch.tensor((len(expected) - 1) / 2).double()
    return float(torch.special.gammaincc(freedom, statistic / 2))


def histogram(target, device, use_noise=False, **options) -> torch.Tensor:
    toy = Toy(target, device, use_noise, **options)
    first = sum(VOCAB_SIZE**n for n in range(NUM_TOKENS))
    counts = torch.zeros(VOCAB_SIZE**NUM_TOKENS, dtype=torch.long)
    for seed in range(0, NUM_SAMPLES, BATCH_SIZE):
        sequences = toy.sample(seed).cpu() - first
        counts += torch.bincount(sequences, minlength=len(counts))
    assert counts.sum() == NUM_SAMPLES
    # Of two drafted tokens in three. Half of them were random guesses.
    assert toy.num_accepted > NUM_SAMPLES * (1.2 if use_noise else 0.25)
    return counts


@pytest.mark.parametrize(
    ("temperature", "top_p"),
    [
        (0.5, 1.0),
        (1.0, 0.8),
        (1.5, 1.0),
        pytest.param(0.5, 0.8, marks=pytest.mark.slow),
        pytest.param(1.0, 1.0, marks=pytest.mark.slow),
        pytest.param(1.5, 0.8, marks=pytest.mark.slow),
    ],
)
def test_three_tokens_have_the_exact_distribution(target, device, temperature, top_p):
    counts = histogram(target, device, temperature=temperature, top_p=top_p)
    probs = exact(target, temperature, top_p)
    assert counts[probs == 0].sum() == 0
    assert p_value(counts, probs) > LEAST_P
    # The test would see a temperature that is wrong by a tenth.
    assert p_value(counts, exact(target, temperature * 1.1, top_p)) < LEAST_P


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (1.5, 0.8)])
def test_drafts_that_follow_the_noise_leave_the_distribution(
    target, device, temperature, top_p
):
    """What is drafted depends on the very noise that decides what is drawn."""
    counts = histogram(target, device, True, temperature=temperature, top_p=top_p)
    probs = exact(target, temperature, top_p)
    assert counts[probs == 0].sum() == 0
    assert p_value(counts, probs) > LEAST_P
