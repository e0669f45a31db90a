# SPDX-License-Identifier: Apache-2.0
"""How much of the noise of the draws a draft should trust, by sampling options.

    python evals/noise_weights.py --config training/configs/embedded.yaml

Candidates are ranked by ``logits + weight * T * noise``. With the whole noise, weight
1, a draft with the target's logits drafts what is drawn. A draft that errs, or does not
see what the target's filters leave out, may do better with less. Draws answers to
held-out prompts with each of ``--sampling``, runs the draft at every token of theirs,
and walks them with the trees of every weight: all weights see the same draws.

Prints tokens a round, bonus included: along the walk, and in brackets over all anchors,
which are more. Runs on the CPU; the embedded pair takes a few minutes a sampling.
"""

import argparse
import dataclasses
import sys
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "training"), str(ROOT), str(ROOT / "kernels")]
sys.path.insert(0, str(Path(__file__).resolve().parent))

from acceptance_prompts import load_prompts  # noqa: E402
from noise_answers import (  # noqa: E402
    Candidates,
    NoiseRecorder,
    Sampling,
    draw_answers,
)

from vllm_dflash.cli.arguments import json_object  # noqa: E402
from vllm_dflash.errors import option_error  # noqa: E402
from vllm_dflash_training.acceptance import accepted_by_trees, walk  # noqa: E402
from vllm_dflash_training.config import (  # noqa: E402
    EvaluationOptions,
    RunConfig,
    load_config,
)

WEIGHTS = (0.0, 0.3, 0.5, 0.6, 0.7, 0.85, 1.0)
SAMPLING = (
    {"temperature": 0.7, "top_k": 20, "top_p": 0.8},
    {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    {"temperature": 1.0, "top_k": 20, "top_p": 0.95},
    {"temperature": 1.0, "top_k": 50},
    {"temperature": 1.0, "top_k": 2},
    {"temperature": 0.8, "min_p": 0.05},
    {"temperature": 0.7, "top_p": 0.5},
    {"temperature": 1.0, "top_p": 0.5},
    {"temperature": 0.7, "top_p": 0.7},
    {"temperature": 1.0, "top_p": 0.7},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.0, "top_p": 0.99},
    {"temperature": 0.7},
    {"temperature": 1.0},
)
# Tokens of an answer that has an anchor: the first comes from the prompt.
_SHORTEST = 2


def tokens_a_round(answers: list[Candidates], budget: int) -> tuple[float, float]:
    """Return tokens a round along the walks, and over all anchors."""
    total = np.zeros(2)
    everywhere: list[int] = []
    for candidates in answers:
        accepted = accepted_by_trees(
            candidates.logprobs.tolist(), candidates.ranks.tolist(), budget
        )
        total += walk(accepted)
        everywhere += accepted
    return float(total[0] / total[1]), 1 + float(np.mean(everywhere))


def load(config: RunConfig, weights: list[float]) -> NoiseRecorder:
    """Return the config's draft along its target."""
    from vllm_dflash_training.checkpoint import make_draft
    from vllm_dflash_training.target import Target, target_folder

    device = torch.device("cpu")
    target = Target(target_folder(config.target), torch.float32, device)
    draft, _ = make_draft(target, config.draft, config.seed)
    options = dataclasses.replace(config.training, sequences_per_batch=1)
    return NoiseRecorder(
        target,
        draft.to(device),
        options,
        weights=weights,
        num_candidates=config.evaluation.max_children,
    )


def draw(
    recorder: NoiseRecorder,
    prompts: list[list[int]],
    sampling: Sampling,
    max_tokens: int,
    ends: list[int],
    options: EvaluationOptions,
) -> dict[float, list[Candidates]]:
    """Draw answers, and run the draft along them. weight -> candidates by answer"""
    answers = draw_answers(recorder.target, prompts, sampling, max_tokens, ends)
    found: dict[float, list[Candidates]] = {weight: [] for weight in recorder.weights}
    for seed, (prompt, answer) in enumerate(zip(prompts, answers, strict=True), 1):
        if len(answer) < _SHORTEST:
            continue
        recorded = recorder.record(prompt, answer, seed, sampling.temperature, options)
        for weight, candidates in recorded.items():
            found[weight].append(candidates)
    if not found[recorder.weights[0]]:
        sys.exit("noise_weights: no answer has two tokens; type a larger --limit")
    return found


def parse_sampling(given: dict[str, float]) -> Sampling:
    """Return the options of a request.

    Raises:
        ValueError: An option has no meaning here.
    """
    names = [field.name for field in dataclasses.fields(Sampling)]
    wrong = [name for name in given if name not in names]
    if wrong or "temperature" not in given:
        raise option_error(
            f"--sampling has unknown options or no temperature (got {given})",
            f"Allowed are {', '.join(names)}",
            """--sampling '{"temperature": 0.7, "top_p": 0.9}'""",
        )
    return Sampling(**given)  # type: ignore[arg-type]


def main() -> int:
    args = _parser().parse_args()
    from vllm_dflash_training.target import target_folder
    from vllm_dflash_training.tokenise import load_tokens

    try:
        all_sampling = [parse_sampling(given) for given in args.sampling or SAMPLING]
    except ValueError as error:
        print(f"noise_weights: {error}", file=sys.stderr)
        return 2
    config = load_config(args.config, args.set)
    options = config.evaluation
    tokens, ends = load_tokens(target_folder(config.target))
    prompts = [tokens.prompt(p["messages"]) for p in load_prompts(limit=args.limit)]
    recorder = load(config, args.weights)
    print(f"{options.budget} nodes, {options.max_children} candidates a depth\n")
    print("| sampling | anchors | " + " | ".join(f"{w:g}" for w in args.weights) + " |")
    print("|---|---:|" + "---:|" * len(args.weights))
    for sampling in all_sampling:
        found = draw(recorder, prompts, sampling, args.max_tokens, ends, options)
        cells = [tokens_a_round(answers, options.budget) for answers in found.values()]
        number = sum(len(one.ranks) for one in found[recorder.weights[0]])
        line = " | ".join(f"{along:.3f} ({every:.3f})" for along, every in cells)
        print(f"| {describe(sampling)} | {number} | {line} |", flush=True)
    return 0


def describe(sampling: Sampling) -> str:
    """Return the options that are not the default, and the temperature."""
    default = Sampling(sampling.temperature)
    values = {
        field.name: getattr(sampling, field.name)
        for field in dataclasses.fields(Sampling)
    }
    return ", ".join(
        f"{name} {value:g}"
        for name, value in values.items()
        if name == "temperature" or value != getattr(default, name)
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--set", action="append", metavar="SECTION.KEY=VALUE")
    parser.add_argument("--limit", type=int, default=32, help="number of prompts")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--weights", type=float, nargs="+", default=list(WEIGHTS))
    parser.add_argument(
        "--sampling",
        type=json_object(
            "Options of a request by name",
            """--sampling '{"temperature": 0.7, "top_p": 0.9}'""",
        ),
        nargs="+",
        help="options of the requests, as JSON objects",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
