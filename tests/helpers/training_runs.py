# SPDX-License-Identifier: Apache-2.0
"""Tiny training problems: targets, responses, runs."""

import random
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "training")]

from vllm_dflash_training.backends import (  # noqa: E402
    Backend,
    Job,
    Sampling,
    TransformersBackend,
)
from vllm_dflash_training.config import (  # noqa: E402
    DraftOptions,
    GenerationOptions,
    RunConfig,
    TrainingOptions,
)
from vllm_dflash_training.data import Responses  # noqa: E402
from vllm_dflash_training.distributed import World  # noqa: E402
from vllm_dflash_training.target import Target  # noqa: E402
from vllm_dflash_training.trainer import Trainer  # noqa: E402

CPU = torch.device("cpu")


def load_target(path: str) -> Target:
    """A target of the tiny models, to train for."""
    return Target(path, torch.float32, CPU)


def answer(
    backend: Backend, prompts: list[list[int]], sampling: Sampling
) -> list[list[int]]:
    """One response a prompt."""
    found: list[list[list[int]]] = []
    backend.run([Job(prompts, sampling, found.append)])
    return found[0]


def tiny_responses(
    path: str, prompts: list[list[int]], max_tokens: int
) -> list[tuple[list[int], list[int]]]:
    """The target's greedy answers, none of which ends early."""
    backend = TransformersBackend(path, torch.float32, CPU, [], GenerationOptions())
    answers = answer(backend, prompts, Sampling(0.0, max_tokens, 0.0, 0))
    return list(zip(prompts, answers, strict=True))


def random_rows(num: int, seed: int = 3) -> list[tuple[list[int], list[int]]]:
    """Sequences without a model behind them."""
    rng = random.Random(seed)
    return [
        (
            [rng.randrange(10, 500) for _ in range(rng.randrange(3, 12))],
            [rng.randrange(10, 500) for _ in range(rng.randrange(6, 30))],
        )
        for _ in range(num)
    ]


def tiny_config(work_dir: Path, draft: str | None, **training: Any) -> RunConfig:
    """A run of a few steps on the CPU."""
    options = dict(
        steps=6,
        max_length=64,
        sequences_per_batch=4,
        anchors_per_sequence=6,
        log_every=2,
        evaluate_every=1000,
        probe_blocks=4,
        loss_chunk=64,
        save_every_s=1e9,
    )
    return RunConfig(
        work_dir=str(work_dir),
        export_dtype="float32",
        draft=DraftOptions(init_from=draft, block_size=8, mask_token_id=5),
        training=TrainingOptions(**{**options, **training}),
    )


def trainer(
    config: RunConfig, target: Target, rows: list[tuple[list[int], list[int]]]
) -> Trainer:
    """A trainer in this process alone."""
    config.folder().mkdir(parents=True, exist_ok=True)
    return Trainer(config, target, Responses(rows), World(device=CPU))
