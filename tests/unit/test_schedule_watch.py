# SPDX-License-Identifier: Apache-2.0
"""What of a step counts for the running acceptance, and who is watched at all."""

import dataclasses
import json
import logging
from types import SimpleNamespace

import pytest
from fake_configs import engine, tree_of
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

from vllm_dflash.calibrate import store
from vllm_dflash.calibrate.watch import StepWatch, make_watch
from vllm_dflash.config import DDTreeConfig
from vllm_dflash.graphs import cover_no_drafts
from vllm_dflash.patches.scheduler import wrap_scheduler
from vllm_dflash.schedule import Measurement

STEP_MS = [[b, n, 5.0 + b * n / 100] for b in (1, 16, 64) for n in (0, 7, 47)]
TOKENS = {"0": 1.0, "7": 3.0, "47": 4.5}
SCHEDULE = ((1, 4, 47), (5, 64, 7))
MEASUREMENT = Measurement.from_values(STEP_MS, TOKENS)


class Recorder:
    def __init__(self):
        self.steps = []

    def step(self, nodes, trees, accepted, is_verifying):
        self.steps.append((nodes, trees, accepted, is_verifying))


@pytest.fixture
def watch():
    return StepWatch(Recorder(), lambda params: params == "chain")


def observe(watch, drafts, emitted, next_nodes, new=(), finished=(), invalid=None):
    """A step: request -> number of drafts, and of tokens that came out."""
    output = SchedulerOutput.make_empty()
    output.num_scheduled_tokens = dict.fromkeys({**drafts, **emitted}, 1)
    output.scheduled_spec_decode_tokens = {
        name: [-1] * count for name, count in drafts.items() if count
    }
    output.num_spec_tokens_to_schedule = next_nodes
    output.num_invalid_spec_tokens = invalid
    output.finished_req_ids = set(finished)
    output.scheduled_new_reqs = [
        SimpleNamespace(req_id=name, sampling_params=params) for name, params in new
    ]
    result = SimpleNamespace(
        sampled_token_ids=[[5] * count for count in emitted.values()],
        req_id_to_index={name: place for place, name in enumerate(emitted)},
    )
    watch.observe(output, result)
    return watch.running.steps[-1]


def test_trees_of_the_width_that_was_planned_count(watch):
    assert observe(watch, {}, {"a": 1, "b": 1}, 7) == (0, 0, 0, False)
    # The drafts of a step were planned in the step before.
    assert observe(watch, {"a": 7, "b": 7}, {"a": 3, "b": 1}, 47) == (7, 2, 2, True)
    assert observe(watch, {"a": 47, "b": 47}, {"a": 4, "b": 6}, 0) == (47, 2, 8, True)
    assert observe(watch, {}, {"a": 1, "b": 1}, 0) == (0, 0, 0, False)


def test_cut_trees_and_requests_without_output_do_not_count(watch):
    observe(watch, {}, {"a": 1}, 7)
    # Cut by a limit; of an older plan; finished meanwhile.
    drafts = {"a": 7, "cut": 6, "older": 47, "gone": 7, "silent": 7}
    emitted = {"a": 3, "cut": 3, "older": 9, "silent": 0}
    assert observe(watch, drafts, emitted, 7) == (7, 1, 2, True)
    assert observe(watch, {"cut": 3}, {"cut": 1}, 7) == (7, 0, 0, True)


def test_chains_do_not_count_until_their_name_is_free(watch):
    new = [("a", "tree"), ("chain", "chain")]
    observe(watch, {}, {"a": 1, "chain": 1}, 7, new=new)
    both = {"a": 7, "chain": 7}
    emitted = {"a": 3, "chain": 8}
    assert observe(watch, both, emitted, 7) == (7, 1, 2, True)
    assert observe(watch, both, emitted, 7) == (7, 1, 2, True)
    observe(watch, {}, {"a": 1}, 7, finished=["chain"])
    assert observe(watch, both, emitted, 7) == (7, 2, 9, True)


def test_drafts_that_a_grammar_refused_do_not_count(watch):
    observe(watch, {}, {"a": 1}, 7)
    drafts = {"a": 7, "b": 7}
    step = observe(watch, drafts, {"a": 3, "b": 2}, 7, invalid={"b": 3})
    assert step == (7, 1, 2, True)


def test_step_without_requests_is_none(watch):
    observe(watch, {}, {"a": 1}, 7)
    watch.observe(SchedulerOutput.make_empty(), SimpleNamespace())
    assert len(watch.running.steps) == 1
    # It has not forgotten what was planned.
    assert observe(watch, {"a": 7}, {"a": 2}, 7) == (7, 1, 1, True)


def test_own_failure_ends_the_watching_not_the_engine(watch, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    monkeypatch.setattr(watch.running, "step", None)
    for _ in range(2):
        output = SchedulerOutput.make_empty()
        output.num_scheduled_tokens = {"a": 1}
        watch.observe(output, SimpleNamespace())
    # A record is captured again where a logger on its way has the handler too.
    said = {id(r) for r in caplog.records if "stays with the budget" in r.getMessage()}
    assert len(said) == 1


def calibrated_engine(
    schedule, max_num_seqs=64, measurement=MEASUREMENT, **compilation
):
    tree = dataclasses.replace(tree_of(47, schedule), measurement=measurement)
    graphs = dict(cudagraph_mode=1, max_cudagraph_capture_size=512)
    return engine(
        scheduler_config__max_num_seqs=max_num_seqs,
        scheduler_config__max_num_batched_tokens=8192,
        speculative_config__num_speculative_tokens_per_batch_size=list(
            tree.budget_per_batch_size
        ),
        additional_config={"ddtree": tree.to_dict()},
        compilation_config=SimpleNamespace(**{**graphs, **compilation}),
    )


def table_of(config):
    return build_dynamic_sd_schedule_lookup(
        config.speculative_config.num_speculative_tokens_per_batch_size,
        config.scheduler_config.max_num_seqs,
        47,
    )


@pytest.mark.parametrize(
    ("schedule", "max_num_seqs", "with_none"),
    [
        ([[1, 4, 47], [5, 64, 7]], 64, [(1, 4, 47), (5, 63, 7), (64, 64, 0)]),
        ([[1, 4, 47], [5, 16, 7]], 64, [(1, 4, 47), (5, 63, 7), (64, 64, 0)]),
        ([[1, 4, 47], [5, 64, 7]], 5, [(1, 3, 47), (4, 4, 0), (5, 5, 7)]),
        # Has it, or has no batch size to spare.
        ([[1, 4, 47], [5, 64, 0]], 64, [(1, 4, 47), (5, 64, 0)]),
        ([[1, 1, 47], [2, 64, 7]], 2, [(1, 1, 47), (2, 64, 7)]),
        ([[1, 64, 47]], 1, [(1, 64, 47)]),
    ],
)
def test_width_without_drafts_is_captured_with_all_others(
    schedule, max_num_seqs, with_none
):
    config = calibrated_engine(schedule, max_num_seqs)
    before = set(table_of(config)[1:])
    cover_no_drafts(config)
    found = config.speculative_config.num_speculative_tokens_per_batch_size
    assert found == with_none
    assert set(table_of(config)[1:]) - {0} == before - {0}


def test_no_table_is_left_alone():
    """vLLM takes it away under data parallelism."""
    config = calibrated_engine([[1, 4, 47]])
    config.speculative_config.num_speculative_tokens_per_batch_size = None
    cover_no_drafts(config)
    assert config.speculative_config.num_speculative_tokens_per_batch_size is None


class FakeScheduler:
    def __init__(self, vllm_config, table=None, log_stats=False):
        self.dynamic_sd_lookup = table
        self.log_stats = log_stats
        self.updates = []

    def update_from_output(self, scheduler_output, model_runner_output):
        self.updates.append(model_runner_output)
        return "outputs"


def start(config, table):
    scheduler = object.__new__(FakeScheduler)
    wrap_scheduler(FakeScheduler.__init__)(scheduler, config, table, log_stats=True)
    return scheduler


def test_calibrated_engine_is_watched_and_its_table_set_right():
    config = calibrated_engine([[1, 4, 47], [5, 64, 7]])
    cover_no_drafts(config)
    table = table_of(config)
    assert table[64] == 0
    scheduler = start(config, table)
    assert table == [0, *[47] * 4, *[7] * 60]
    assert scheduler.dynamic_sd_lookup is table and scheduler.log_stats
    result = SimpleNamespace(sampled_token_ids=[], req_id_to_index={})
    empty = SchedulerOutput.make_empty()
    assert scheduler.update_from_output(empty, result) == "outputs"
    assert scheduler.updates == [result]


@pytest.mark.parametrize("measurement", [MEASUREMENT, None])
@pytest.mark.parametrize("table", [None, [0, 47, 47]])
def test_others_are_not_watched(table, measurement):
    config = calibrated_engine([[1, 4, 47]], 2, measurement)
    scheduler = start(config, table)
    assert ("update_from_output" in vars(scheduler)) == bool(table and measurement)
    config.additional_config = {}
    assert "update_from_output" not in vars(start(config, table))


def candidates(config):
    cover_no_drafts(config)
    tree = DDTreeConfig.from_dict(config.additional_config["ddtree"])
    watch = make_watch(config, tree, table_of(config), lambda params: False)
    found: dict[int, int] = {}
    for batch, nodes in watch.running._step_ms:
        found[nodes] = max(batch, found.get(nodes, 0))
    return found


def test_trees_are_chosen_where_their_graphs_and_rows_have_room():
    schedule = [[1, 12, 47], [13, 64, 7]]
    # 512 tokens are 64 requests of 8 rows and 10 of 48, but 12 were asked for.
    assert candidates(calibrated_engine(schedule)) == {0: 64, 7: 64, 47: 12}
    config = calibrated_engine(schedule, max_cudagraph_capture_size=960)
    assert candidates(config) == {0: 64, 7: 64, 47: 20}
    # Without graphs: 8192 // (48 + 15).
    config = calibrated_engine(schedule, 256, cudagraph_mode=0)
    assert candidates(config) == {0: 64, 7: 64, 47: 64}
    config.scheduler_config.max_num_batched_tokens = 2048
    assert candidates(config) == {0: 64, 7: 64, 47: 32}
    # A width that was not started with is none, whatever was measured.
    assert candidates(calibrated_engine([[1, 64, 7]])) == {0: 64, 7: 64}
    # No drafts are possible without graphs of their own.
    assert candidates(calibrated_engine([[1, 64, 7]], 1)) == {0: 1, 7: 1}


def test_measurement_reaches_other_processes():
    tree = dataclasses.replace(tree_of(47, [[1, 64, 7]]), measurement=MEASUREMENT)
    assert DDTreeConfig.from_dict(json.loads(json.dumps(tree.to_dict()))) == tree
    plain = tree_of(47, [[1, 64, 7]])
    assert "measurement" not in plain.to_dict()
    assert DDTreeConfig.from_dict(plain.to_dict()) == plain


@pytest.fixture
def setup(monkeypatch, tmp_path):
    monkeypatch.setenv("VLLM_DFLASH_CACHE", str(tmp_path))
    words = {field.name: "same" for field in dataclasses.fields(store.Setup)}
    return store.Setup(**{**words, "budget": 47, "depth": 15})


def test_kept_measurement_is_found_with_its_schedule(setup):
    store.save(setup, SCHEDULE, dict(step_ms=STEP_MS, tokens_by_nodes=TOKENS))
    assert store.load_calibration(setup) == store.Calibration(SCHEDULE, MEASUREMENT)
    assert store.load(setup) == SCHEDULE
    # Without it the schedule stands.
    store.save(setup, SCHEDULE, {})
    assert store.load_calibration(setup) == store.Calibration(SCHEDULE, None)


@pytest.mark.parametrize(
    ("step_ms", "tokens"),
    [
        ([[1, 0]], TOKENS),
        ([[1, 0, "fast"]], TOKENS),
        ([[1.5, 0, 2.0]], TOKENS),
        ([[1, 0, -2.0]], TOKENS),
        ([[1, 0, float("nan")]], TOKENS),
        # No step without drafts, or one of a size without tokens.
        ([[1, 7, 2.0]], TOKENS),
        ([[1, 0, 2.0], [1, 9, 2.0]], TOKENS),
        (STEP_MS, {"0": 1.0, "7": 0.5, "47": 2.0}),
        (STEP_MS, [1.0, 2.0]),
        (7, TOKENS),
    ],
)
def test_broken_measurement_is_named(setup, step_ms, tokens, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    path = store.save(setup, SCHEDULE, dict(step_ms=step_ms, tokens_by_nodes=tokens))
    assert store.load_calibration(setup) is None
    assert f"measured budget schedule {path} can't be used" in caplog.text
