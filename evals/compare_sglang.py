# SPDX-License-Identifier: Apache-2.0
"""SGLang's DFlash and this plugin: same models, prompts, client, load and machine.

    bash evals/sglang_envs.sh
    .venv/bin/python evals/compare_sglang.py --model TARGET --draft-model DRAFT

The servers run one after another, each alone on the GPU, ``--rounds`` times in a new
random order. ``vllm bench serve`` is the client of both. Greedy answers are compared
token by token. docs/evaluation.md explains the output.
"""

import argparse
import dataclasses
import json
import random
import shlex
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import provenance
import sglang_agreement
import sglang_server
import sglang_table
from serving.arguments import (
    add_serving_arguments,
    log,
    numbers,
    parse_serving_arguments,
    serving_options,
)
from serving.load import Load, LoadError, closed_load, measure, write_prompts
from serving.servers import SERVERS as VLLM_SERVERS
from serving.servers import ServingOptions, server_spec
from sglang_server import SGLangServer, SGLangSpec

from vllm_dflash.cli.demo import signals_interrupt
from vllm_dflash.demo.client import RequestError
from vllm_dflash.demo.serve import ServerError, VLLMServer, free_port
from vllm_dflash.errors import option_error

EVALS = Path(__file__).resolve().parent
RESULTS = EVALS / "results"
SGLANG_PYTHON = EVALS.parent / ".venv-sglang" / "bin" / "python"
NAMES = tuple(
    [f"vllm-{name}" for name in VLLM_SERVERS]
    + [f"sglang-{name}" for name in sglang_server.SERVERS]
)
DEFAULT_NAMES = ("vllm-none", "vllm-chain", "vllm-tree-auto", *NAMES[-2:])
MIN_PROMPTS = 8


def main() -> int:
    args = _parse()
    args.output.parent.mkdir(parents=True, exist_ok=True)
    try:
        versions = _check(args)
    except ValueError as error:
        print(f"compare_sglang: {error}", file=sys.stderr)
        return 2
    options = serving_options(args)
    report = _new_report(args, options, versions)
    try:
        with signals_interrupt():
            for event in run(args, options):
                _add(report, event)
                # After each measurement, so that a run that is cut short is not lost.
                text = json.dumps(report, indent=1, default=dataclasses.asdict) + "\n"
                args.output.write_text(text, encoding="utf-8")
    except (ServerError, LoadError, RequestError) as error:
        print(f"compare_sglang: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        log("interrupted; what was measured is written")
    if not report["rows"]:
        print("compare_sglang: nothing was measured", file=sys.stderr)
        return 2
    print(sglang_table.speed(report["rows"]))
    if report["agreement"]:
        print(f"\n{sglang_table.agreement(report['agreement'])}")
    log(f"\nResults: {args.output}")
    return 0


def run(args: argparse.Namespace, options: ServingOptions) -> Iterator[dict[str, Any]]:
    """Run every server and yield rows, answers and what a server says of itself."""
    log_dir = Path(tempfile.mkdtemp(prefix="compare-sglang-"))
    log(f"Logs: {log_dir}")
    prompts = log_dir / "prompts.jsonl"
    target = options.pair.target
    write_prompts(target, prompts)
    adds_tokens = sglang_agreement.same_tokens_prompts(target, prompts)
    lines = prompts.read_text(encoding="utf-8").splitlines()
    texts = [json.loads(line)["prompt"] for line in lines][: args.agreement]
    ends = sglang_agreement.end_tokens(target)
    rng = random.Random(args.order_seed)
    settings = [(t, c) for t in args.temperatures for c in args.concurrency]
    for round_ in range(args.rounds):
        for name in rng.sample(args.servers, len(args.servers)):
            log_path = log_dir / f"{name}-{round_}.log"
            with make_server(name, args, options, log_path) as server:
                for setting in settings:
                    load = closed_load(args, setting, None, adds_tokens)
                    measure_server(server, load, prompts, log_dir / "bench.log")
                for repeat in range(args.repeats):
                    for setting in rng.sample(settings, len(settings)):
                        number = round_ * args.repeats + repeat
                        load = closed_load(args, setting, number, adds_tokens)
                        row = measure_server(
                            server, load, prompts, log_dir / "bench.log"
                        )
                        speed = row["result"]["output_throughput"]
                        log(
                            f"round {round_} T={load.temperature:g} "
                            f"c={load.concurrency} {name}: {speed:.1f} tokens/s"
                        )
                        yield {"row": {**row, "round": round_, "repeat": number}}
                if round_ == 0 and texts:
                    answers = sglang_agreement.ask(
                        server.client.base_url,
                        options.pair.served_name,
                        texts,
                        args.max_tokens,
                        ends,
                        adds_tokens,
                    )
                    yield {"name": name, "answers": answers}
                if round_ == 0 and isinstance(server, SGLangServer):
                    yield {"name": name, "info": server.info()}


def measure_server(
    server: VLLMServer, load: Load, prompts: Path, log_path: Path
) -> dict[str, Any]:
    """Measure one load; the acceptance length is what the server's metrics say."""
    if not isinstance(server, SGLangServer):
        return measure(server, load, prompts, log_path)
    before = server.counters()
    row = measure(server, load, prompts, log_path)
    length = sglang_server.acceptance_length(before, server.counters())
    if length is not None:
        row["result"]["spec_decode_acceptance_length"] = length
    return row


def make_server(
    name: str, args: argparse.Namespace, options: ServingOptions, log_path: Path
) -> VLLMServer:
    """Return a server of ``NAMES``, not yet started."""
    engine, _, kind = name.partition("-")

    def named_log(text: str) -> None:
        log(f"{name}: {text}")

    if engine == "vllm":
        spec = server_spec(kind, free_port(), options)
        return VLLMServer(dataclasses.replace(spec, label=name), log_path, named_log)
    spec = SGLangSpec(
        label=name,
        pair=options.pair,
        is_cpu=False,
        port=free_port(),
        max_model_len=options.max_model_len,
        extra_args=shlex.split(args.sglang_args),
        python=str(args.sglang_python),
        depth=options.depth if kind == "dflash" else None,
        max_num_seqs=options.max_num_seqs,
    )
    return SGLangServer(spec, log_path, named_log)


def _add(report: dict[str, Any], event: dict[str, Any]) -> None:
    if "row" in event:
        report["rows"].append(event["row"])
    elif "info" in event:
        report["server_info"][event["name"]] = event["info"]
    else:
        answers = report["answers"]
        answers[event["name"]] = event["answers"]
        report["agreement"] = [
            {
                "server": name,
                "reference": other,
                **sglang_agreement.compare(answers[name], answers[other]),
            }
            for name, other in sglang_agreement.references(list(answers))
        ]
        report["acceptance_by_answer"][event["name"]] = (
            sglang_agreement.acceptance_length(event["answers"])
        )


def _new_report(
    args: argparse.Namespace, options: ServingOptions, versions: dict[str, Any]
) -> dict[str, Any]:
    return {
        "kind": "serving",
        "provenance": provenance.collect("pandas"),
        "sglang_versions": versions,
        "settings": {
            "model": options.pair.served_name,
            "draft": "embedded" if options.pair.is_embedded else options.pair.draft,
            "depth": options.depth,
            "budget": options.budget,
            "max_tokens": args.max_tokens,
            "prompts_per_slot": args.prompts_per_slot,
            "rounds": args.rounds,
            "repeats": args.repeats,
            "order_seed": args.order_seed,
            "ignore_eos": args.ignore_eos,
            "sglang_args": args.sglang_args,
            "serve_args": args.serve_args,
        },
        "rows": [],
        "server_info": {},
        "agreement": [],
        "acceptance_by_answer": {},
        "answers": {},
    }


def _check(args: argparse.Namespace) -> dict[str, Any]:
    for name in args.servers:
        if name not in NAMES:
            raise option_error(
                f"there is no server {name!r}",
                f"Allowed are {', '.join(NAMES)}",
                f"--servers {','.join(DEFAULT_NAMES)}",
            )
    if not any(name.startswith("sglang-") for name in args.servers):
        return {}
    versions = sglang_server.environment_versions(str(args.sglang_python))
    if not provenance.has_gpu():
        raise option_error(
            "there is no CUDA device",
            "SGLang's DFLASH runs on CUDA only; without it evals/bench_serving.py "
            "compares the servers of vLLM",
            ".venv/bin/python evals/bench_serving.py",
        )
    return versions


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--servers", type=lambda text: text.split(","), default=list(DEFAULT_NAMES))
    add("--sglang-python", type=Path, default=SGLANG_PYTHON)
    add("--sglang-args", default="", help="more flags of sglang.launch_server")
    add("--concurrency", type=numbers(int), default=[1, 8, 32])
    add("--rounds", type=int, default=2, help="starts of each server")
    add("--repeats", type=int, default=2, help="measurements per start")
    add_serving_arguments(parser, MIN_PROMPTS, "of vLLM's servers")
    add(
        "--agreement", type=int, default=50, help="greedy answers to compare; 0 is none"
    )
    add("--output", type=Path, default=RESULTS / "sglang.local.json")
    return parse_serving_arguments(parser)


if __name__ == "__main__":
    sys.exit(main())
