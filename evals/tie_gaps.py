# SPDX-License-Identifier: Apache-2.0
"""How near the ties are where greedy answers of two engines part.

    .venv/bin/python evals/tie_gaps.py acceptance.json
    .venv/bin/python evals/tie_gaps.py sglang.json

In 16 bits what is computed together decides how a sum is rounded, so the answers of an
engine that verifies several rows at once, or has other kernels, leave those of another
where two tokens score alike. For each such answer of `run_acceptance.py --output` or
`compare_sglang.py --output` the target runs once more, in float32 over the prompt and
what both answers have in common, and tells by how much the token of the reference
scores higher than the one that was said, and how often it does. Prints a row for each
comparison. After an error the gap would be anything up to the spread of the logits,
which is printed beside: the median gap of the best two tokens at the same places, and
of the best to the tenth.
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

from vllm_dflash.calibrate.prompts import tokenize
from vllm_dflash.demo.pair import embedded_pair

GREEDY = "0/"


@dataclass(frozen=True)
class Parting:
    """Where an answer leaves that of the reference.

    Attributes:
        tokens: The prompt, and what both answers have in common.
    """

    tokens: list[int]
    expected: int
    said: int


@dataclass
class Comparison:
    """Greedy answers of one engine beside those of another.

    Attributes:
        partings: Where answers part, but for those that end there.
        num_answers: All answers.
        num_ended: Those where one ends and the other goes on, as no token says by how
            much.
    """

    partings: list[Parting]
    num_answers: int = 0
    num_ended: int = 0

    def add(self, prompt: list[int], expected: list[int], said: list[int]) -> None:
        """Take one prompt's answers in."""
        self.num_answers += 1
        place = first_difference(expected, said)
        if place is None:
            return
        if place >= min(len(expected), len(said)):
            self.num_ended += 1
            return
        tokens = prompt + expected[:place]
        self.partings.append(Parting(tokens, expected[place], said[place]))


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


def of_acceptance(
    results: dict[str, Any], prompts: dict[str, list[int]]
) -> dict[str, Comparison]:
    """Return each engine of `run_acceptance.py` beside no speculation.

    Args:
        prompts: Tokens by name.
    """
    found = {}
    for engine in results:
        if engine == BASELINE:
            continue
        comparison = found[engine] = Comparison([])
        for wave, expected in results[BASELINE]["waves"].items():
            if wave.startswith(GREEDY):
                said = results[engine]["waves"][wave]["outputs"]
                for name, tokens in expected["outputs"].items():
                    comparison.add(prompts[name], tokens, said[name])
    return found


def of_servers(report: dict[str, Any]) -> dict[str, Comparison]:
    """Return the pairs of servers that `compare_sglang.py` compared."""
    found = {}
    for pair in report["agreement"]:
        server, reference = pair["server"], pair["reference"]
        comparison = found[f"{server} to {reference}"] = Comparison([])
        answers = report["answers"]
        for said, expected in zip(answers[server], answers[reference], strict=True):
            comparison.add(
                expected["prompt_ids"], expected["token_ids"], said["token_ids"]
            )
    return found


def gaps(model: Any, found: list[Parting]) -> Iterator[Gaps]:
    """Yield the gaps of each parting.

    Args:
        model: Of transformers, in float32.
    """
    for parting in found:
        tokens = torch.tensor([parting.tokens])
        with torch.no_grad():
            logits = model(tokens, logits_to_keep=1).logits[0, -1].float()
        best = logits.topk(10).values
        yield Gaps(
            float(logits[parting.expected] - logits[parting.said]),
            float(best[0] - best[1]),
            float(best[0] - best[9]),
        )


def markdown(rows: dict[str, tuple[list[Gaps], Comparison]]) -> str:
    """Return the table, a row for each comparison."""
    lines = [
        "| comparison | answers that part | one ends there "
        "| fp32 prefers the reference's | gap, median | largest "
        "| best to second, median | best to tenth, median |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for engine, (found, comparison) in rows.items():
        cells = ["-"] * 5
        if found:
            sizes = [abs(gap.parting) for gap in found]
            values = [statistics.median(sizes), max(sizes)]
            values += [statistics.median(gap.second for gap in found)]
            values += [statistics.median(gap.tenth for gap in found)]
            preferred = sum(gap.parting > 0 for gap in found)
            cells = [f"{preferred} of {len(found)}"]
            cells += [f"{value:.3f}" for value in values]
        parted = len(found) + comparison.num_ended
        counts = [f"{parted} of {comparison.num_answers}", str(comparison.num_ended)]
        lines.append(f"| {engine} | {' | '.join(counts + cells)} |")
    return "\n".join(lines)


def _embedded_target(report: dict[str, Any]) -> str:
    """The target of a run with the embedded pair; exits if it was another's."""
    named = report.get("settings", {}).get("model")
    pair = embedded_pair(lambda text: print(text, file=sys.stderr, flush=True))
    if named is not None and Path(named).name != pair.served_name:
        sys.exit(f"tie_gaps: the answers are those of {named}; type --model with it")
    return pair.target


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "result", type=Path, help="--output of run_acceptance.py or compare_sglang.py"
    )
    parser.add_argument("--model", help="target; that of the embedded pair if absent")
    parser.add_argument("--prompts", type=Path, nargs="*", help="as of run_acceptance")
    args = parser.parse_args()
    report = json.loads(args.result.read_text(encoding="utf-8"))
    if "results" not in report and not report.get("answers"):
        sys.exit(f"tie_gaps: {args.result} has no answers; use a file of --output")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = args.model or _embedded_target(report)
    if "results" in report:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        prompts = load_prompts(args.prompts)
        tokens = tokenize(tokenizer, [prompt["messages"] for prompt in prompts])
        names = [prompt["id"] for prompt in prompts]
        by_name = dict(zip(names, tokens, strict=True))
        found = of_acceptance(report["results"], by_name)
    else:
        found = of_servers(report)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    rows = {
        name: (list(gaps(model, comparison.partings)), comparison)
        for name, comparison in found.items()
    }
    print(markdown(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
