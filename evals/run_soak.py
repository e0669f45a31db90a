# SPDX-License-Identifier: Apache-2.0
"""Random traffic on one engine with trees, checked against no speculation.

    .venv/bin/python evals/run_soak.py --requests 2000 --seed 1

Models, requests and their right answers are made here from the seed; the draft is
rigged to hit what the target will say, so that trees are accepted in all their shapes.
Runs in fp32, on a GPU with CUDA graphs. What is sent and checked is in
``tests/helpers/soak_requests.py`` and ``tests/helpers/soak.py``.

On a GPU it prints which of the captured verify and draft graphs were replayed, and
which never were.

Exit code 1: an answer differs, or KV blocks are missing at the end. Where an answer
leaves the right one, the scores of the two tokens (logits and noise of the draw) are
looked up; closer than fp32 rounds they are a near tie, and either is right.
"""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests/helpers"), str(ROOT / "kernels"), str(ROOT)]

from vllm_dflash.cli.arguments import json_object  # noqa: E402


def main() -> int:
    args = _parse()
    _prepare_process(args.device)
    from engines import engine, tree_config
    from near_ties import ENGINE
    from rigged_draft import RiggedDraft
    from soak import Soak, rig_to, right_answers
    from soak_requests import make_requests
    from tiny_models import write_draft, write_target
    from tiny_tokenizer import write_tokenizer

    rig = RiggedDraft(hit_rate=args.hit_rate, seed=args.seed, strict=False)
    rig.install(SimpleNamespace(setattr=setattr))
    requests = make_requests(args.requests, args.seed)
    roomy, tight = _engine_options(args)
    with tempfile.TemporaryDirectory() as folder:
        target = write_target(Path(folder) / "target", **_windows(args))
        write_tokenizer(target)
        draft = write_draft(Path(folder) / "draft")
        started = time.perf_counter()
        with engine(target, **roomy) as llm:
            right = right_answers(llm, requests)
        print(f"{time.perf_counter() - started:.0f} s without speculation", flush=True)
        rig_to(rig, requests, right)
        started = time.perf_counter()
        config = tree_config(draft, **{**args.ddtree, "budget": args.budget})
        with engine(target, None if args.control else config, **tight) as llm:
            result = Soak(llm, requests, right, rig, _print).run()
        num_ties = 0
        if result.departures:
            with engine(target, **roomy, **ENGINE) as llm:
                num_ties = _count_near_ties(llm, requests, result.departures)
    kind = "again without speculation" if args.control else "with trees"
    print(f"{time.perf_counter() - started:.0f} s {kind}")
    print(f"answers ended with {dict(result.finish_reasons)}")
    if str(result.graphs):
        print(result.graphs)
    ties = f", {num_ties} of them near ties" if result.differences else ""
    print(f"RESULT {result}{ties}")
    return int(len(result.differences) > num_ties or bool(result.leaked_blocks))


def _count_near_ties(llm: Any, requests: list[Any], departures: list[Any]) -> int:
    from near_ties import TOLERANCE, score_gap

    by_name = {request.name: request for request in requests}
    count = 0
    for departure in departures:
        gap = score_gap(llm, by_name[departure.name], departure)
        is_tie = abs(gap) <= TOLERANCE
        count += is_tie
        print(
            f"{departure.name}, sample {departure.sample}: scores {gap:.3g} apart at "
            f"{len(departure.before)}"
        )
    return count


def _print(line: str) -> None:
    print(line, flush=True)


def _windows(args: argparse.Namespace) -> dict[str, Any]:
    """Window and full layers in turn: cache groups with block tables of their own."""
    if not args.windowed:
        return {}
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    return dict(layer_types=kinds, sliding_window=40)


def _engine_options(args: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options of the engine that has room for everything, and of the one with trees."""
    from soak_requests import MAX_MODEL_LEN

    common: dict[str, Any] = dict(
        skip_tokenizer_init=False, max_model_len=MAX_MODEL_LEN, dtype="float32"
    )
    if args.device == "gpu":
        # The backend that takes fp32.
        common |= dict(
            attention_backend="TRITON_ATTN", block_size=16, gpu_memory_utilization=0.2
        )
    # The smallest cache in which the longest request fits is one block more.
    block_size = common.get("block_size", 32)
    least = -(-MAX_MODEL_LEN // block_size) + 1
    # Every group of layers takes blocks of its own.
    num_groups = 2 if args.windowed else 1
    roomy = dict(common, max_num_seqs=32, num_gpu_blocks_override=68 * least)
    tight = dict(
        common,
        max_num_seqs=args.max_num_seqs,
        num_gpu_blocks_override=args.blocks
        or num_groups * least * args.max_num_seqs * 5 // 18,
        max_num_batched_tokens=args.max_num_batched_tokens,
        enforce_eager=args.device == "cpu",
    )
    return roomy, tight


def _prepare_process(device: str) -> None:
    """Set what is read when vLLM and Triton are imported."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    # vLLM's fp32 attention would multiply in TF32, and near ties would flip.
    os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")
    if device == "cpu":
        os.environ["VLLM_DFLASH_CPU"] = "1"
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    from vllm_dflash import plugin

    # As vLLM does where the plugin is installed.
    plugin.register_platform()
    plugin.register()


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--budget", type=int, default=16, help="nodes of a tree")
    parser.add_argument(
        "--ddtree",
        type=json_object("Options of ddtree by name", """--ddtree '{"budget": 31}'"""),
        default={},
        help="other options of the tree as JSON",
    )
    parser.add_argument(
        "--windowed", action="store_true", help="a target with sliding windows"
    )
    parser.add_argument(
        "--control",
        action="store_true",
        help="no trees either in the engine with the small cache: what differs then "
        "is vLLM's own",
    )
    parser.add_argument("--max-num-seqs", type=int, default=8)
    parser.add_argument(
        "--max-num-batched-tokens",
        type=int,
        help="tokens of a step; default: 200, on a GPU 300, where graphs are replayed",
    )
    parser.add_argument(
        "--blocks",
        type=int,
        help="KV blocks; default: for about a quarter of the longest requests",
    )
    parser.add_argument(
        "--hit-rate",
        type=float,
        default=0.85,
        help="how often the draft's candidates hold the right token",
    )
    args = parser.parse_args()
    if args.max_num_batched_tokens is None:
        args.max_num_batched_tokens = 300 if args.device == "gpu" else 200
    return args


if __name__ == "__main__":
    sys.exit(main())
