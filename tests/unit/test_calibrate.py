# SPDX-License-Identifier: Apache-2.0
"""The choice of a schedule from measurements, and its way to the next start."""

import json
import logging
from types import SimpleNamespace

import pytest

from vllm_dflash.calibrate import choose, measure, prompts, store
from vllm_dflash.cli.arguments import CommandError
from vllm_dflash.schedule import AUTO, auto_schedule, parse_schedule


def costs(table):
    return {(b, n): ms for n, row in table.items() for b, ms in row.items()}


def test_tokens_count_a_path_up_to_its_first_node_beyond():
    paths = [[1, 2, 5], [], [1, 6], [3]]
    tokens = choose.tokens_by_nodes(paths, budget=6, depth=3)
    # Nodes accepted with 0..6 nodes: 0, 2, 3, 4, 4, 5, 6 of 4 trees.
    assert tokens == [1.0, 1.5, 1.75, 2.0, 2.0, 2.25, 2.5]


@pytest.mark.parametrize("path", [[7], [0], [1, 2, 3, 4]])
def test_impossible_paths_are_refused(path):
    with pytest.raises(ValueError, match="not a path of a tree of 6 nodes"):
        choose.tokens_by_nodes([path], budget=6, depth=3)
    with pytest.raises(ValueError, match="no tree was verified"):
        choose.tokens_by_nodes([], budget=6, depth=3)


def test_step_times_are_linear_between_batch_sizes_and_unknown_outside():
    measured = costs({7: {1: 2.0, 4: 5.0}, 15: {1: 3.0}})
    assert choose.interpolate_ms(measured, 2, 7) == pytest.approx(3.0)
    assert choose.interpolate_ms(measured, 4, 7) == 5.0
    assert choose.interpolate_ms(measured, 2, 15) is None
    assert choose.interpolate_ms(measured, 1, 47) is None


def test_wide_trees_for_few_requests_and_none_for_many():
    tokens = [1.0] + [2.0] * 7 + [3.0] * 40
    measured = costs(
        {
            0: {1: 10.0, 4: 10.0, 16: 10.0},
            7: {1: 10.5, 4: 11.0, 16: 30.0},
            47: {1: 11.0, 4: 30.0},
        }
    )
    schedule = choose.choose_schedule(measured, tokens, 16)
    assert [nodes for _, _, nodes in schedule] == [47, 7, 0]
    assert schedule[0][0] == 1 and schedule[-1][1] == 16
    # 47 nodes pay while 3 / ms(b, 47) > 2 / ms(b, 7): up to 11 + 19/3 (b-1) < 16.
    assert schedule[0] == (1, 1, 47)
    # 7 nodes while ms(b, 7) < 20: 11 + 19/12 (b-4) < 20, so up to 9.
    assert schedule[1] == (2, 9, 7)


def test_a_schedule_beside_the_best_of_each_batch_size(capsys):
    tokens = [1.0, 2.0, 3.0]
    measured = costs(
        {
            0: {1: 10.0, 4: 10.0, 8: 10.0},
            1: {1: 10.0, 4: 16.0, 8: 30.0},
            2: {1: 12.0, 4: 20.0},
        }
    )
    rows = choose.compare(((1, 2, 2), (3, 5, 1)), measured, tokens)
    # tokens/s: 250; 600 of 500, 600; the last range goes on: 800 of 533.
    assert [(row.batch, row.nodes, row.best) for row in rows] == [
        (1, 2, 2),
        (4, 1, 2),
        (8, 1, 0),
    ]
    ratios = [row.ratio for row in rows]
    assert ratios == pytest.approx([1.0, 500 / 600, (8 * 2 / 30) / (8 / 10)])
    # What was not measured for so many is not compared.
    assert len(choose.compare(((1, 8, 2),), measured, tokens)) == 2
    from vllm_dflash.cli import calibrate

    assert calibrate._check(((1, 2, 2), (3, 5, 1)), measured, tokens) == 1
    out = capsys.readouterr().out
    assert "| 4 | 1 | 500 | 2 | 600 | 0.833 |" in out
    assert "At worst 0.667 of the best choice: below 0.97. Calibrate again." in out
    with pytest.raises(CommandError, match="nothing was measured of its choices"):
        calibrate._check(((1, 8, 5),), measured, tokens)
    assert calibrate._check(((1, 4, 2), (5, 8, 0)), measured, tokens) == 0
    assert "At worst 1.000 of the best choice" in capsys.readouterr().out


def test_noise_never_makes_trees_grow_with_the_load():
    tokens = [1.0] + [3.0] * 31 + [3.2] * 16
    measured = costs(
        {
            0: {1: 4.0, 8: 4.0, 64: 4.2},
            31: {1: 4.0, 8: 4.0, 64: 4.2},
            # Slow once, at batch size 8.
            47: {1: 4.0, 8: 4.4, 64: 4.3},
        }
    )
    schedule = choose.choose_schedule(measured, tokens, 64)
    nodes = [entry[2] for entry in schedule]
    assert nodes == sorted(nodes, reverse=True)
    assert len(schedule) <= 2


def test_batch_sizes_that_did_not_fit_take_the_last_range():
    measured = costs({0: {1: 10.0, 4: 10.0}, 7: {1: 10.5, 4: 11.0}})
    assert choose.choose_schedule(measured, [1.0] + [2.0] * 7, 64) == ((1, 4, 7),)


def test_timing_ends_where_the_cache_holds_fewer_requests():
    """All but one have to wait, until each has grown as far as it may."""

    class Engine:
        unfinished = 0

        def add_request(self, *args):
            self.unfinished += 1

        def abort_request(self, names):
            self.unfinished = 0

        def has_unfinished_requests(self):
            return self.unfinished > 0

        def step(self):
            self.unfinished = max(self.unfinished - 1, 0)

    bench = object.__new__(measure.Bench)
    bench.engine, bench._ids = Engine(), iter(range(100))
    bench.scheduler = SimpleNamespace(
        running=[0], waiting=[1], dynamic_sd_lookup=[7, 7, 7]
    )
    assert bench.time_steps([[1, 2]], 2, [0, 7], room=8) == {}


def test_a_busy_spell_of_the_machine_is_not_kept():
    """Of every cell the least of all rounds, and no batch of too many rows."""
    spells = iter([5.0, 1.0, 1.0, 3.0])
    bench = object.__new__(measure.Bench)

    def time_steps(prompts, size, nodes, room):
        factor = next(spells)
        return {count: factor * (size + count) for count in nodes}

    bench.time_steps = time_steps
    large = measure.MAX_ROWS // 4
    found = bench.time_sizes([[1]], [2, large], [0, 7], 8, rounds=2)
    assert found == {(2, 0): 2.0, (2, 7): 9.0, (large, 0): large}


def test_a_range_that_gains_nothing_is_not_made():
    tokens = [1.0, 2.0, 2.01]
    measured = costs({n: {1: 10.0 + n / 1000, 8: 20.0} for n in (0, 1, 2)})
    assert choose.choose_schedule(measured, tokens, 8) == ((1, 8, 2),)


def test_at_most_five_widths_are_kept():
    nodes = [47, 31, 15, 7, 3, 1, 0]
    tokens = [1 + 0.2 * n for n in range(48)]
    # Each number of nodes is far better than all others at one batch size.
    measured = {
        (b, n): tokens[n] * (1 if i == j else 3)
        for i, b in enumerate((1, 2, 4, 8, 16, 32, 64))
        for j, n in enumerate(nodes)
    }
    schedule = choose.choose_schedule(measured, tokens, 64)
    assert 3 <= len(schedule) <= choose.MAX_BUDGETS
    assert schedule[0] == (1, 1, 47)


def test_candidates_and_their_graphs():
    nodes = measure.candidate_nodes(47, 15)
    assert nodes == [0, 3, 7, 15, 31, 47]
    assert measure.candidate_nodes(20, 7) == [0, 3, 7, 15, 20]
    assert measure.batch_sizes(24) == [1, 2, 4, 8, 16, 24]
    assert measure.batch_sizes(1) == [1]
    schedule = measure.schedule_of_all(nodes)
    assert [entry[2] for entry in schedule] == [47, 31, 15, 7, 3, 0]
    assert parse_schedule(schedule, 47, is_cpu=False) is not None
    assert measure.capture_sizes([0, 3], [1, 4], 8) == [1, 4]


@pytest.fixture
def setup(monkeypatch, tmp_path):
    monkeypatch.setenv("VLLM_DFLASH_CACHE", str(tmp_path))
    return store.Setup(
        device="GPU",
        target="target@1",
        draft="draft@1",
        dtype="torch.bfloat16",
        kv_cache_dtype="auto",
        tensor_parallel_size=1,
        vllm_version="0.32.0",
        plugin_version="0.1.0",
        torch_version="2.11.0",
        triton_version="3.6.0",
        budget=47,
        depth=15,
    )


SCHEDULE = ((1, 4, 47), (5, 64, 7))


def test_a_kept_schedule_is_found_again_for_the_same_setup_only(setup):
    import dataclasses

    assert store.load(setup) is None
    path = store.save(setup, SCHEDULE, dict(step_ms=[[1, 0, 2.5]]))
    assert json.loads(path.read_text())["step_ms"] == [[1, 0, 2.5]]
    assert store.load(setup) == SCHEDULE
    changes = (
        dict(device="other"),
        dict(budget=31),
        dict(dtype="torch.float16"),
        dict(plugin_version="0.2.0"),
        dict(torch_version="2.12.0"),
        dict(triton_version="3.7.0"),
    )
    for change in changes:
        assert store.load(dataclasses.replace(setup, **change)) is None


def test_a_draft_that_was_trained_further_is_another_one(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    identities = {store._identity(str(tmp_path), None)}
    weights = tmp_path / "model.safetensors"
    content = bytearray(3 << 20)
    # Training leaves no part of a file alone, so each of a few pieces tells.
    inner = (len(content) - store._PIECE_BYTES) * 4 // (store._PIECES - 1)
    for changed in (0, inner, len(content) - 1):
        content[changed] ^= 1
        weights.write_bytes(content)
        found = store._identity(str(tmp_path), None)
        assert found == store._identity(str(tmp_path), None)
        assert found.startswith(f"{tmp_path.resolve()}@")
        identities.add(found)
    assert len(identities) == 4
    assert store._identity("org/name", "abc") == "org/name@abc"


@pytest.mark.parametrize("text", ["{", "[]", '{"setup": {}}', "null"])
def test_a_broken_file_is_named_and_not_used(setup, text, caplog, monkeypatch):
    path = store.save(setup, SCHEDULE, {})
    path.write_text(text)
    with caplog.at_level(logging.WARNING):
        monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
        assert store.load(setup) is None
    assert f"measured budget schedule {path} can't be used" in caplog.text
    assert "Run vllm-dflash calibrate again" in caplog.text


def test_auto_takes_the_measured_schedule_before_the_formula():
    options = dict(is_cpu=False, parameters=8e9)
    found = parse_schedule(AUTO, 47, find_measured=lambda: SCHEDULE, **options)
    assert found == SCHEDULE
    missing = parse_schedule(AUTO, 47, find_measured=lambda: None, **options)
    assert missing == auto_schedule(47, 8e9)
    given = parse_schedule(
        [[1, 9, 5]], 47, find_measured=lambda: SCHEDULE, is_cpu=False
    )
    assert given == ((1, 9, 5),)


def test_prompts_of_a_file(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a"}\n\n{"messages": [{"role": "user", "content": 1}]}')
    assert prompts.read_messages(path) == [
        [{"role": "user", "content": "a"}],
        [{"role": "user", "content": 1}],
    ]
    path.write_text('{"prompt": "a"}\n{"text": "b"}')
    with pytest.raises(ValueError, match=r"prompts.jsonl:2 is no prompt"):
        prompts.read_messages(path)
    path.write_text("")
    with pytest.raises(ValueError, match="holds no prompt"):
        prompts.read_messages(path)
    assert len(prompts.read_messages(None)) == 16
    assert prompts.lengthen([1, 2, 3], 5) == [2, 3, 1, 2, 3]
    assert prompts.lengthen([1, 2, 3], 2) == [1, 2, 3]


def test_kinds_come_in_turn():
    assert prompts.in_turn(["a", "a", "b", None, "a", "b"]) == [0, 2, 3, 1, 5, 4]
    assert prompts.in_turn([]) == []
