# SPDX-License-Identifier: Apache-2.0
"""Loads of a serving benchmark that are measured more often than the others."""

import os
import subprocess
import sys
from collections import Counter
from types import SimpleNamespace

import fake_configs
import psutil
import pytest
from serving_rows import load_evals, options

from vllm_dflash.support import log_tree

SERVERS = ["none", "chain", "tree-fixed", "tree-auto"]
PAIR = ("tree-fixed", "tree-auto")


@pytest.fixture(scope="module")
def evals():
    return load_evals()


@pytest.fixture
def bench_args_of(evals, monkeypatch):
    def parse(*argv):
        monkeypatch.setattr(sys, "argv", ["bench_serving.py", *argv])
        return evals.bench_serving._parse()

    return parse


def test_they_follow_the_others_with_repeats_and_servers_of_their_own(
    evals, bench_args_of
):
    main = ("--concurrency", "1,2", "--temperatures", "1", "--repeats", "2")
    also = ("--also", "0:4,8:5:tree-fixed,tree-auto")
    order = evals.bench_serving._schedule(bench_args_of(*main, *also))
    plain = evals.bench_serving._schedule(bench_args_of(*main))
    assert order[: len(plain)] == plain
    rest = order[len(plain) :]
    warm_ups, measured = rest[:4], rest[4:]
    assert warm_ups == [(None, (0.0, c), name) for c in (4, 8) for name in PAIR]
    assert Counter(measured) == Counter(
        (repeat, (0.0, c), name) for repeat in range(5) for c in (4, 8) for name in PAIR
    )
    # The two of a load and repeat are next to each other, in either order.
    pairs = {
        tuple(name for *_, name in measured[i : i + 2])
        for i in range(0, len(measured), 2)
    }
    assert pairs == {PAIR, PAIR[::-1]}
    assert all(
        measured[i][:2] == measured[i + 1][:2] for i in range(0, len(measured), 2)
    )


def test_without_servers_all_are_measured_and_the_cache_is_for_the_most(
    evals, bench_args_of, monkeypatch
):
    args = bench_args_of("--concurrency", "1", "--also", "0.7:64:2")
    order = args.also.schedule(args.servers, 0)
    assert Counter(name for *_, name in order) == dict.fromkeys(SERVERS, 3)
    arguments = sys.modules["serving.arguments"]
    monkeypatch.setattr(arguments, "embedded_pair", lambda log: None)
    assert arguments.serving_options(args).max_num_seqs == 64
    args = bench_args_of("--concurrency", "1,16")
    assert arguments.serving_options(args).max_num_seqs == 16


@pytest.mark.parametrize(
    "value", ["0:4", "0:4:0", "0:0:2", "0:4,4:2", "-1:4:2", "a:4:2", "0:4:2:", "0::2"]
)
def test_wrong_values_are_named(bench_args_of, capsys, value):
    with pytest.raises(SystemExit):
        bench_args_of(f"--also={value}")
    error = " ".join(capsys.readouterr().err.split())
    assert f"'{value}' names no loads" in error
    assert "--also 0:4,8,32:8:tree-fixed,tree-auto" in error


def test_servers_that_do_not_run_and_loads_measured_twice_are_refused(evals):
    also = evals.bench_serving.parse_also("0:4,8:2:chain")
    check = evals.bench_serving.check_also
    with pytest.raises(ValueError, match=r"names the server 'chain', which is not"):
        check(also, ["none"], [0.0], [1])
    with pytest.raises(ValueError, match=r"repeats T=0 at concurrency 8, which"):
        check(also, SERVERS, [0.0, 1.0], [1, 8])
    check(also, SERVERS, [1.0], [1, 8])
    check(also, SERVERS, [0.0], [1, 2])


def test_the_trees_of_the_servers_are_kept_as_they_say(evals, tmp_path):
    said: list[str] = []
    logger = SimpleNamespace(info=lambda text, *values: said.append(text % values))
    config = fake_configs.engine()
    config.compilation_config = SimpleNamespace(cudagraph_capture_sizes=None)
    log_tree(logger, config, fake_configs.tree_of(47, [[1, 4, 47], [5, 8, 7]]), None)
    names = ["none", "chain", "tree-15"]
    wave = evals.servers.ServerWave(names, options(evals), tmp_path, print)
    for name, server in wave.servers.items():
        server.log_path.write_text(f"INFO {said[0] if name == 'tree-15' else 'ready'}")
    trees = "depth 15, budget 47 nodes by batch size [[1, 4, 47], [5, 8, 7]], "
    trees += "width 8/48, 8 candidates a depth"
    assert wave.trees() == {"tree-15": trees}


SLEEPER = """
import threading, time
for _ in range(3):
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
print("ready", flush=True)
time.sleep(60)
"""


def test_servers_exchange_their_cores_with_every_thread(
    evals, tmp_path, monkeypatch, request
):
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        pytest.skip("needs two cores")
    monkeypatch.setattr(evals.servers, "core_sets", lambda *_: [{c} for c in cores])

    class Server:
        def __init__(self, spec, log_path, log):
            pass

        def __enter__(self):
            command = [sys.executable, "-c", SLEEPER]
            self.child = subprocess.Popen(command, stdout=subprocess.PIPE)
            request.addfinalizer(self.child.kill)
            assert self.child.stdout.readline()

        def processes(self):
            return [psutil.Process(self.child.pid)]

        def stop(self):
            self.child.kill()
            self.child.wait()

        def where(self):
            threads = self.processes()[0].threads()
            assert len(threads) >= 4
            return {tuple(os.sched_getaffinity(thread.id)) for thread in threads}

    monkeypatch.setattr(evals.servers, "VLLMServer", Server)
    names = ["none", "chain"]
    with evals.servers.ServerWave(names, options(evals), tmp_path, print) as wave:
        for turn in (0, 1, 2, 3):
            wave.rotate(turn)
            found = [wave.servers[name].where() for name in names]
            assert found == [{(cores[(i + turn) % 2],)} for i in range(2)]
        # One that has gone away is no reason to stop.
        processes = wave.servers["none"].processes()
        wave.servers["none"].stop()
        evals.servers.move_to(processes[0], {cores[0]})


def test_repeats_are_turns(evals, bench_args_of, monkeypatch):
    """Warm-ups run where the servers started; each repeat is one turn."""
    args = bench_args_of(
        "--concurrency", "1,2", "--temperatures", "0", "--repeats", "3"
    )
    log: list[object] = []

    class Wave:
        servers = dict.fromkeys(SERVERS)

        def __init__(self, *_):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def trees(self):
            return {}

        def rotate(self, turn):
            log.append(turn)

    def measure(*_):
        log.append("measured")
        return {"result": {"output_throughput": 1.0}}

    bench = evals.bench_serving
    monkeypatch.setattr(bench, "ServerWave", Wave)
    monkeypatch.setattr(bench, "measure", measure)
    monkeypatch.setattr(bench, "write_prompts", lambda *_: None)
    pair = SimpleNamespace(target="target")
    rows = list(bench.run(args, SimpleNamespace(pair=pair), {}))
    assert len(rows) == 3 * 2 * 4
    warm_ups, a_repeat = ["measured"] * 8, ["measured"] * 8
    assert log == [*warm_ups, *a_repeat, 1, *a_repeat, 2, *a_repeat]
