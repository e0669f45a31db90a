# SPDX-License-Identifier: Apache-2.0
"""The worker's side: stage times, the counters' way to the front end."""

import inspect
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.multiprocess import MultiProcessCollector

from vllm_dflash.metrics import exchange, publisher
from vllm_dflash.metrics.definitions import ACCEPTED_BY_RANK, COUNTER, STAGE_TIME
from vllm_dflash.metrics.observer import WARMUP_IDS, RoundObserver
from vllm_dflash.metrics.publisher import CounterPublisher
from vllm_dflash.metrics.stage_clock import STAGES, StageClock

LABELS = ("model", "0")


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)
    monkeypatch.setattr(exchange.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(
        "vllm.distributed.parallel_state.get_tensor_model_parallel_rank", lambda: 0
    )
    return SimpleNamespace(
        instance_id="1234",
        model_config=SimpleNamespace(served_model_name="model"),
        parallel_config=SimpleNamespace(data_parallel_index=0),
    )


def own_folder():
    return exchange.private_folder(psutil.Process())


def scrape(collector) -> dict[tuple[str, str], float]:
    """(sample, its own label) -> value."""
    return {
        (sample.name, sample.labels.get("rank") or sample.labels.get("stage")): value
        for metric in collector.collect()
        for sample in metric.samples
        for value in [sample.value]
        if sample.name.startswith("vllm_dflash:")
    }


def run_round(clock, sleep_s=0.0):
    clock.begin()
    for stage in STAGES[:-1]:
        clock.mark(stage)
    time.sleep(sleep_s)
    clock.mark(STAGES[-1])
    clock.end()


def test_stage_clock_adds_up_finished_rounds():
    clock = StageClock(torch.device("cpu"))
    for _ in range(3):
        run_round(clock, 0.01)
    clock.collect()
    assert clock.counts == dict.fromkeys(STAGES, 3)
    assert 0.03 <= clock.seconds["draft"] < 1
    assert 0 <= clock.seconds["prepare"] < 0.01


def test_stage_clock_drops_a_round_that_never_ended_and_ignores_other_steps():
    clock = StageClock(torch.device("cpu"))
    clock.mark("update")
    clock.end()
    clock.begin()
    clock.mark("prepare")
    run_round(clock)
    clock.collect()
    assert clock.counts == dict.fromkeys(STAGES, 1)


class SlowEvent:
    """A CUDA event of a device that takes its time."""

    reached: set = set()
    made: list = []

    def __init__(self, enable_timing):
        assert enable_timing
        SlowEvent.made.append(self)

    def record(self):
        SlowEvent.reached.discard(self)

    def query(self):
        return self in SlowEvent.reached

    def elapsed_time(self, other):
        assert {self, other} <= SlowEvent.reached, "would be an error of CUDA"
        return 2.0


def test_stage_clock_never_reads_an_event_that_is_not_reached(monkeypatch):
    monkeypatch.setattr(SlowEvent, "reached", set())
    monkeypatch.setattr(SlowEvent, "made", [])
    monkeypatch.setattr(torch.cuda, "Event", SlowEvent)
    clock = StageClock(torch.device("cuda"))
    run_round(clock)
    clock.collect()
    assert clock.counts["target"] == 0
    SlowEvent.reached.update(SlowEvent.made)
    clock.collect()
    assert clock.counts["target"] == 1 and clock.seconds["target"] == 0.002
    run_round(clock)
    assert len(SlowEvent.made) == len(STAGES) + 1, "events are used again"


def test_stage_clock_does_not_grow_when_nobody_reads_it(monkeypatch):
    monkeypatch.setattr("vllm_dflash.metrics.stage_clock._MAX_PENDING", 5)
    clock = StageClock(torch.device("cpu"))
    for _ in range(20):
        run_round(clock)
    clock.collect()
    assert clock.counts["draft"] == 5


def test_values_of_two_workers_are_added(tmp_path):
    for index, instance in enumerate(("a", "b"), 1):
        table = exchange.WorkerTable(tmp_path, COUNTER, instance, LABELS)
        table.write(ACCEPTED_BY_RANK, {"0": 10 * index, "1": index})
    seen = scrape(MultiProcessCollector(CollectorRegistry(), path=str(tmp_path)))
    name = ACCEPTED_BY_RANK.samples[0]
    assert seen == {(name, "0"): 30, (name, "1"): 3}


def publishing(config, monkeypatch, clock=None, interval_s=0.02):
    monkeypatch.setattr(publisher, "INTERVAL_S", interval_s)
    counts = torch.zeros(3, dtype=torch.int64)
    worker = CounterPublisher(config, counts, clock)
    worker.start()
    return counts, worker


def wait_for(condition, timeout_s=5.0):
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and not condition():
        time.sleep(0.01)
    return condition()


def test_counters_reach_the_registry_of_the_front_end(config, monkeypatch):
    folder = exchange.FrontEndFolder()
    clock = StageClock(torch.device("cpu"))
    counts, worker = publishing(config, monkeypatch, clock)
    name = ACCEPTED_BY_RANK.samples[0]
    counts += torch.tensor([5, 2, 0])
    run_round(clock)
    worker.round_done()
    assert wait_for(lambda: scrape(REGISTRY).get((name, "0")) == 5)
    seen = scrape(REGISTRY)
    assert (seen[name, "1"], seen[name, "2"]) == (2, 0)
    assert seen[STAGE_TIME.name + "_count", "draft"] == 1
    assert seen[STAGE_TIME.name + "_sum", "draft"] > 0
    counts += 1
    worker.round_done()
    assert wait_for(lambda: scrape(REGISTRY)[name, "0"] == 6)
    folder.close()
    # Engines of other tests may have left metrics of the front end.
    gone = set(seen) & set(scrape(REGISTRY))
    assert not any(label for _, label in gone)
    assert not own_folder().exists()


def test_what_the_device_counts_late_is_not_lost(config, monkeypatch):
    """The host counts a round at its launch; nothing may follow it."""
    folder = exchange.FrontEndFolder()
    counts, worker = publishing(config, monkeypatch, interval_s=0.2)
    name = ACCEPTED_BY_RANK.samples[0]
    worker.round_done()
    assert wait_for(lambda: (name, "0") in scrape(REGISTRY))
    counts += 7
    assert wait_for(lambda: scrape(REGISTRY)[name, "0"] == 7)
    folder.close()


def test_a_round_that_ends_late_is_timed(config, monkeypatch):
    """Its draft may take longer than the reader waits twice."""
    folder = exchange.FrontEndFolder()
    clock = StageClock(torch.device("cpu"))
    _, worker = publishing(config, monkeypatch, clock, interval_s=0.02)
    name = STAGE_TIME.name + "_count"
    clock.begin()
    worker.round_done()
    assert wait_for(lambda: (name, "draft") in scrape(REGISTRY))
    # Many times, with nothing new.
    time.sleep(0.3)
    clock.mark("draft")
    clock.end()
    assert wait_for(lambda: scrape(REGISTRY)[name, "draft"] == 1)
    folder.close()


def test_nothing_is_published_or_started_without_statistics(config, monkeypatch):
    monkeypatch.setattr(
        publisher.threading, "Thread", lambda **kwargs: pytest.fail("a thread")
    )
    _, worker = publishing(config, monkeypatch)
    worker.round_done()
    worker.round_done()
    worker.publish()
    assert not own_folder().exists()


def test_other_ranks_of_a_tensor_parallel_group_are_silent(config, monkeypatch):
    folder = exchange.FrontEndFolder()
    monkeypatch.setattr(
        "vllm.distributed.parallel_state.get_tensor_model_parallel_rank", lambda: 1
    )
    _, worker = publishing(config, monkeypatch)
    worker.round_done()
    time.sleep(0.1)
    assert not list(own_folder().iterdir())
    folder.close()


def test_several_api_servers_share_vllms_folder(config, monkeypatch, tmp_path):
    shared = tmp_path / "shared"
    shared.mkdir()
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(shared))
    exchange.FrontEndFolder()
    assert not own_folder().exists()
    counts, worker = publishing(config, monkeypatch)
    counts += 4
    worker.round_done()
    collector = MultiProcessCollector(CollectorRegistry(), path=str(shared))
    name = ACCEPTED_BY_RANK.samples[0]
    assert wait_for(lambda: scrape(collector).get((name, "2")) == 4)


def test_a_folder_of_somebody_else_is_not_written_to(config, monkeypatch, tmp_path):
    target = tmp_path / "elsewhere"
    target.mkdir()
    own_folder().symlink_to(target)
    assert exchange.find_folder() is None
    own_folder().unlink()
    own_folder().mkdir()
    assert exchange.find_folder() is not None
    own = own_folder().stat().st_uid
    monkeypatch.setattr(exchange, "_own_uid", lambda: own + 1)
    own_folder().mkdir(exist_ok=True)
    assert exchange.find_folder() is None


def test_a_descendant_finds_the_folder_and_a_stranger_does_not(config):
    folder = exchange.FrontEndFolder()
    code = (
        "import subprocess, sys, tempfile; tempfile.tempdir = sys.argv[1];"
        "from vllm_dflash.metrics import exchange; print(exchange.find_folder())"
    )
    word = str(own_folder().parent)
    child = [sys.executable, "-c", code, word]
    nested = [sys.executable, "-c", f"import subprocess; subprocess.run({child!r})"]
    for command in (child, nested):
        result = subprocess.run(command, capture_output=True, text=True, check=True)
        assert result.stdout.strip() == str(own_folder())
    folder.close()
    result = subprocess.run(child, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "None"


def test_the_folder_of_a_killed_front_end_goes_with_the_next_start(config):
    """Only that one: not a living one's, though its process is of another container."""
    code = (
        "import sys, tempfile, time; tempfile.tempdir = sys.argv[1];"
        "from vllm_dflash.metrics import exchange; f = exchange.FrontEndFolder();"
        "print(exchange.find_folder(), flush=True); time.sleep(600)"
    )
    temporary = own_folder().parent
    command = [sys.executable, "-c", code, str(temporary)]
    processes, folders = [], []
    try:
        for _ in range(2):
            process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            processes.append(process)
            folder = Path(process.stdout.readline().strip())
            # A process id that nobody has here.
            folders.append(
                folder.rename(f"{temporary}/vllm-dflash-{2**30}-{len(folders)}.00")
            )
            (folders[-1] / "counter_1.db").touch()
        processes[0].kill()
        processes[0].wait()
        others = [temporary / "vllm-dflash-notes", temporary / "vllm-dflash-1-1.00.txt"]
        for other in others:
            other.mkdir()
        folder = exchange.FrontEndFolder()
        assert not folders[0].exists()
        assert folders[1].exists() and (folders[1] / "counter_1.db").exists()
        assert all(other.exists() for other in others)
        folder.close()
    finally:
        for process in processes:
            process.kill()
            process.wait()
            process.stdout.close()


def test_a_folder_removed_before_it_was_locked_is_made_again(config, monkeypatch):
    flock, taken = exchange.fcntl.flock, []

    def remove_first(handle, operation):
        if not taken:
            own_folder().rmdir()
        taken.append(operation)
        flock(handle, operation)

    monkeypatch.setattr(exchange.fcntl, "flock", remove_first)
    folder = exchange.FrontEndFolder()
    assert len(taken) == 2 and own_folder().is_dir()
    folder.close()
    assert not own_folder().exists()


def make_observer(config, monkeypatch, **environment):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    tree = SimpleNamespace(depth=2, budget=3, max_children=3)
    config.speculative_config = SimpleNamespace(
        draft_model_config=SimpleNamespace(model="draft")
    )
    config.model_config.model = config.model_config.tokenizer = "target"
    return RoundObserver(config, tree, torch.device("cpu"))


def test_warm_up_is_not_counted_and_starts_nothing(config, monkeypatch, tmp_path):
    path = tmp_path / "trees.jsonl"
    observer = make_observer(
        config,
        monkeypatch,
        VLLM_DFLASH_STAGE_TIMES="1",
        VLLM_DFLASH_DUMP_TREES=str(path),
    )
    started = []
    monkeypatch.setattr(CounterPublisher, "start", lambda self: started.append(1))
    slots = SimpleNamespace(idx_mapping_np=torch.zeros(0, dtype=torch.int64).numpy())
    builder = SimpleNamespace(
        cand_tokens=torch.zeros(0, 3), cand_logprobs=torch.zeros(0, 3)
    )

    def run(request):
        observer.request_added(request)
        observer.begin()
        observer.mark("prepare")
        observer.rank_counts += 5
        observer.drafted(slots, builder)
        observer.clock.collect()
        return observer.rank_counts.tolist(), observer.clock.counts["draft"]

    for prefix in WARMUP_IDS:
        run(f"{prefix}0_")
    assert not started and observer.clock.counts["draft"] == 0
    assert run("cmpl-1") == ([5, 5, 5], 1)
    assert run("cmpl-2") == ([10, 10, 10], 2) and started == [1]
    assert len(path.read_text().splitlines()) == 1, "more than the engine's facts"


def test_ids_of_vllms_warm_up_are_known():
    from vllm.v1.worker.gpu import warmup

    source = inspect.getsource(warmup)
    ids = set(re.findall(r'f?"(_\w*warmup\w*?)(?:\{i\}_)?"', source))
    assert {i for i in ids if "encoder" not in i} == {"_warmup_", "_v2_mixed_warmup"}
    assert all(any(known.startswith(i) for i in ids) for known in WARMUP_IDS)


def test_thread_ends_with_its_engine(config, monkeypatch):
    import gc
    import threading

    folder = exchange.FrontEndFolder()
    _, worker = publishing(config, monkeypatch)
    worker.round_done()

    def threads():
        return [t for t in threading.enumerate() if t.name == "vllm-dflash-metrics"]

    own = threads()[-1]
    del worker
    gc.collect()
    own.join(timeout=2)
    assert not own.is_alive()
    folder.close()
