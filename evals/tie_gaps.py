# SPDX-License-Identifier: Apache-2.0
"""How near the ties are where greedy answers of an acceptance run part.

    .venv/bin/python evals/tie_gaps.py acceptance.json

In 16 bits what is computed together decides how a sum is rounded, so the answers of an
engine that verifies several rows at once leave those of one row at a time where two
tokens score alike. For each such answer of `run_acceptance.py --output` the target runs
once more, in float32 over the prompt and what both answers have in common, and tells by
how much the token without speculation scores higher than the one that was said. Prints
a row for each engine. After an error the gap would be anything up to the spread of the
logits, which is printed beside: the median gap of the best two tokens at the same
places, and of the best to the tenth.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from acceptance_engine import BASELINE
from acceptance_prompts import load_prompts
from first_difference import first_difference

from vllm_dflash.demo.pair import embedded_pair

GREEDY = "0/"


@dataclass(frozen=True)
class Parting:
    """Where an answer leaves the one without speculation."""

    prompt: str
    # Tokens that both have in common.
    common: list[int]
    expected: int
    said: int


@dataclass(frozen=True)
class Gaps:
    """Differences of logits at a parting, in float32.

    Attributes:
        parting: Of the expected token to the one said; below 0 the said one is better.
        second, tenth: Of the best token to the second and to the tenth.
    """

    parting: float
    second: float
    tenth: float


def partings(results: dict[str, Any], engine: str) -> tuple[list[Parting], int]:
    """Return where greedy answers of an engine part, and how many answers there are."""
    found, number = [], 0
    for wave, expected in results[BASELINE]["waves"].items():
        if not wave.startswith(GREEDY):
            continue
        for name, tokens in expected["outputs"].items():
            number += 1
            said = results[engine]["waves"][wave]["outputs"][name]
            place = first_difference(tokens, said)
            # One that is the beginning of the other has no other token.
            if place is not None and place < min(len(tokens), len(said)):
                parting = Parting(name, tokens[:place], tokens[place], said[place])
                found.append(parting)
    return found, number


def gaps(
    model: Any, prompts: dict[str, list[int]], found: list[Parting]
) -> Iterator[Gaps]:
    """Yield the gaps of each parting.

    Args:
        model: Of transformers, in float32.
        prompts: Tokens by name.
    """
    for parting in found:
        tokens = torch.tensor([prompts[parting.prompt] + parting.common])
        with torch.no_grad():
            logits = model(tokens, logits_to_keep=1).logits[0, -1].float()
        best = logits.topk(10).values
        yield Gaps(
            float(logits[parting.expected] - logits[parting.said]),
            float(best[0] - best[1]),
            float(best[0] - best[9]),
        )


def markdown(rows: dict[str, tuple[list[Gaps], int]]) -> str:
    """Return the table: engine -> gaps of its partings, number of answers."""
    lines = [
        "| engine | answers that part | gap, median | largest | best to second, median "
        "| best to tenth, median |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for engine, (found, number) in rows.items():
        cells = ["-"] * 4
        if found:
            sizes = [abs(gap.parting) for gap in found]
            values = [statistics.median(sizes), max(sizes)]
            values += [statistics.median(gap.second for gap in found)]
            values += [statistics.median(gap.tenth for gap in found)]
            cells = [f"{value:.3f}" for value in values]
        lines.append(f"| {engine} | {len(found)} of {number} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("result", type=Path, help="JSON of run_acceptance.py --output")
    parser.add_argument("--model", help="target; that of the embedded pair if absent")
    parser.add_argument("--prompts", type=Path, nargs="*", help="as of that run")
    args = parser.parse_args()
    report = json.loads(args.result.read_text(encoding="utf-8"))
    if "results" not in report:
        sys.exit(f"tie_gaps: {args.result} has no answers; use a file of --output")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = (
        args.model or embedded_pair(lambda text: print(text, file=sys.stderr)).target
    )
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompts = {
        prompt["id"]: tokenizer.apply_chat_template(
            prompt["messages"], add_generation_prompt=True, return_dict=False
        )
        for prompt in load_prompts(args.prompts)
    }
    rows = {}
    for engine in report["results"]:
        if engine != BASELINE:
            found, number = partings(report["results"], engine)
            rows[engine] = (list(gaps(model, prompts, found)), number)
    print(markdown(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
