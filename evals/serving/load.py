# SPDX-License-Identifier: Apache-2.0
"""The load of a serving benchmark: vLLM's own ``vllm bench serve``.

It is called in this process, since importing it takes longer than most measurements;
each row holds the command line that does the same.
"""

import asyncio
import contextlib
import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_dflash.demo.serve import VLLMServer

PROMPTS = Path(__file__).resolve().parent.parent / "prompts" / "heldout.jsonl"
# Lists with an entry for each request or token; the percentiles are beside them.
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
}


@dataclass(frozen=True)
class Load:
    """One measurement of one server.

    Attributes:
        add_special_tokens: Whether the server's tokenizer adds its own to a prompt.
    """

    temperature: float
    concurrency: int
    num_prompts: int
    max_tokens: int
    seed: int
    ignore_eos: bool = False
    # The chat template has added what the tokenizer would add again.
    add_special_tokens: bool = False


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
    by_kind: dict[str, list[str]] = {}
    for line in PROMPTS.read_text(encoding="utf-8").splitlines():
        item = json.loads(line)
        prompt = tokenizer.apply_chat_template(
            item["messages"], add_generation_prompt=True, tokenize=False
        )
        by_kind.setdefault(item["kind"], []).append(prompt)
    # The kinds in turn, so that a few prompts are of all kinds.
    longest = max(map(len, by_kind.values()))
    prompts = [
        prompts[index]
        for index in range(longest)
        for prompts in by_kind.values()
        if index < len(prompts)
    ]
    lines = [json.dumps({"prompt": prompt}) for prompt in prompts]
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
    args += ["--max-concurrency", str(load.concurrency)]
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
    return {
        "server": server.spec.label,
        "temperature": load.temperature,
        "concurrency": load.concurrency,
        "seed": load.seed,
        "command": shlex.join(["vllm", "bench", "serve", *args]),
        "result": {k: v for k, v in result.items() if k not in _PER_REQUEST},
    }
