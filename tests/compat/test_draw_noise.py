# SPDX-License-Identifier: Apache-2.0
"""The noise that candidates are ranked with is the one that vLLM draws with."""

import torch

from vllm_dflash.cpu.gumbel import gumbel_noise
from vllm_dflash_kernels.topk_logprobs.noise_reference import draw_noise_reference

SEEDS = [0, 1, -1, 2**33 + 5, -(2**62) + 3, 2**63 - 1]
POSITIONS = [0, 1, 17, 4096, 131071, 2**31 + 9]
VOCAB_SIZE = 2000


def test_every_token_has_the_noise_of_vllms_draw():
    seeds, positions = torch.tensor(SEEDS), torch.tensor(POSITIONS)
    ours = draw_noise_reference(seeds, positions, VOCAB_SIZE)
    for row, (seed, position) in enumerate(zip(SEEDS, POSITIONS, strict=True)):
        vllms = gumbel_noise(seed, position, VOCAB_SIZE, use_fp64=False)
        torch.testing.assert_close(ours[row], vllms, atol=2e-6, rtol=2e-6)


def test_a_draw_from_equal_logits_takes_the_token_with_the_most_noise(device):
    """vLLM's own function: its kernel on a GPU, its twin on the CPU."""
    from vllm_dflash import plugin

    if device.type == "cpu":
        import vllm.v1.worker.cpu.shm  # noqa: F401, before the runner's modules

        plugin.register()
    from vllm.v1.worker.gpu.sample import gumbel

    num_rows = 40
    generator = torch.Generator().manual_seed(0)
    seeds = torch.randint(-(2**62), 2**62, (8,), generator=generator)
    slots = torch.arange(num_rows) % 8
    positions = torch.randint(0, 5000, (num_rows,), generator=generator)
    drawn = gumbel.gumbel_sample(
        torch.zeros(num_rows, VOCAB_SIZE, device=device),
        slots.to(device),
        torch.ones(8, device=device),
        seeds.to(device),
        positions.to(device),
        apply_temperature=False,
        is_drafting=False,
    )
    noise = draw_noise_reference(seeds[slots], positions, VOCAB_SIZE)
    assert torch.equal(drawn.cpu(), noise.argmax(-1))
