# SPDX-License-Identifier: Apache-2.0
"""A calibrated schedule in an engine: wide trees, no drafts, and back, all exact."""

from collections import deque

import pytest
from engines import engine, generate, params, random_prompts, token_ids
from schedule_log import ScheduleLog
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from vllm_dflash.calibrate import running, store

pytestmark = pytest.mark.e2e

SCHEDULE = ((1, 2, 16), (3, 4, 7))
# Trees are nearly free for one request, and 16 nodes are dear for four.
STEP_MS = [[1, 0, 10.0], [1, 7, 11.0], [1, 16, 12.0]]
STEP_MS += [[4, 0, 10.0], [4, 7, 12.0], [4, 16, 24.0]]
TOKENS = {"0": 1.0, "7": 3.0, "16": 4.0}
PACE = running.Pace(
    half_life=40,
    prior=20,
    check_every=16,
    probe_after=40,
    probe_steps=8,
    carried=2,
    log_interval_s=0,
)
MAX_TOKENS = 160


@pytest.fixture
def kept(monkeypatch, tmp_path):
    """A calibration for whatever engine asks for one."""
    monkeypatch.setenv("VLLM_DFLASH_CACHE", str(tmp_path))
    monkeypatch.setattr(running, "PACE", PACE)
    describe_setup = store.describe_setup

    def describe_and_keep(*args, **kwargs):
        setup = describe_setup(*args, **kwargs)
        store.save(setup, SCHEDULE, dict(step_ms=STEP_MS, tokens_by_nodes=TOKENS))
        return setup

    monkeypatch.setattr(store, "describe_setup", describe_and_keep)


@pytest.fixture(scope="module")
def asked():
    """Prompts whose continuation the rigged draft knows, and others."""
    return random_prompts((20, 35, 60, 17)), random_prompts((30, 5, 41, 22), seed=2)


@pytest.fixture(scope="module")
def expected(tiny_target, asked):
    with engine(tiny_target) as llm:
        options = params(max_tokens=MAX_TOKENS)
        return [token_ids(generate(llm, prompts, options)) for prompts in asked]


# vLLM switches async scheduling off on the CPU, whatever is asked for.
@pytest.mark.parametrize("is_async", [False, pytest.param(True, marks=pytest.mark.gpu)])
def test_schedule_follows_what_is_accepted(
    tiny_target, tiny_draft, rig, kept, asked, expected, monkeypatch, is_async
):
    log = ScheduleLog()
    log.install(monkeypatch)
    known, unknown = asked
    rig.add_references(known, expected[0])
    tree = dict(budget=16, budget_per_batch_size="auto")
    speculative = dict(method="dflash", model=tiny_draft, ddtree=tree)
    options = params(max_tokens=MAX_TOKENS)
    kwargs = dict(async_scheduling=is_async, disable_log_stats=True)
    with engine(tiny_target, speculative, **kwargs) as llm:
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        table = scheduler.dynamic_sd_lookup
        assert isinstance(scheduler, AsyncScheduler) is is_async
        assert not scheduler.log_stats
        # The entry for the graphs without drafts is no part of the schedule.
        assert table == [0, 16, 16, 7, 7]

        def widths():
            found = [max(step.num_drafts.values(), default=0) for step in log.steps]
            log.clear()
            return found

        assert token_ids(generate(llm, known, options)) == expected[0]
        assert rig.num_branching_paths > 10
        seen = widths()
        assert set(seen) <= {0, 7, 16} and 7 in seen
        # All but prefills and their successors.
        assert seen.count(0) <= 4
        assert table[4] == 7 and table[1] == 16

        assert token_ids(generate(llm, unknown, options)) == expected[1]
        seen = widths()
        assert len(seen) > 120, "the draft was to be wrong"
        first = seen.index(0, 10)
        assert first < 60
        # From then on two steps in three have no drafts, and probes come and go.
        assert seen[first:].count(0) > 0.66 * len(seen[first:])
        assert 7 in seen[first + 30 :]
        assert table == [0] * 5

        # A probe finds that drafts pay again.
        assert token_ids(generate(llm, known, options)) == expected[0]
        seen = widths()
        assert seen[:10].count(0) == 10
        assert seen[-10:].count(0) == 0
        assert table[4] == 7 and table[1] == 16
        for prompt, tokens in zip(known, expected[0], strict=True):
            outputs = generate(llm, [prompt], options)
            assert token_ids(outputs) == [tokens]
        assert set(widths()) <= {0, 16}


class OneStepAhead:
    """vLLM's async scheduler with a made-up worker: a step is planned, then the
    previous one's tokens come in. Keeps count of the trees that are whole."""

    def __init__(self, scheduler, accepted_per_tree):
        self.scheduler = scheduler
        self.accepted = accepted_per_tree
        self.planned: dict[str, int] = {}
        self.trees = self.cut = 0
        self.widths: list[int] = []

    def run(self, requests):
        for name, max_tokens in requests.items():
            options = params(max_tokens)
            self.scheduler.add_request(Request(name, [5] * 20, options, None))
        waiting: deque = deque()
        while self.scheduler.has_unfinished_requests() or waiting:
            if self.scheduler.has_unfinished_requests():
                output = self.scheduler.schedule()
                waiting.append(output)
                if len(waiting) < 2:
                    continue
            output = waiting.popleft()
            self.scheduler.update_from_output(output, self.result(output))

    def result(self, output):
        drafts = output.scheduled_spec_decode_tokens
        self.widths.append(max(map(len, drafts.values()), default=0))
        names, sampled = list(output.num_scheduled_tokens), []
        for name in names:
            count = len(drafts.get(name, ()))
            if count and count == self.planned[name]:
                self.trees += 1
            elif count:
                self.cut += 1
            sampled.append([7] * (1 + min(self.accepted, count)))
            self.planned[name] = output.num_spec_tokens_to_schedule
        places = {name: place for place, name in enumerate(names)}
        return ModelRunnerOutput(names, places, sampled_token_ids=sampled)


def test_scheduler_that_plans_ahead_is_watched_the_same(
    tiny_target, tiny_draft, kept, monkeypatch
):
    """Drafts and tables of the step before, while another step is under way."""
    counted = []
    step = running.RunningSchedule.step

    def spy_step(self, nodes, trees, accepted, is_verifying):
        counted.append((trees, accepted))
        step(self, nodes, trees, accepted, is_verifying)

    monkeypatch.setattr(running.RunningSchedule, "step", spy_step)
    tree = dict(budget=16, budget_per_batch_size="auto")
    speculative = dict(method="dflash", model=tiny_draft, ddtree=tree)
    # Requests of our own have no block hashes.
    with engine(tiny_target, speculative, enable_prefix_caching=False) as llm:
        made = llm.llm_engine.engine_core.engine_core.scheduler
        worker = OneStepAhead(
            AsyncScheduler(
                vllm_config=made.vllm_config,
                kv_cache_config=made.kv_cache_config,
                structured_output_manager=made.structured_output_manager,
                block_size=made.block_size,
            ),
            accepted_per_tree=3,
        )
        table = worker.scheduler.dynamic_sd_lookup
        assert table == [0, 16, 16, 7, 7]
        # They end one after another, so the width changes on the way.
        worker.run({"a0": 60, "a1": 100, "a2": 150, "a3": 220})
        assert {7, 16} <= set(worker.widths)
        assert worker.trees > 100 and worker.cut > 0
        # Not of requests that ended in the step before.
        total = sum(trees for trees, _ in counted)
        assert worker.trees - 4 <= total <= worker.trees
        assert sum(accepted for _, accepted in counted) == 3 * total
        assert table[1] == 16 and table[4] == 7

        worker.accepted = 0
        worker.widths.clear()
        worker.run({f"b{number}": 200 for number in range(4)})
        first = worker.widths.index(0, 10)
        assert first < 60
        assert worker.widths[first:].count(0) > 0.66 * len(worker.widths[first:])
        assert table == [0] * 5

        worker.accepted = 3
        worker.widths.clear()
        worker.run({f"c{number}": 200 for number in range(4)})
        # Steps that were planned before the last tokens came in have no drafts.
        assert worker.widths[:10].count(0) == 10
        assert worker.widths[-20:-3].count(0) == 0
        assert table[1] == 16 and table[4] == 7


def test_schedule_of_the_user_stays(
    tiny_target, tiny_draft, rig, kept, asked, expected
):
    """The same numbers typed as a list: no measurement comes with them."""
    tree = dict(budget=16, budget_per_batch_size=[list(entry) for entry in SCHEDULE])
    speculative = dict(method="dflash", model=tiny_draft, ddtree=tree)
    with engine(tiny_target, speculative) as llm:
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        assert "update_from_output" not in vars(scheduler)
        options = params(max_tokens=MAX_TOKENS)
        assert token_ids(generate(llm, asked[1], options)) == expected[1]
        assert scheduler.dynamic_sd_lookup == [0, 16, 16, 7, 7]
