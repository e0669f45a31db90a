# SPDX-License-Identifier: Apache-2.0
"""Where one engine's steps go: kernels on the GPU, functions on the host, graphs.

    python evals/profile_round.py chain,47 --batch 1
    python evals/profile_round.py chain,auto --target TARGET --draft DRAFT
    python evals/profile_round.py none,chain,47 --batch 1 --arrivals 60

Runs each engine (``none``, ``chain``, ``auto`` or a fixed budget) in a process, of
Qwen3-8B's shape with dummy weights unless a pair is given, and prints milliseconds a
step, microseconds per step by kernel, the host functions with the most time of their
own, and which CUDA graph served each step. The engines start together and run one
after another. Host times are inflated by the profiler: compare engines only.

With ``--save DIR`` every engine leaves a trace (Perfetto, chrome://tracing) and a
profile of the host (``python -m pstats``) there; recording the launches too makes the
gaps between kernels longer.

With ``--arrivals N`` a new request of N prompt tokens, which ends after its first
token, joins before every step while the batch runs: every step then mixes a prefill
with the rows of the batch, and the report is about mixed steps.
"""

import argparse
import collections
import contextlib
import cProfile
import io
import os
import pstats
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
sys.path.insert(0, str(Path(__file__).resolve().parent))
from bench_round import speculative_config
from engine_wave import announce_done, announce_ready, report, run_wave
from model_shapes import write_qwen3_8b

WARMUP_STEPS, PROFILED_STEPS = 15, 20
# Requests of one step each that an engine which schedules ahead holds at a time.
ARRIVALS_UNDER_WAY = 4


class Engine:
    """An engine that answers a fixed batch of random prompts again and again."""

    def __init__(self, args: argparse.Namespace):
        from vllm import LLM

        target, draft = args.target, args.draft
        options: dict[str, Any] = dict(load_format="dummy")
        if target is None:
            target, draft = write_qwen3_8b(Path(tempfile.mkdtemp()))
        else:
            options.clear()
        config = speculative_config(args.engine, draft)
        if config is not None:
            options["speculative_config"] = config
        self.engine = LLM(
            model=target,
            skip_tokenizer_init=True,
            max_model_len=2048,
            max_num_seqs=max(8, args.batch + bool(args.arrivals) * ARRIVALS_UNDER_WAY),
            max_num_batched_tokens=8192,
            gpu_memory_utilization=0.1,
            kv_cache_memory_bytes=4 << 30,
            **options,
        ).llm_engine
        self.rng = random.Random(1)
        self.prompts = [self._random_prompt(args.context) for _ in range(args.batch)]
        self.arrivals = args.arrivals
        self.request_id = 0

    def run(self, max_tokens: int, on_step=lambda step: None) -> list[float]:
        """Return the time of each step in milliseconds, prefill and tail left out."""
        batch = {self._add(prompt, max_tokens) for prompt in self.prompts}
        times, step = [time.perf_counter()], 0
        while self.engine.has_unfinished_requests():
            on_step(step)
            is_joined = self.arrivals > 0 and len(batch) == len(self.prompts)
            if is_joined:
                self._add(self._random_prompt(self.arrivals), 1)
            ended = {out.request_id for out in self.engine.step() if out.finished}
            batch -= ended
            # Nobody joins once a request of the batch has ended: that is the tail.
            if is_joined or not self.arrivals:
                times.append(time.perf_counter())
            step += 1
        return [1e3 * (b - a) for a, b in zip(times, times[1:], strict=False)][8:-3]

    def _add(self, prompt: list[int], max_tokens: int) -> str:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self.request_id += 1
        params = SamplingParams(
            temperature=0.0,
            max_tokens=max_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        name = str(self.request_id)
        self.engine.add_request(name, {"prompt_token_ids": prompt}, params)
        return name

    def _random_prompt(self, length: int) -> list[int]:
        return [self.rng.randrange(10, 40000) for _ in range(length)]


def profile_device(engine: Engine, max_tokens: int, save: Path | None) -> None:
    import torch

    activities = [torch.profiler.ProfilerActivity.CUDA]
    if save is not None:
        # Launches too, so that a trace shows what the GPU waits for.
        activities.append(torch.profiler.ProfilerActivity.CPU)
    profiler = torch.profiler.profile(activities=activities)

    def on_step(step: int) -> None:
        if step == WARMUP_STEPS:
            profiler.start()
        elif step == WARMUP_STEPS + PROFILED_STEPS:
            torch.cuda.synchronize()
            profiler.stop()

    engine.run(max_tokens, on_step)
    if save is not None:
        profiler.export_chrome_trace(str(save.with_suffix(".trace.json.gz")))
    total: collections.Counter[str] = collections.Counter()
    calls: collections.Counter[str] = collections.Counter()
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            total[event.name] += event.device_time_total
            calls[event.name] += 1
    print(f"\nGPU: {sum(total.values()) / PROFILED_STEPS:.0f} us per step")
    for name, value in total.most_common(40):
        count = calls[name] / PROFILED_STEPS
        print(f"{value / PROFILED_STEPS:9.1f} us {count:6.1f} x  {name[:90]}")


def profile_host(engine: Engine, max_tokens: int, save: Path | None) -> None:
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

    modes: collections.Counter[tuple] = collections.Counter()
    dispatch = CudaGraphManager.dispatch

    def counting(self, *args, **kwargs):
        found = dispatch(self, *args, **kwargs)
        modes[type(self).__name__, found.cg_mode.name, found.num_tokens] += 1
        return found

    CudaGraphManager.dispatch = counting
    profile = cProfile.Profile()
    profile.enable()
    engine.run(max_tokens)
    profile.disable()
    CudaGraphManager.dispatch = dispatch
    if save is not None:
        profile.dump_stats(save.with_suffix(".pstats"))
    print("\ngraphs:", modes.most_common(8))
    pstats.Stats(profile).sort_stats("tottime").print_stats(40)


def profile_engine(args: argparse.Namespace) -> None:
    """Child: start one engine, wait for its turn, profile."""
    engine = Engine(args)
    announce_ready()
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        engine.run(args.max_tokens)
        steps = sorted(engine.run(args.max_tokens))
        low, high = (steps[len(steps) * part // 10] for part in (1, 9))
        arrivals = f" and {args.arrivals} tokens that join" if args.arrivals else ""
        print(
            f"== {args.engine}, batch {args.batch}{arrivals}: "
            f"{statistics.median(steps):.3f} ms a step (p10 {low:.3f}, p90 {high:.3f})"
        )
        save = None
        if args.save is not None:
            args.save.mkdir(parents=True, exist_ok=True)
            kind = f"-arrivals{args.arrivals}" if args.arrivals else ""
            save = args.save / f"{args.engine}-batch{args.batch}{kind}"
        profile_device(engine, args.max_tokens, save)
        profile_host(engine, args.max_tokens, save)
    report(dict(engine=args.engine, profile=text.getvalue()))
    announce_done()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engines", help="comma list: none, chain, auto, nodes")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--context", type=int, default=1000)
    parser.add_argument("--max-tokens", type=int, default=60)
    parser.add_argument(
        "--arrivals",
        type=int,
        default=0,
        metavar="N",
        help="a request of N prompt tokens joins in every step",
    )
    parser.add_argument("--target", help="a real pair instead of dummy weights")
    parser.add_argument("--draft")
    parser.add_argument(
        "--save",
        type=Path,
        metavar="DIR",
        help="keep each engine's trace and its profile of the host there",
    )
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.engine:
        profile_engine(args)
        return
    commands = {
        name: [sys.executable, __file__, *sys.argv[1:], "--engine", name]
        for name in args.engines.split(",")
    }
    for row in run_wave(commands, Path(tempfile.mkdtemp())):
        print(row["profile"])


if __name__ == "__main__":
    main()
