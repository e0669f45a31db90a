# SPDX-License-Identifier: Apache-2.0
"""The serving benchmark around ``vllm bench serve``: servers, loads, their order."""

import json
import sys
from collections import Counter
from types import SimpleNamespace

import pytest
from evals_modules import EVALS
from serving_rows import load_evals, options, row, some_mixed_rows

SERVERS = ["none", "chain", "tree-fixed", "tree-auto"]


@pytest.fixture(scope="module")
def evals():
    return load_evals()


@pytest.fixture
def mixed_rows():
    return some_mixed_rows()


def test_servers_differ_in_their_speculative_config_only(evals):
    specs = {
        name: evals.servers.server_spec(name, 1234, options(evals)) for name in SERVERS
    }
    configs = {name: spec.speculative_config for name, spec in specs.items()}
    assert configs["none"] is None
    assert configs["chain"]["ddtree"] is False
    assert configs["tree-fixed"]["ddtree"] == {"budget_per_batch_size": "fixed"}
    assert configs["tree-auto"]["ddtree"] == {"budget_per_batch_size": "auto"}
    assert len({tuple(spec.extra_args) for spec in specs.values()}) == 1
    assert "--no-enable-prefix-caching" in specs["none"].extra_args
    assert str(2 << 30) in specs["none"].extra_args


@pytest.mark.parametrize("is_cpu", [True, False])
def test_tree_configs_are_accepted_by_the_plugin(evals, is_cpu):
    from vllm_dflash.config import parse_ddtree_option

    budgets = {}
    for name in ("tree-fixed", "tree-auto"):
        config = evals.servers.speculative_config(name, options(evals, budget=31))
        budgets[name] = parse_ddtree_option(
            config["ddtree"],
            num_speculative_tokens=config["num_speculative_tokens"],
            block_size=16,
            is_cpu=is_cpu,
        )
    assert {tree.budget for tree in budgets.values()} == {31}
    fixed, auto = budgets["tree-fixed"].widths, budgets["tree-auto"].widths
    assert len(fixed) < len(auto)


def test_servers_have_cores_of_their_own(evals):
    core_sets = evals.servers.core_sets
    sets = core_sets(4, range(10, 42))
    assert [len(cores) for cores in sets] == [7] * 4
    assert len(set.union(*sets)) == 28
    # Two are left for the client, and those that don't divide.
    assert set.union(*sets).isdisjoint({10, 11, 12, 13})
    # No half of the machine is one server's.
    assert all(min(cores) < 20 and max(cores) > 35 for cores in sets)
    assert core_sets(5, range(16)) is None
    assert core_sets(4, range(14)) == [{13, 9, 5}, {12, 8, 4}, {11, 7, 3}, {10, 6, 2}]


def test_servers_start_on_their_cores(evals, tmp_path, monkeypatch):
    import os

    cores = sorted(os.sched_getaffinity(0))
    monkeypatch.setattr(evals.servers, "MIN_SERVER_CORES", 1)
    monkeypatch.setattr(evals.servers, "CLIENT_CORES", 0)
    started = {}

    class Server:
        def __init__(self, spec, log_path, log):
            self.name = spec.label

        def __enter__(self):
            started[self.name] = os.sched_getaffinity(0)

        def stop(self):
            pass

    monkeypatch.setattr(evals.servers, "VLLMServer", Server)
    with evals.servers.ServerWave(["none"], options(evals), tmp_path, print):
        assert started == {"none": set(cores)}
        # The client stays where it was.
        assert sorted(os.sched_getaffinity(0)) == cores
    started.clear()
    names = ["none", "chain"]
    with evals.servers.ServerWave(names, options(evals), tmp_path, print):
        expected = evals.servers.core_sets(2, cores)
        assert list(map(started.get, names)) == (expected or [set(cores)] * 2)


@pytest.mark.parametrize("name", ["tree", "tree-0", "tree-016", "tree-", "tree-1.5"])
def test_unknown_server_is_named(evals, name):
    message = f"'{name}'.*none, chain.*tree-N.*--servers"
    with pytest.raises(ValueError, match=message):
        evals.servers.speculative_config(name, options(evals))


def test_a_tree_of_a_given_size_is_fixed(evals):
    spec = evals.servers.server_spec("tree-31", 1, options(evals, budget=47))
    tree = {"budget": 31, "budget_per_batch_size": "fixed"}
    assert spec.speculative_config["ddtree"] == tree
    assert spec.label == "tree-31"


@pytest.mark.parametrize("nodes", [8, 256])
def test_a_tree_of_a_size_that_cannot_be_is_refused_before_it_starts(evals, nodes):
    with pytest.raises(ValueError, match=f"budget.*{nodes}.*15 .*255"):
        evals.servers.speculative_config(f"tree-{nodes}", options(evals))


def test_servers_are_shown_in_one_order(evals):
    names = ["none", "chain", "tree-9", "tree-16", "tree-100", "tree-fixed"]
    names += ["tree-auto", "sglang-none", "vllm-chain"]
    assert sorted(reversed(names), key=evals.servers.table_order) == names
    fixed = [name for name in names if evals.servers.is_fixed_tree(name)]
    assert fixed == ["tree-9", "tree-16", "tree-100", "tree-fixed"]


def test_every_load_is_warmed_up_then_measured_in_random_orders(evals):
    settings = [(0.0, 1), (0.0, 8), (1.0, 8)]
    order = evals.bench_serving.schedule(SERVERS, settings, 3, seed=1)
    warm_ups, measured = order[:12], order[12:]
    assert {repeat for repeat, _, _ in warm_ups} == {None}
    assert len({(setting, server) for _, setting, server in warm_ups}) == 12
    counts = Counter(measured)
    assert len(counts) == 3 * 3 * 4
    assert set(counts.values()) == {1}
    # Servers of one load and repeat follow each other, so that drift meets them all.
    orders = set()
    for start in range(0, len(measured), 4):
        block = measured[start : start + 4]
        assert len({(repeat, setting) for repeat, setting, _ in block}) == 1
        orders.add(tuple(server for _, _, server in block))
    assert len(orders) > 3
    assert order == evals.bench_serving.schedule(SERVERS, settings, 3, seed=1)
    assert order != evals.bench_serving.schedule(SERVERS, settings, 3, seed=2)


def test_mixed_loads_follow_the_others_and_their_warm_up_comes_before(evals):
    settings = [(0.0, 1), (0.0, 8)]
    mixed = [(0.0, "mixed"), (1.0, "mixed")]
    order = evals.bench_serving.schedule(SERVERS, settings, 2, 1, mixed)
    rest = evals.bench_serving.schedule(SERVERS, settings, 2, 1)
    assert len(order) == len(rest) + 8 + 2 * 8
    # Warm-ups and first repeat of the others; then those of the mixed loads.
    start = 8 + 8
    assert order[:start] == rest[:start]
    assert order[start : start + 8] == [
        (None, s, name) for s in mixed for name in SERVERS
    ]
    first = order[start + 8 : start + 16]
    assert Counter(first) == Counter((0, s, name) for s in mixed for name in SERVERS)
    second = order[start + 16 :]
    assert all(setting in settings for _, setting, _ in second[:8])
    last = second[8:]
    assert Counter(last) == Counter((1, s, name) for s in mixed for name in SERVERS)
    assert [name for *_, name in first] != [name for *_, name in last]


@pytest.fixture
def bench_args_of(evals, monkeypatch):
    def parse(*argv):
        monkeypatch.setattr(sys, "argv", ["bench_serving.py", *argv])
        return evals.bench_serving._parse()

    return parse


def test_mixed_load_and_its_warm_up(evals, bench_args_of):
    args = bench_args_of("--concurrency", "1,8", "--mixed", "2:40")
    assert args.mixed == evals.mixed.Ramp(2, 40)
    load = evals.bench_serving.mixed_load(args, 1.0, 2, args.mixed)
    assert (load.num_prompts, load.seed, load.ramp) == (32, 2, args.mixed)
    assert (load.temperature, load.concurrency) == (1.0, None)
    assert str(load) == "T=1 ramp 2:40"
    warm_up = evals.bench_serving.mixed_load(args, 1.0, None, args.mixed)
    assert (warm_up.num_prompts, str(warm_up.ramp)) == (8, "10:40")
    args = bench_args_of("--mixed", "auto", "--mixed-prompts", "100")
    assert args.mixed == "auto"
    assert evals.bench_serving.mixed_prompts(args) == 100
    assert bench_args_of().mixed is None
    assert bench_args_of().servers == SERVERS


@pytest.mark.parametrize("value", ["0:8", "8:2", "2", "1.5:8", "a:b", "2:128:3"])
def test_wrong_mixed_load_is_named(bench_args_of, capsys, value):
    with pytest.raises(SystemExit):
        bench_args_of("--mixed", value)
    error = " ".join(capsys.readouterr().err.split())
    assert f"'{value}' is no mixed load" in error
    assert "START:END" in error and "Type --mixed auto" in error


def test_wrong_number_of_mixed_prompts_is_named(bench_args_of, capsys):
    with pytest.raises(SystemExit):
        bench_args_of("--mixed", "auto", "--mixed-prompts", "0")
    assert "--mixed-prompts is 0" in capsys.readouterr().err


def test_ramp_is_found_from_the_other_loads(evals, mixed_rows):
    def closed(server, temperature, concurrency, rate):
        found = row(server, 1.0, temperature, concurrency)
        found["result"]["request_throughput"] = rate
        return found

    rows = [
        closed("none", 0.0, 2, 7.0),
        closed("tree-fixed", 0.0, 2, 30.0),
        closed("none", 0.0, 64, 60.0),
        closed("tree-fixed", 0.0, 64, 100.2),
        closed("none", 0.0, 8, 500.0),
        closed("none", 1.0, 2, 0.4),
        closed("none", 1.0, 64, 0.3),
        *mixed_rows,
    ]
    find_ramp, ramp = evals.mixed.find_ramp, evals.mixed.Ramp
    assert find_ramp(rows, 0.0) == ramp(3, 201)
    # vLLM takes whole numbers from 1 on.
    assert find_ramp(rows, 1.0) == ramp(1, 1)


def test_most_in_flight(evals):
    assert evals.load.peak([0.0, 1.0, 1.5, 9.0], [2.0, 2.0, 0.1, 1.0]) == 3
    assert evals.load.peak([0.0, 1.0, 2.0], [1.0, 1.0, 1.0]) == 1


def test_a_measurement_keeps_its_load(evals, monkeypatch, tmp_path):
    serve = pytest.importorskip("vllm.benchmarks.serve")

    async def main_async(args):
        result = {
            "completed": args.num_prompts,
            "output_throughput": 5.0,
            "start_times": [0.0, 1.0],
            "latencies": [2.0, 2.0],
            "rps_change_events": [{"rps": 2}],
        }
        if not args.save_detailed:
            del result["start_times"]
        return result

    monkeypatch.setattr(serve, "main_async", main_async)
    server = SimpleNamespace(
        client=SimpleNamespace(base_url="http://127.0.0.1:1"),
        spec=evals.servers.server_spec("tree-16", 1, options(evals)),
    )
    ramp = evals.mixed.Ramp(1, 4)
    load = evals.load.Load(0.0, None, 2, 8, seed=0, ramp=ramp)
    found = evals.load.measure(server, load, tmp_path / "p.jsonl", tmp_path / "log")
    assert (found["server"], found["concurrency"]) == ("tree-16", None)
    assert (found["load"], found["peak_in_flight"]) == ("ramp 1:4", 2)
    assert "--ramp-up-start-rps 1 " in found["command"]
    assert found["result"] == {"completed": 2, "output_throughput": 5.0}
    load = evals.load.Load(0.0, 2, 2, 8, seed=0)
    found = evals.load.measure(server, load, tmp_path / "p.jsonl", tmp_path / "log")
    assert found["concurrency"] == 2 and "load" not in found


def test_benchmark_gets_arguments_that_it_knows(evals, tmp_path):
    serve = pytest.importorskip("vllm.benchmarks.serve")
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    serve.add_cli_args(parser)
    server = SimpleNamespace(
        client=SimpleNamespace(base_url="http://127.0.0.1:1"),
        spec=evals.servers.server_spec("none", 1, options(evals)),
    )
    load = evals.load.Load(1.0, 8, 32, 192, seed=2, ignore_eos=True)
    args = parser.parse_args(evals.load.bench_args(server, load, tmp_path / "p.jsonl"))
    assert (args.temperature, args.max_concurrency, args.num_prompts) == (1.0, 8, 32)
    assert (args.dataset_name, args.custom_output_len) == ("custom", 192)
    assert args.skip_chat_template and args.disable_shuffle and args.ignore_eos
    assert args.extra_body == {"add_special_tokens": False, "seed": 2}
    assert args.ramp_up_strategy is None
    ramp = evals.mixed.Ramp(2, 128)
    load = evals.load.Load(1.0, None, 256, 192, seed=2, ramp=ramp)
    args = parser.parse_args(evals.load.bench_args(server, load, tmp_path / "p.jsonl"))
    assert (args.num_prompts, args.max_concurrency) == (256, None)
    # vLLM refuses a ramp beside a rate of one's own.
    assert args.request_rate == float("inf")
    strategy = args.ramp_up_strategy, args.ramp_up_start_rps, args.ramp_up_end_rps
    assert strategy == ("exponential", 2, 128)
    assert "e2el" in args.percentile_metrics
    # The rate that vLLM makes of it: each doubling has as many requests.
    rates = [
        serve._get_current_request_rate(*strategy, index, 257, args.request_rate)
        for index in range(0, 257, 64)
    ]
    assert rates[0] == 2 and rates[-1] == pytest.approx(128)
    assert rates[2] == pytest.approx(16)


def test_prompts_keep_system_messages_and_alternate_kinds(evals, tmp_path, monkeypatch):
    import transformers

    class Tokenizer:
        def apply_chat_template(self, messages, **kwargs):
            assert kwargs == {"add_generation_prompt": True, "tokenize": False}
            return json.dumps(messages)

    monkeypatch.setattr(
        transformers.AutoTokenizer, "from_pretrained", lambda name: Tokenizer()
    )
    path = tmp_path / "prompts.jsonl"
    assert evals.load.write_prompts("target", path) == 50
    prompts = [json.loads(line)["prompt"] for line in path.open()]
    held_out = [
        json.loads(line)
        for line in (EVALS / "prompts" / "heldout.jsonl").read_text().splitlines()
    ]
    kinds = {json.dumps(item["messages"]): item["kind"] for item in held_out}
    assert sorted(prompts) == sorted(kinds)
    assert len({kinds[prompt] for prompt in prompts[:4]}) == 4
