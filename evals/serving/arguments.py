# SPDX-License-Identifier: Apache-2.0
"""Options that every comparison of served models takes, and what they stand for."""

import argparse
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import provenance
from serving.servers import ServingOptions

from vllm_dflash.demo.pair import DEFAULT_DEPTH, ModelPair, embedded_pair


def log(text: str) -> None:
    """Tell the user; stdout is for the results."""
    print(text, file=sys.stderr, flush=True)


def numbers(kind: type) -> Callable[[str], list[Any]]:
    """Return the type of an option that is a comma list."""
    return lambda text: [kind(part) for part in text.split(",")]


def add_serving_arguments(
    parser: argparse.ArgumentParser, min_prompts: int, kv_cache_help: str
) -> None:
    """Declare models, their servers and their load."""
    add = parser.add_argument
    add("--model", help="target; the embedded pair if absent")
    add("--draft-model")
    add("--temperatures", type=numbers(float), default=[0.0, 1.0])
    add("--depth", type=int, default=DEFAULT_DEPTH)
    add("--budget", type=int, help="nodes; the plugin's own if absent")
    add("--max-tokens", type=int, default=192, help="per answer")
    add("--prompts-per-slot", type=int, default=4, help="requests = this x concurrency")
    add("--min-prompts", type=int, default=min_prompts)
    add("--ignore-eos", action="store_true", help="all answers as long")
    add("--max-model-len", type=int, default=2048)
    add("--kv-cache-gib", type=float, default=8, help=kv_cache_help)
    add("--serve-args", default="", help="more flags of vllm serve")
    add("--order-seed", type=int, default=0)


def parse_serving_arguments(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse the command line; a target needs its draft."""
    args = parser.parse_args()
    if (args.model is None) != (args.draft_model is None):
        parser.error("--model and --draft-model belong together")
    return args


def serving_options(args: argparse.Namespace) -> ServingOptions:
    """Return what all servers of a run have in common."""
    if args.model is None:
        pair = embedded_pair(log)
    else:
        is_local = Path(args.model).is_dir()
        pair = ModelPair(args.model, args.draft_model, args.model, is_local)
    # Only `bench_serving.py` has it.
    also = getattr(args, "also", None)
    levels = [*args.concurrency, *(also.concurrency if also else ())]
    return ServingOptions(
        pair=pair,
        is_cpu=not provenance.has_gpu(),
        depth=args.depth,
        budget=args.budget,
        max_model_len=args.max_model_len,
        max_num_seqs=max(levels),
        kv_cache_gib=args.kv_cache_gib,
        extra_args=tuple(shlex.split(args.serve_args)),
    )
