# SPDX-License-Identifier: Apache-2.0
"""Step times of shapes that were not measured, from bytes and operations.

A step costs ``layers * overhead + hypot(bytes / bandwidth, operations / rate)``. The
three constants are fitted to the measured steps of the 8B shape, so they hold what one
GPU and vLLM reach, not what a data sheet says. No kernel is modelled: not the tiles of
16 rows, not attention over long contexts, nor the small products of experts.
"""

from dataclasses import dataclass
from itertools import product

import numpy as np

BYTES_PER_WEIGHT = 2
BLOCK = 16


@dataclass(frozen=True)
class Shape:
    """A target and its DFlash draft.

    Attributes:
        experts: Experts of a layer, 0 for a dense model.
        active: Experts of a token.
        draft_layers: Dense layers of the draft, of the target's own shape.
        num_gpus: Tensor parallel; what the GPUs say to each other is not counted.
    """

    name: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocabulary: int
    head_size: int = 128
    experts: int = 0
    active: int = 1
    draft_layers: int = 5
    draft_intermediate: int = 0
    num_gpus: int = 1

    def attention_weights(self) -> int:
        """Weights of the attention of one layer."""
        return 2 * self.hidden * self.head_size * (self.heads + self.kv_heads)

    def expert_weights(self) -> int:
        """Weights of one expert, or of the whole MLP of a dense layer."""
        return 3 * self.hidden * self.intermediate

    def draft_weights(self) -> int:
        """Weights of the draft's layers and of its projection of hidden states."""
        mlp = 3 * self.hidden * (self.draft_intermediate or self.intermediate)
        return (
            self.draft_layers * (self.attention_weights() + mlp)
            + self.draft_layers * self.hidden**2
        )


SHAPES = {
    "qwen3-8b": Shape("qwen3-8b", 36, 4096, 12288, 32, 8, 151936),
    # Dense draft layers with an MLP of 6144 are an assumption.
    "coder-30b-a3b": Shape(
        "coder-30b-a3b",
        48,
        2048,
        768,
        32,
        4,
        151936,
        experts=128,
        active=8,
        draft_layers=8,
        draft_intermediate=6144,
    ),
    "llama-70b-tp2": Shape("llama-70b-tp2", 80, 8192, 28672, 64, 8, 128256, num_gpus=2),
}


@dataclass(frozen=True)
class Constants:
    """What the 8B shape says of the GPU and the engine."""

    overhead_ms: float
    bytes_per_s: float
    flops_per_s: float


def work(
    shape: Shape, batch: int, rows: int, is_drafting: bool, context: int
) -> tuple[int, float, float]:
    """Return layers, bytes and operations of a step on one GPU.

    Args:
        rows: Rows of the target for each request.
    """
    tokens = batch * rows
    head = shape.vocabulary * shape.hidden
    touched = active = 1.0
    if shape.experts:
        # Every token chooses its experts evenly and by itself; real ones agree more.
        active = shape.active
        touched = shape.experts * (1 - (1 - active / shape.experts) ** tokens)
    fixed = shape.layers * shape.attention_weights() + head
    mlp = shape.layers * shape.expert_weights()
    weights = fixed + touched * mlp
    operations = 2.0 * tokens * (fixed + active * mlp)
    cache_row = 2 * shape.kv_heads * shape.head_size
    cached = batch * context * shape.layers * cache_row
    attention = 4.0 * tokens * context * shape.layers * shape.heads * shape.head_size
    layers = shape.layers
    if is_drafting:
        layers += shape.draft_layers
        weights += shape.draft_weights() + head
        cached += batch * context * shape.draft_layers * cache_row
        operations += 2.0 * batch * BLOCK * (shape.draft_weights() + head)
    total_bytes = BYTES_PER_WEIGHT * (weights + cached) / shape.num_gpus
    return layers, total_bytes, (operations + attention) / shape.num_gpus


def step_ms(
    constants: Constants,
    shape: Shape,
    batch: int,
    rows: int,
    is_drafting: bool,
    context: int,
) -> float:
    """Return the estimated milliseconds of a step."""
    layers, num_bytes, operations = work(shape, batch, rows, is_drafting, context)
    return layers * constants.overhead_ms + 1e3 * float(
        np.hypot(num_bytes / constants.bytes_per_s, operations / constants.flops_per_s)
    )


def fit(
    shape: Shape,
    # (batch, rows, is_drafting, milliseconds)
    measured: list[tuple[int, int, bool, float]],
    context: int,
) -> Constants:
    """Return the constants of the least mean square of relative errors."""
    costs = np.array(
        [work(shape, batch, rows, draft, context) for batch, rows, draft, _ in measured]
    )
    times = np.array([ms for *_, ms in measured])
    layers = costs[:, 0] / times
    # Bandwidth in TB/s and rate in TFLOP/s are searched, the overhead follows.
    best = np.array([4.0, 500.0])
    overhead_ms = 0.0
    for width in (0.9, 0.4, 0.2, 0.1, 0.05, 0.02, 0.01, 0.005):
        steps = np.linspace(1 - width, 1 + width, 41)
        grid = np.array(list(product(steps, steps))) * best
        rest = 1e-9 * np.hypot(costs[:, 1] / grid[:, :1], costs[:, 2] / grid[:, 1:])
        missing = 1 - rest / times
        overheads = np.maximum(missing @ layers / (layers @ layers), 0.0)
        errors = ((overheads[:, None] * layers - missing) ** 2).mean(axis=1)
        best, overhead_ms = grid[errors.argmin()], overheads[errors.argmin()]
    return Constants(float(overhead_ms), *(1e12 * best).tolist())
