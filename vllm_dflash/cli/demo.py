# SPDX-License-Identifier: Apache-2.0
"""``vllm-dflash demo``: a served answer, and the table."""

import argparse
import importlib.util
import re
import shlex
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType
from typing import Any

from vllm_dflash.cli.arguments import CommandError
from vllm_dflash.config import DEFAULT_BUDGET, DEFAULT_BUDGET_CPU
from vllm_dflash.demo import compare, fetch
from vllm_dflash.demo.client import RequestError
from vllm_dflash.demo.convert import ConversionError
from vllm_dflash.demo.pair import DEFAULT_DEPTH, ModelPair, embedded_pair
from vllm_dflash.demo.serve import (
    CPU_RUNNER_ENV,
    ServerError,
    ServerSpec,
    VLLMServer,
    free_port,
)

SERVE_PORT = 8000


def run_demo(args: argparse.Namespace) -> int:
    """Run the demo that the arguments describe; returns the exit code."""
    _require_packages()
    try:
        with signals_interrupt():
            pair = _model_pair(args)
            specs = _server_specs(args, pair, is_cpu=not _has_gpu())
            if args.serve:
                return _serve(specs[0], args.max_tokens)
            _compare(specs, args.max_tokens)
            return 0
    except (fetch.FetchError, ConversionError, ServerError, RequestError) as error:
        raise CommandError(str(error)) from error


def _serve(spec: ServerSpec, max_tokens: int) -> int:
    _heading(spec.label)
    with start_server(spec) as server:
        _stream_answer(server, max_tokens)
        print(f"\nServing on {server.client.base_url}/v1 until Ctrl-C. Ask it:\n")
        print(
            f"curl {server.client.base_url}/v1/chat/completions "
            "-H 'Content-Type: application/json' -d "
            f'\'{{"model": "{spec.pair.served_name}", "messages": '
            '[{"role": "user", "content": "Hello!"}]}\'',
            flush=True,
        )
        try:
            code = server.wait()
        except KeyboardInterrupt:
            _progress("stopping")
            return 0
        raise ServerError(
            f"vllm serve stopped by itself with exit code {code}. "
            f"{server.describe_log()}"
        )


def _compare(specs: list[ServerSpec], max_tokens: int) -> None:
    measurements = []
    for index, spec in enumerate(specs, 1):
        _heading(f"{index}/{len(specs)} {spec.label}")
        with start_server(spec) as server:
            if index == 1:
                _stream_answer(server, max_tokens)
            measurements.append(
                compare.measure(spec.label, server.client, max_tokens, _progress)
            )
    baseline = next(
        row
        for row, spec in zip(measurements, specs, strict=True)
        if spec.speculative_config is None and spec.with_plugin
    )
    _heading("result")
    print(compare.format_table(measurements[::-1], baseline))
    print(
        f"\n{len(compare.QUESTIONS)} prompts one at a time, at most {max_tokens} "
        "tokens each, temperature 0; tokens/s counts prefill too."
    )
    if specs[0].is_cpu:
        print(
            "fp32 on the CPU, with Triton in its interpreter: read it for equal tokens "
            "and acceptance; the speed says nothing about a GPU."
        )
    else:
        print("bf16 on the GPU: near ties may be decided differently between rows.")
    by_hand = replace(specs[0], port=SERVE_PORT)
    print("\nThe tree server by hand:\n" + _by_hand(by_hand))


def _server_specs(
    args: argparse.Namespace, pair: ModelPair, *, is_cpu: bool
) -> list[ServerSpec]:
    """Return the servers in the order in which they run: the tree first."""
    depth = args.depth or DEFAULT_DEPTH
    budget = args.budget or max(DEFAULT_BUDGET_CPU if is_cpu else DEFAULT_BUDGET, depth)
    port = args.port or (SERVE_PORT if args.serve else free_port())

    def spec(label: str, ddtree: Any = None, **changes: Any) -> ServerSpec:
        speculative_config = None
        if ddtree is not None:
            speculative_config = {
                "method": "dflash",
                "model": pair.draft,
                "num_speculative_tokens": depth,
                "ddtree": ddtree,
            }
        return ServerSpec(
            label=label,
            pair=pair,
            is_cpu=is_cpu,
            port=port,
            speculative_config=speculative_config,
            extra_args=args.serve_args,
            **changes,
        )

    specs = [
        spec(f"DFlash tree, {budget} nodes", {"budget": budget}),
        spec(f"DFlash chain of {depth} (vLLM's own)", ddtree=False),
        spec("no speculation"),
    ]
    if args.vllm_default:
        if not is_cpu:
            raise CommandError(
                "--vllm-default adds vLLM's default CPU runner (got a GPU). Leave it "
                "out on a GPU, where vLLM's default is the row without speculation."
            )
        label = "no speculation, no plugin (vLLM's default)"
        specs.append(spec(label, with_plugin=False))
    return specs


def tree_server(args: argparse.Namespace, variables: dict[str, str]) -> ServerSpec:
    """Return the demo's server with a tree, with more environment variables."""
    _require_packages()
    specs = _server_specs(args, _model_pair(args), is_cpu=not _has_gpu())
    return replace(specs[0], variables=variables)


def _model_pair(args: argparse.Namespace) -> ModelPair:
    if (args.model is None) != (args.draft_model is None):
        raise CommandError(
            "a draft belongs to one target (got only one of the two). Give both or "
            "neither. Type: --model TARGET --draft-model DRAFT"
        )
    if args.model is None:
        _heading("model")
        return embedded_pair(_progress)
    return ModelPair(args.model, args.draft_model, args.model, is_embedded=False)


def start_server(spec: ServerSpec) -> VLLMServer:
    name = re.sub(r"\W+", "-", spec.label).strip("-").lower()
    log_path = fetch.cache_dir() / "logs" / f"{name}.log"
    _progress(f"vllm serve, log: {log_path}")
    return VLLMServer(spec, log_path, _progress)


def _stream_answer(server: VLLMServer, max_tokens: int) -> None:
    question = compare.CHAT_QUESTION
    print(f"\n  > {question}\n  ", end="", flush=True)
    for piece in server.client.stream(compare.user_turn(question), max_tokens):
        print(piece.replace("\n", "\n  "), end="", flush=True)
    print("\n", flush=True)


def _by_hand(spec: ServerSpec) -> str:
    variables = CPU_RUNNER_ENV if spec.is_cpu else {}
    words = [f"{name}={value}" for name, value in variables.items()]
    return " ".join([*words, shlex.join(["vllm", "serve", *spec.serve_args()])])


def _require_packages() -> None:
    requirements = {
        "vllm": "vllm>=0.32.0,<0.33",
        "gguf": "gguf>=0.17",
        "safetensors": "safetensors>=0.6",
    }
    for module, requirement in requirements.items():
        if importlib.util.find_spec(module) is None:
            raise CommandError(
                f"the package {module} is not installed. Type: bash scripts/setup.sh, "
                f'or: pip install "{requirement}"'
            )


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


@contextmanager
def signals_interrupt() -> Iterator[None]:
    """Treat SIGTERM and SIGHUP like Ctrl-C, so that a server is always ended."""

    def interrupt(signal_number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    numbers = (signal.SIGTERM, signal.SIGHUP)
    previous = [signal.signal(number, interrupt) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, previous, strict=True):
            signal.signal(number, handler)


def _heading(text: str) -> None:
    print(f"\n== {text}", flush=True)


def _progress(text: str) -> None:
    print(f"   {text}", flush=True)
