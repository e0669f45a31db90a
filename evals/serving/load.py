# SPDX-License-Identifier: Apache-2.0
"""The load of a serving benchmark: vLLM's own ``vllm bench serve``.

It is called in this process, since importing it takes longer than most measurements;
each row holds the command line that does the same.
"""

import argparse
import asyncio
import contextlib
import json
import shlex
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from serving.mixed import Ramp

from vllm_dflash.calibrate.prompts import in_turn
from vllm_dflash.demo.serve import VLLMServer

PROMPTS = Path(__file__).resolve().parent.parent / "prompts" / "heldout.jsonl"
# Lists with an entry for each request, token or rate; the percentiles are beside them.
_PER_REQUEST = {
    "input_lens",
    "output_lens",
    "ttfts",
    "itls",
    "generated_texts",
    "errors",
    "start_times",
    "latencies",
    "queue_times",
    "rps_change_events",
}


@dataclass(frozen=True)
class Load:
    """One measurement of one server.

    Attributes:
        concurrency: Requests at a time; None if a ramp decides how many there are.
        add_special_tokens: Whether the server's tokenizer adds its own to a prompt.
        ramp: How fast requests are sent; None is one as soon as another is answered.
    """

    temperature: float
    concurrency: int | None
    num_prompts: int
    max_tokens: int
    seed: int
    ignore_eos: bool = False
    # The chat template has added what the tokenizer would add again.
    add_special_tokens: bool = False
    ramp: Ramp | None = None

    def __str__(self) -> str:
        load = f"c={self.concurrency}" if self.ramp is None else f"ramp {self.ramp}"
        return f"T={self.temperature:g} {load}"


def closed_load(
    args: argparse.Namespace,
    setting: tuple[float, int],
    repeat: int | None,
    add_special_tokens: bool = False,
) -> Load:
    """Return a measurement at one concurrency; if repeat is None, its warm-up."""
    temperature, concurrency = setting
    num_prompts = max(concurrency * args.prompts_per_slot, args.min_prompts)
    return Load(
        temperature=temperature,
        concurrency=concurrency,
        num_prompts=concurrency if repeat is None else num_prompts,
        max_tokens=args.max_tokens,
        seed=repeat or 0,
        ignore_eos=args.ignore_eos,
        add_special_tokens=add_special_tokens,
    )


class LoadError(RuntimeError):
    """Requests failed, so the figures mean nothing."""


def write_prompts(target: str, path: Path) -> int:
    """Write the held-out chats as prompts of ``--dataset-name custom``.

    The target's chat template is applied here, to all turns; the benchmark's own would
    drop system messages.

    Returns:
        The number of prompts.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(target)
    kinds, prompts = [], []
    for line in PROMPTS.read_text(encoding="utf-8").splitlines():
        item = json.loads(line)
        prompt = tokenizer.apply_chat_template(
            item["messages"], add_generation_prompt=True, tokenize=False
        )
        kinds.append(item["kind"])
        prompts.append(prompt)
    # In turn, so that a few prompts are of all kinds.
    lines = [json.dumps({"prompt": prompts[place]}) for place in in_turn(kinds)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return len(prompts)


def bench_args(server: VLLMServer, load: Load, prompts: Path) -> list[str]:
    """Return what follows ``vllm bench serve``."""
    body = {"add_special_tokens": load.add_special_tokens, "seed": load.seed}
    args = ["--backend", "openai", "--endpoint", "/v1/completions"]
    args += ["--base-url", server.client.base_url]
    args += ["--model", server.spec.pair.served_name]
    args += ["--tokenizer", server.spec.pair.target]
    args += ["--dataset-name", "custom", "--dataset-path", str(prompts)]
    args += ["--skip-chat-template", "--disable-shuffle"]
    args += ["--num-prompts", str(load.num_prompts)]
    args += ["--custom-output-len", str(load.max_tokens)]
    if load.concurrency is not None:
        args += ["--max-concurrency", str(load.concurrency)]
    if load.ramp is not None:
        args += ["--ramp-up-strategy", "exponential"]
        args += ["--ramp-up-start-rps", str(load.ramp.start)]
        args += ["--ramp-up-end-rps", str(load.ramp.end)]
        # Only so do the times of single requests come back.
        args += ["--save-detailed"]
    args += ["--temperature", str(load.temperature), "--seed", str(load.seed)]
    args += ["--extra-body", json.dumps(body)]
    args += ["--percentile-metrics", "ttft,tpot,itl,e2el"]
    args += ["--metric-percentiles", "50,90,99", "--disable-tqdm"]
    return [*args, "--ignore-eos"] if load.ignore_eos else args


def measure(
    server: VLLMServer, load: Load, prompts: Path, log_path: Path
) -> dict[str, Any]:
    """Run one load against one server and return the benchmark's own result.

    Raises:
        LoadError: a request failed.
    """
    from vllm.benchmarks.serve import add_cli_args, main_async
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    args = bench_args(server, load, prompts)
    with log_path.open("a", encoding="utf-8") as log, contextlib.redirect_stdout(log):
        result = asyncio.run(main_async(parser.parse_args(args)))
    if result["completed"] != load.num_prompts:
        raise LoadError(
            f"{server.spec.label}: {result['completed']} of {load.num_prompts} "
            f"requests were answered. {server.describe_log()}"
        )
    row = {
        "server": server.spec.label,
        "temperature": load.temperature,
        "concurrency": load.concurrency,
        "seed": load.seed,
        "command": shlex.join(["vllm", "bench", "serve", *args]),
        "result": {k: v for k, v in result.items() if k not in _PER_REQUEST},
    }
    if load.ramp is not None:
        row["load"] = f"ramp {load.ramp}"
        row["peak_in_flight"] = peak(result["start_times"], result["latencies"])
    return row


def peak(starts: list[float], latencies: list[float]) -> int:
    """Return the largest number of requests that were sent and not yet answered.

    The benchmark's own counts all that a whole second has seen.
    """
    events = [(start, 1) for start in starts]
    events += [
        (start + latency, -1) for start, latency in zip(starts, latencies, strict=True)
    ]
    # At the same moment one that ends comes before one that begins.
    return max(accumulate(change for _, change in sorted(events)))
