# SPDX-License-Identifier: Apache-2.0
"""Generation by several engines: the same files as by one, also when one is ended."""

import dataclasses
import threading
import zlib
from collections.abc import Iterable
from pathlib import Path

import pytest
from training_runs import ROOT

from vllm_dflash_training.backends import Job
from vllm_dflash_training.config import (
    GenerationOptions,
    Pass,
    PromptOptions,
    RunConfig,
    SelfPrompts,
    SpeculativeOptions,
)
from vllm_dflash_training.generate import Generation, facts, make_prompts
from vllm_dflash_training.heldout import HeldOut
from vllm_dflash_training.shards import read_rows

STOP = 3


class Letters:
    """A tokenizer of code points."""

    def prompt(self, messages: list[dict[str, str]]) -> list[int]:
        return [ord(c) for c in messages[-1]["content"]]

    def opening(self, words: str) -> list[int]:
        return [1, *map(ord, words)]

    def text(self, tokens: list[int]) -> str:
        return "".join(chr(t) for t in tokens if t != STOP)


class Seeded:
    """Answers that depend on the prompt and the sampling alone; can be interrupted."""

    stop_ids = [STOP]

    def __init__(self, max_jobs: int | None = None):
        self.max_jobs, self.jobs = max_jobs, []

    def run(self, jobs: Iterable[Job]) -> None:
        for job in jobs:
            if len(self.jobs) == self.max_jobs:
                raise KeyboardInterrupt
            self.jobs.append(job)
            job.finish([self._answer(job, i) for i in range(len(job.prompts))])

    def _answer(self, job: Job, index: int) -> list[int]:
        sampling = job.sampling
        seed = sampling.seed + index if sampling.temperature else 0
        number = zlib.crc32(repr((job.prompts[index], seed)).encode())
        # Few different ones, some of which are cut off: own prompts meet again.
        length = 16 if sampling.temperature < 0.8 else 13 + number % 2
        letters = [97 + (number % 5 + i) % 26 for i in range(length)]
        return letters if number % 11 == 0 else [*letters, STOP]


@pytest.fixture(scope="module")
def heldout() -> HeldOut:
    return HeldOut(ROOT / "evals/prompts/heldout.jsonl")


def run_config(folder: Path, engines: int, **generation) -> RunConfig:
    options = dict(
        passes=[Pass(), Pass(0.7, 0.5)], max_tokens=20, shard_size=4, engines=engines
    )
    return RunConfig(
        work_dir=str(folder),
        prompts=PromptOptions(synthetic=17, self_generated=SelfPrompts(count=30)),
        generation=GenerationOptions(**{**options, **generation}),
    )


def generate(config: RunConfig, heldout: HeldOut, backends: list[Seeded]) -> None:
    """All engines at once, each in a thread that ends as it may."""
    make_prompts(config, heldout)

    def run(index: int) -> None:
        try:
            Generation(config, heldout, index).run(Letters(), backends[index])
        except KeyboardInterrupt:
            return

    threads = [
        threading.Thread(target=run, args=(i,), daemon=True)
        for i in range(len(backends))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=10)


def contents(config: RunConfig) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in config.data_folder().iterdir()}


@pytest.fixture(scope="module")
def reference(tmp_path_factory, heldout) -> dict[str, bytes]:
    config = run_config(tmp_path_factory.mktemp("one"), 1)
    generate(config, heldout, [Seeded()])
    assert Generation(config, heldout).is_complete()
    return contents(config)


def test_own_prompts_are_all_different_and_none_is_cut_off(
    tmp_path, heldout, reference
):
    path = tmp_path / "self.jsonl"
    path.write_bytes(reference["self.jsonl"])
    rows = list(read_rows(path))
    hashes = [row["hash"] for row in rows]
    assert len(set(hashes)) == len(hashes)
    # Some were dropped, so the merging had something to do.
    assert 3 < len(rows) < 30


@pytest.mark.parametrize("engines", [2, 3, 5])
def test_several_engines_write_what_one_does(tmp_path, heldout, reference, engines):
    config = run_config(tmp_path, engines)
    backends = [Seeded() for _ in range(engines)]
    generate(config, heldout, backends)
    assert contents(config) == reference
    # Nothing was made twice, and no engine was idle.
    jobs = [len(backend.jobs) for backend in backends]
    alone = Seeded()
    generate(run_config(tmp_path / "alone", 1), heldout, [alone])
    assert sum(jobs) == len(alone.jobs)
    assert min(jobs) > 0


@pytest.mark.parametrize("max_jobs", [0, 2, 4, 6])
@pytest.mark.parametrize("after", [1, 2, 3])
def test_an_ended_engine_leaves_whole_files(
    tmp_path, heldout, reference, max_jobs, after
):
    """Both are ended, as by the parent, one earlier; then any number goes on."""
    config = run_config(tmp_path, 2)
    if max_jobs < 4:
        # The first would wait for the other's own prompts: it is ended with it.
        generate(config, heldout, [Seeded(4), Seeded(max_jobs)][:1])
    else:
        generate(config, heldout, [Seeded(), Seeded(max_jobs)])
    done = contents(config)
    missing = set(reference) - set(done)
    assert missing
    assert all(reference[n] == done[n] for n in set(reference) & set(done))
    config = run_config(tmp_path, after)
    assert not Generation(config, heldout).is_complete()
    generate(config, heldout, [Seeded() for _ in range(after)])
    assert contents(config) == reference
    assert Generation(config, heldout).is_complete()


def test_passes_are_shared_alike(tmp_path, heldout):
    config = run_config(tmp_path, 2, shard_size=2)
    backends = [Seeded(), Seeded()]
    generate(config, heldout, backends)
    for temperature in (0.0, 0.7):
        counts = [
            sum(
                job.sampling.temperature == temperature
                and job.sampling.max_tokens == 20
                for job in backend.jobs
            )
            for backend in backends
        ]
        assert min(counts) > 3 and abs(counts[0] - counts[1]) <= 1


def test_no_shard_is_begun_after_the_time_limit(tmp_path, heldout, reference):
    config = run_config(tmp_path, 1, time_limit_s=0.0)
    generate(config, heldout, [Seeded()])
    # Other stages need these, so the limit is none for them.
    assert set(contents(config)) == {
        name for name in reference if not name.startswith("responses")
    }


@pytest.mark.parametrize(
    ("change", "is_same"),
    [
        (dict(engines=4), True),
        (dict(batch_size=7, gpu_memory_utilization=0.2, time_limit_s=1.0), True),
        (dict(engine_args=dict(kv_cache_memory_bytes=1, max_num_seqs=3)), True),
        (dict(speculative=SpeculativeOptions("a", 7)), True),
        (dict(engine_args=dict(quantization="fp8")), False),
        (dict(shard_size=5), False),
        (dict(min_p=0.1), False),
    ],
)
def test_speed_and_memory_make_no_other_data(tmp_path, change, is_same):
    config = run_config(tmp_path, 1)
    other = dataclasses.replace(
        config, generation=dataclasses.replace(config.generation, **change)
    )
    assert (facts(config) == facts(other)) == is_same
    # The config itself keeps what the facts leave out.
    for name, value in change.items():
        assert getattr(other.generation, name) == value
