# SPDX-License-Identifier: Apache-2.0
"""The serving benchmark around ``vllm bench serve``, its table, plots and page."""

import json
import re
import sys
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import pytest

from vllm_dflash.demo.pair import ModelPair

ROOT = Path(__file__).resolve().parents[2]
EVALS = ROOT / "evals"
SERVERS = ["none", "chain", "tree-fixed", "tree-auto"]


@pytest.fixture(scope="module")
def evals():
    sys.path.insert(0, str(EVALS))
    try:
        import bench_serving
        import report
        from serving import load, plots, servers, table
    finally:
        sys.path.remove(str(EVALS))
    return SimpleNamespace(
        bench_serving=bench_serving,
        report=report,
        load=load,
        plots=plots,
        servers=servers,
        table=table,
    )


def options(evals, **values):
    defaults = {
        "pair": ModelPair("/target", "/draft", "name", is_embedded=False),
        "is_cpu": False,
        "depth": 15,
        "budget": None,
        "max_model_len": 2048,
        "max_num_seqs": 64,
        "kv_cache_gib": 2.0,
    }
    return evals.servers.ServingOptions(**{**defaults, **values})


def row(server, speed, temperature=0.0, concurrency=1, length=None):
    result = {
        "output_throughput": speed,
        "median_tpot_ms": 1000 / speed,
        "p99_tpot_ms": 2000 / speed,
        "median_ttft_ms": 3.0,
    }
    if length is not None:
        result["spec_decode_acceptance_length"] = length
    return {
        "server": server,
        "temperature": temperature,
        "concurrency": concurrency,
        "result": result,
    }


@pytest.fixture
def rows():
    return [
        row("none", 10.0),
        row("tree-fixed", 30.0, length=3.0),
        row("chain", 20.0, length=2.0),
        row("tree-fixed", 26.0, length=3.2),
        row("none", 12.0),
        row("tree-fixed", 99.0, length=3.1),
        row("none", 40.0, concurrency=8),
        row("none", 9.0, temperature=1.0),
    ]


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


def test_unknown_server_is_named(evals):
    with pytest.raises(ValueError, match="'tree'.*none, chain.*--servers"):
        evals.servers.speculative_config("tree", options(evals))


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


def test_medians_ratios_and_spread(evals, rows):
    cells = evals.table.medians(rows)
    assert list(cells) == [
        (0.0, 1, "none"),
        (0.0, 1, "chain"),
        (0.0, 1, "tree-fixed"),
        (0.0, 8, "none"),
        (1.0, 1, "none"),
    ]
    tree = cells[0.0, 1, "tree-fixed"]
    assert tree["output_throughput"] == 30
    assert tree["spec_decode_acceptance_length"] == 3.1
    assert tree["repeats"] == 3
    assert tree["spread"] == pytest.approx(99 / 26)
    cell = (0.0, 1, "tree-fixed")
    ratio = evals.table.ratio
    assert ratio(cells, cell, "chain", "output_throughput") == pytest.approx(1.5)
    assert ratio(cells, (0.0, 8, "none"), "chain", "output_throughput") is None


def test_markdown_has_a_line_for_each_load_and_server(evals, rows):
    lines = evals.table.markdown(rows).splitlines()
    assert len(lines) == 2 + 5
    assert len({line.count("|") for line in lines}) == 1
    assert "| 0 | 1 | tree-fixed | 30.0 | 33.33 |" in lines[4]
    assert "| 3.10 | 2.73 | 1.50 | 3 | 3.81 |" in lines[4]
    assert "| - |" in lines[2]


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


def test_plots_are_written_as_png_and_svg(evals, rows, tmp_path):
    pytest.importorskip("matplotlib")
    paths = evals.plots.save({"run": rows}, tmp_path / "run")
    assert {path.name for path in paths} == {
        f"run_{metric}.{suffix}"
        for metric in (*evals.plots.PLOTS, "speedup")
        for suffix in ("png", "svg")
    }
    for path in paths:
        start = path.read_bytes()[:200]
        assert start.startswith(b"\x89PNG") or b"<?xml" in start


class Page(HTMLParser):
    """Tags of a page, its text, and whether what was opened was closed."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.open, self.words, self.links = Counter(), [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags[tag] += 1
        self.links += [v for k, v in attrs if k in {"src", "href", "xlink:href"}]
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.links += [v for k, v in attrs if k in {"src", "href", "xlink:href"}]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


PROVENANCE = {
    "date": "2026-01-01T00:00:00+00:00",
    "argv": ["script.py"],
    "git": "0" * 40,
    "device": "a device",
    "versions": {"vllm": "0.32.0"},
}


def test_page_compares_runs_and_loads_nothing(evals, rows, tmp_path):
    pytest.importorskip("matplotlib")
    serving = {"kind": "serving", "provenance": PROVENANCE, "settings": {"repeats": 3}}
    difference = {"id": "item-7", "position": 2, "response": "a<b>", "baseline": "a\nc"}
    item = {"filter": "none", "scores": {"accuracy": 0.5}}
    engine = {"items": {"a_task": [item]}, "acceptance_length": 3.5}
    accuracy = {
        "kind": "lm_eval",
        "provenance": PROVENANCE,
        "results": {"ar": {**engine, "acceptance_length": None}, "tree": engine},
        "comparison": {
            "failures": ["tree, a_task: <wrong>"],
            "engines": {
                "tree": {
                    "a_task": {
                        "different_responses": [difference],
                        "different_scores": [],
                    }
                }
            },
        },
    }
    for folder in ("before", "after"):
        (tmp_path / folder).mkdir()
        text = json.dumps({**serving, "rows": rows})
        (tmp_path / folder / "serving.local.json").write_text(text)
    (tmp_path / "accuracy.json").write_text(json.dumps(accuracy))
    paths = [
        tmp_path / "before/serving.local.json",
        tmp_path / "after/serving.local.json",
        tmp_path / "accuracy.json",
        EVALS / "results/acceptance_embedded_pair.json",
    ]
    names = evals.report.run_names(paths)
    assert names[:3] == ["before/serving", "after/serving", "accuracy"]
    text = evals.report.render(list(map(evals.report.load_run, paths, names)))
    page = Page(text)
    assert not page.open
    assert page.tags["svg"] == len(evals.plots.PLOTS) + 1
    # Provenance, two serving runs, accuracy, its differences, acceptance.
    assert page.tags["table"] == 6
    words = " ".join(page.words)
    for expected in ("before/serving", "item-7", "a<b>", "<wrong>", "tree 64"):
        assert expected in words
    assert all(link.startswith("#") for link in page.links)
    assert not re.search(r"@import|url\((?!#)", text)


def test_page_refuses_other_files(evals, tmp_path):
    path = tmp_path / "other.json"
    path.write_text("[1]")
    with pytest.raises(ValueError, match="no result that this page can show"):
        evals.report.load_run(path, "other")
