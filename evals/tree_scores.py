# SPDX-License-Identifier: Apache-2.0
"""Whether other scores than a draft's log-probabilities would make better trees.

    python evals/tree_scores.py --config training/configs/embedded.yaml

Runs the draft at every anchor of the target's held-out answers (those of the config's
data folder, written by `scripts/train_draft.py --stages prompts,generate`), keeps the
best candidates, and walks each answer again and again with trees of rescaled scores.
Prints tokens a round, bonus included, for `evaluation.budget` nodes. On two CPU cores
the embedded pair takes about ten minutes. The walk with plain scores must be the one of
`evaluate`, or nothing is printed.
"""

import argparse
import dataclasses
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "training"), str(ROOT), str(ROOT / "kernels")]

from vllm_dflash_training.acceptance import (  # noqa: E402
    accepted_by_trees,
    evaluate,
    ranks_of_response,
    walk,
)
from vllm_dflash_training.config import (  # noqa: E402
    EvaluationOptions,
    RunConfig,
    load_config,
)
from vllm_dflash_training.data import Responses  # noqa: E402
from vllm_dflash_training.forward import BlockForward  # noqa: E402

NUM_CANDIDATES = 16
TEMPERATURES = (0.8, 0.9, 1.1, 1.2)
# A node's score must be below that of its parent.
_HIGHEST = -1e-4
Rescale = Callable[["Anchors"], np.ndarray]


@dataclass
class Anchors:
    """Best candidates at the anchors of one response, best first."""

    # [num_anchors, depth, NUM_CANDIDATES], by temperature
    logprobs: dict[float, np.ndarray]
    # [num_anchors, depth], rank of the right token; -1: not among them
    ranks: np.ndarray


class RecordingForward(BlockForward):
    """Keeps the candidates of every row whose logits are asked for."""

    def __init__(self, *args: object):
        super().__init__(*args)  # type: ignore[arg-type]
        self.tokens: list[torch.Tensor] = []
        self.logprobs: dict[float, list[torch.Tensor]] = {
            temperature: [] for temperature in (1.0, *TEMPERATURES)
        }

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = super().logits(hidden)
        best, tokens = logits.float().topk(NUM_CANDIDATES, -1)
        self.tokens.append(tokens.cpu())
        for temperature, rows in self.logprobs.items():
            total = (logits.float() / temperature).logsumexp(-1, keepdim=True)
            rows.append((best / temperature - total).cpu())
        return logits


def record(
    forward: RecordingForward, responses: Responses, options: EvaluationOptions
) -> tuple[list[Anchors], float]:
    """Return the candidates by response, and what `evaluate` says of the tree.

    Args:
        forward: With one sequence a batch: anchors are then met in their order.
    """
    assert forward.num_seqs == 1
    expected = float(evaluate(forward, responses, options)["tree_walk"])  # type: ignore[arg-type]
    tokens = torch.cat(forward.tokens).numpy()
    logprobs = {t: torch.cat(rows).numpy() for t, rows in forward.logprobs.items()}
    found, first = [], 0
    for index in np.argsort(responses.lens, kind="stable"):
        last = first + int(responses.lens[index] - responses.prompt_lens[index]) - 1
        part = slice(first, last)
        start = int(responses.starts[index])
        answer = responses.tokens[start : start + int(responses.lens[index])]
        answer = answer[int(responses.prompt_lens[index]) :]
        ranks = ranks_of_response(tokens[part], answer)
        found.append(Anchors({t: rows[part] for t, rows in logprobs.items()}, ranks))
        first = last
    assert first == len(tokens)
    return found, expected


def tokens_a_round(
    anchors: list[Anchors], rescale: Rescale, budget: int, num_candidates: int
) -> float:
    """Walk every response with trees of these scores."""
    total = np.zeros(2)
    for one in anchors:
        scores = rescale(one)[..., :num_candidates]
        ranks = np.where(one.ranks < num_candidates, one.ranks, -1)
        total += walk(accepted_by_trees(scores.tolist(), ranks.tolist(), budget))
    return float(total[0] / total[1])


def cases(max_children: int) -> Iterator[tuple[str, Rescale, int]]:
    """Yield (name, scores, candidates a depth)."""
    yield "log-probabilities, as they are", lambda a: a.logprobs[1.0], max_children
    for t in TEMPERATURES:
        yield f"at temperature {t}", lambda a, t=t: a.logprobs[t], max_children
    for b in (-0.3, -0.15, 0.1, 0.2):
        yield f"{b:+} a depth", lambda a, b=b: _shifted(a, b), max_children
    for g in (0.9, 0.95, 1.05):
        yield f"times {g}^depth", lambda a, g=g: _by_depth(a, g), max_children
    for count in (4, 6, 12, NUM_CANDIDATES):
        yield f"{count} candidates", lambda a: a.logprobs[1.0], count


def _shifted(anchors: Anchors, by: float) -> np.ndarray:
    return np.minimum(anchors.logprobs[1.0] + by, _HIGHEST)


def _by_depth(anchors: Anchors, base: float) -> np.ndarray:
    logprobs = anchors.logprobs[1.0]
    return logprobs * base ** np.arange(logprobs.shape[1])[:, None]


def load(config: RunConfig, limit: int | None) -> tuple[RecordingForward, Responses]:
    """Return the config's draft, and its target's held-out answers."""
    from vllm_dflash_training.checkpoint import make_draft
    from vllm_dflash_training.distributed import find_device
    from vllm_dflash_training.generate import load_heldout_responses
    from vllm_dflash_training.target import Target, pick_dtype, target_folder

    device = find_device()
    dtype = pick_dtype(config.target_dtype, device)
    target = Target(target_folder(config.target), dtype, device)
    draft, _ = make_draft(target, config.draft, config.seed)
    options = dataclasses.replace(config.training, sequences_per_batch=1)
    forward = RecordingForward(target, draft.to(device), options)
    rows = [r for r in load_heldout_responses(config.data_folder()) if len(r[1]) > 1]
    return forward, Responses(rows[:limit])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--set", action="append", metavar="SECTION.KEY=VALUE")
    parser.add_argument("--limit", type=int, help="held-out answers, default all")
    args = parser.parse_args()
    config = load_config(args.config, args.set)
    options = config.evaluation
    anchors, expected = record(*load(config, args.limit), options)
    number = sum(len(one.ranks) for one in anchors)
    print(f"{len(anchors)} answers, {number} anchors, {options.budget} nodes")
    print("| scores | tokens a round |\n|---|---:|")
    for place, (name, rescale, count) in enumerate(cases(options.max_children)):
        value = tokens_a_round(anchors, rescale, options.budget, count)
        if not place and abs(value - expected) > 1e-3:
            sys.exit(f"the walk gives {value:.4f}, evaluate {expected:.4f}: stopped")
        print(f"| {name} | {value:.3f} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
