# SPDX-License-Identifier: Apache-2.0
"""`scripts/train_draft.py`: the stages of a run, each of which can be interrupted."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from vllm_dflash.errors import option_error
from vllm_dflash_training.config import RunConfig, load_config
from vllm_dflash_training.distributed import find_device, is_first_process, world
from vllm_dflash_training.heldout import HeldOut
from vllm_dflash_training.processes import INTERRUPTED, obey, run_together
from vllm_dflash_training.shards import require_earlier_run, require_same_run

ROOT = Path(__file__).resolve().parents[2]
STAGES = ("prompts", "generate", "train", "export", "evaluate")
DRAFT = "draft"
_LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def main(arguments: list[str] | None = None) -> int:
    """Run the stages of a config; return the exit code."""
    args = _parse(arguments)
    try:
        config = load_config(args.config, args.set)
        stages = args.stages.split(",")
        unknown = [stage for stage in stages if stage not in STAGES]
        if unknown:
            raise option_error(
                f"there is no stage {unknown[0]!r}",
                f"Allowed: {', '.join(STAGES)}",
                "--stages prompts,generate",
            )
        return _run(config, stages, args)
    except ValueError as error:
        _say(f"error: {error}")
        return 2
    except KeyboardInterrupt:
        _say("interrupted; the same command goes on")
        return INTERRUPTED


def _run(config: RunConfig, stages: list[str], args: argparse.Namespace) -> int:
    heldout = HeldOut(ROOT / config.prompts.heldout)
    config.folder().mkdir(parents=True, exist_ok=True)
    # Before the training all other processes of torchrun wait for the first.
    if is_first_process():
        if "prompts" in stages:
            from vllm_dflash_training.generate import make_prompts

            _say(f"{make_prompts(config, heldout)} prompts")
        if "generate" in stages:
            _generate(config, heldout, args)
    if "train" in stages and not _train(config, heldout):
        _say("interrupted; the same command goes on")
        return INTERRUPTED
    if is_first_process():
        if "export" in stages:
            _export(config)
        if "evaluate" in stages and config.evaluation.engine_budgets:
            return _evaluate(config)
    return 0


def _generate(config: RunConfig, heldout: HeldOut, args: argparse.Namespace) -> None:
    from vllm_dflash_training.generate import Generation
    from vllm_dflash_training.speculation import find_speculation

    require_same_run(config.data_folder() / "facts.json", _data_facts(config))
    generation = Generation(config, heldout, args.engine or 0)
    if args.engine is None and generation.is_complete():
        _say("all responses are there")
        return
    # Before any engine is started, which takes a while.
    speculation = find_speculation(config)
    if config.generation.backend == "vllm" and args.engine is None:
        _generate_with_engines(config, args)
        return
    if args.parent is not None:
        obey(args.parent)
    from vllm_dflash_training.backends import (
        TransformersBackend,
        VllmBackend,
        vllm_device,
    )
    from vllm_dflash_training.target import pick_dtype, target_folder
    from vllm_dflash_training.tokenise import load_tokens

    options = config.generation
    # First of all: the tokenizer is of a library that knows CUDA too.
    if options.backend == "vllm":
        device = vllm_device(speculation is not None)
    else:
        device = find_device()
    dtype = pick_dtype(config.target_dtype, device)
    target = target_folder(config.target)
    tokens, stops = load_tokens(target)
    if options.backend == "vllm":
        own = config.prompts.self_generated.max_tokens
        longest = max(options.max_tokens, config.evaluation.max_tokens, own)
        # Held-out prompts have no limit; twice that of the others is plenty.
        length = 2 * config.prompts.max_tokens + longest
        backend = VllmBackend(target, dtype, length, stops, options, speculation)
    else:
        backend = TransformersBackend(target, dtype, device, stops, options)
    started = time.perf_counter()
    generation.run(tokens, backend)
    _say(
        f"{generation.num_shards} shards of responses, {generation.num_tokens} tokens, "
        f"in {time.perf_counter() - started:.1f} s without the start"
    )


def _generate_with_engines(config: RunConfig, args: argparse.Namespace) -> None:
    """Generate in processes: an engine gives its memory back when its process ends."""
    command = [sys.executable, str(ROOT / "scripts/train_draft.py")]
    command += ["--config", str(args.config), "--stages", "generate"]
    command += [f"--set={text}" for text in args.set or []]
    command += [f"--parent={os.getpid()}"]
    run_together(
        [[*command, f"--engine={i}"] for i in range(config.generation.engines)],
        env={k: v for k, v in os.environ.items() if k not in _LAUNCHER},
        way_out="generation.engines: 1 if memory is short, or generation.backend: "
        "transformers to go without the engine",
    )


def _train(config: RunConfig, heldout: HeldOut) -> bool:
    import torch

    from vllm_dflash_training.data import Responses, load_responses
    from vllm_dflash_training.generate import load_heldout_responses
    from vllm_dflash_training.target import (
        Target,
        is_same_target,
        pick_dtype,
        target_folder,
    )
    from vllm_dflash_training.trainer import Trainer

    torch.set_float32_matmul_precision("high")
    with world() as this:
        require_same_run(config.data_folder() / "facts.json", _data_facts(config))
        more = [Path(folder) for folder in config.more_data]
        for folder in more:
            require_earlier_run(folder, "more_data", config.target, is_same_target)
        folders = [config.data_folder(), *more]
        responses = load_responses(folders, config.training.max_length, heldout)
        if this.is_first:
            _say(
                f"{len(responses)} responses, {responses.num_response_tokens} tokens "
                "that the target wrote"
            )
        dtype = pick_dtype(config.target_dtype, this.device)
        target = Target(target_folder(config.target), dtype, this.device)
        held = load_heldout_responses(config.data_folder())
        longest = config.training.max_length
        held = [(p, r[: longest - len(p)]) for p, r in held if len(p) + 2 <= longest]
        held = [(p, r) for p, r in held if len(r) > 1]
        trainer = Trainer(config, target, responses, this)
        if trainer.resume() and this.is_first:
            _say(f"goes on from step {trainer.step}")
        is_done = trainer.train(Responses(held) if held else None)
        if this.is_first:
            trainer.export(config.folder(DRAFT))
        return is_done


def _export(config: RunConfig) -> None:
    folder = config.folder(DRAFT)
    weights = folder / "model.safetensors"
    if not weights.is_file():
        raise option_error(
            f"there is no draft in {folder}", "A trained one is", "--stages train"
        )
    _say(f"{folder}: {weights.stat().st_size / 1e6:.1f} MB")


def _evaluate(config: RunConfig) -> int:
    """Serve the draft, and compare answers and acceptance with no speculation."""
    from vllm_dflash_training.target import target_folder

    options, output = config.evaluation, config.folder() / "acceptance.json"
    command = [sys.executable, str(ROOT / "evals/run_acceptance.py")]
    command += ["--model", target_folder(config.target)]
    command += ["--draft-model", str(config.folder(DRAFT))]
    command += ["--max-tokens", str(options.max_tokens)]
    command += ["--max-children", str(options.max_children)]
    command += ["--budgets", *map(str, options.engine_budgets)]
    command += ["--depth", str(_depth(config)), "--output", str(output)]
    if options.limit is not None:
        command += ["--limit", str(options.limit)]
    if options.engine_dtype != "auto":
        command += ["--dtype", options.engine_dtype]
    env = {k: v for k, v in os.environ.items() if k not in _LAUNCHER}
    path = [str(ROOT), str(ROOT / "kernels"), env.get("PYTHONPATH", "")]
    env["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    return subprocess.run(command, env=env, check=False).returncode


def _depth(config: RunConfig) -> int:
    text = (config.folder(DRAFT) / "config.json").read_text(encoding="utf-8")
    return json.loads(text)["block_size"] - 1


def _data_facts(config: RunConfig) -> dict:
    from vllm_dflash_training.generate import facts

    return facts(config)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="train_draft.py",
        description="Make a DFlash draft for a target. See docs/training.md.",
    )
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument(
        "--stages", default=",".join(STAGES), help="comma-separated; default: all"
    )
    parser.add_argument(
        "--set",
        action="append",
        metavar="SECTION.KEY=VALUE",
        help="change a value of the config",
    )
    # Of one of the processes that generate: which it is, and who started it.
    parser.add_argument("--engine", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--parent", type=int, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)
