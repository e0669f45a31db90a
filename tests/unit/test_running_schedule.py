# SPDX-License-Identifier: Apache-2.0
"""A calibrated schedule under traffic that accepts more, less, or nothing."""

import random
from types import SimpleNamespace

import pytest

from vllm_dflash.calibrate import running
from vllm_dflash.calibrate.running import AcceptanceRatio, Pace, RunningSchedule, within
from vllm_dflash.schedule import Measurement, by_batch_size, to_ranges

TOKENS = {0: 1.0, 3: 2.5, 15: 4.0}
# Batch size -> milliseconds without drafts, with 3 and with 15 nodes.
COSTS = {1: (10.0, 10.5, 11.0), 8: (10.0, 12.0, 30.0)}
MEASUREMENT = Measurement(
    tuple(
        (batch, nodes, ms)
        for batch, row in COSTS.items()
        for nodes, ms in zip(TOKENS, row, strict=True)
    ),
    tuple(TOKENS.items()),
)
# With x = batch - 1: 4 / (11 + 19/7 x) = 2.5 / (10.5 + 1.5/7 x) at x = 2.4.
CALIBRATED = ((1, 3, 15), (4, 8, 3))


def make(nodes=(0, 3, 15), calibrated=CALIBRATED, largest=lambda nodes: 8, **options):
    table = [0] * 9
    schedule = RunningSchedule(
        MEASUREMENT, calibrated, table, nodes, largest, **options
    )
    return schedule, table


def feed(schedule, trees, accepted_per_tree, nodes=15, at_once=8):
    """Steps of several trees that accept so many nodes each, on average."""
    for done in range(0, trees, at_once):
        total = round((done + at_once) * accepted_per_tree) - round(
            done * accepted_per_tree
        )
        schedule.step(nodes, at_once, total, is_verifying=True)


def idle(schedule, steps):
    for _ in range(steps):
        schedule.step(0, 0, 0, is_verifying=False)


def test_ratio_halves_what_is_old():
    ratio = AcceptanceRatio(TOKENS, 15, Pace(half_life=100, prior=100))
    assert ratio.value == 1.0
    # The prior is 100 trees with 3 accepted nodes: 150 of 300 are left.
    ratio.observe(15, 100, 0)
    assert ratio.value == pytest.approx(150 / 450)
    ratio.observe(15, 100, 0)
    assert ratio.value == pytest.approx(75 / 525)
    # A tree of 3 nodes is expected to accept 1.5.
    ratio.observe(3, 100, 300)
    assert ratio.value == pytest.approx((37.5 + 300) / (262.5 + 150))


def test_ratio_is_clipped_and_fades():
    ratio = AcceptanceRatio(TOKENS, 15, Pace(half_life=100, prior=100))
    ratio.observe(15, 1000, 15000)
    assert ratio.value == running.MAX_RATIO
    ratio = AcceptanceRatio(TOKENS, 15, Pace(half_life=1e9, prior=200))
    ratio.fade(20)
    assert ratio.value == 1.0
    ratio.observe(15, 20, 0)
    assert ratio.value == pytest.approx(0.5)
    # It already weighs less.
    ratio.fade(50)
    ratio.observe(15, 40, 0)
    assert ratio.value == pytest.approx(0.25)


def test_starts_with_the_calibrated_schedule_and_stays_with_its_acceptance():
    schedule, table = make()
    assert table == [0, *[15] * 3, *[3] * 5]
    feed(schedule, 20000, 3.0)
    assert schedule.ratio.value == pytest.approx(1.0, abs=0.01)
    assert schedule.schedule == CALIBRATED


def test_nothing_accepted_ends_in_no_drafts():
    schedule, table = make()
    seen = []
    for _ in range(16):
        feed(schedule, 512, 0.0)
        seen.append(table[8])
    # With r = 0.1 trees still pay for 2 to 8 requests together, with 0.08 not for 5 to
    # 8. r after n trees is 300 k / (300 k + 2885 (1 - k)), k = 0.5 ** (n / 2000): 0.091
    # after 2048, 0.068 after 2560.
    assert seen.index(0) == 4
    assert table == [0] * 9
    assert schedule.schedule == ((1, 8, 0),)


def test_little_accepted_gives_smaller_trees_for_many():
    schedule, table = make()
    # With r = 0.2 it is 1.6 / 11 > 1.3 / 10.5 for one, 1.6 / 13.7 < 1.3 / 10.7 for two,
    # and 1.3 / 12 > 1 / 10 still for eight.
    feed(schedule, 40000, 0.6)
    assert schedule.ratio.value == pytest.approx(0.2, abs=0.01)
    assert schedule.schedule == ((1, 1, 15), (2, 8, 3))


def test_more_accepted_gives_larger_trees_for_many():
    schedule, table = make()
    # With r = 2 it is 7 / 19.1 > 4 / 11.1 for four.
    feed(schedule, 20000, 9.0)
    assert schedule.ratio.value == running.MAX_RATIO
    assert schedule.schedule == ((1, 4, 15), (5, 8, 3))


def fallen(**options):
    schedule, table = make(**options)
    feed(schedule, 10000, 0.0)
    assert table == [0] * 9
    return schedule, table


def test_probe_finds_traffic_that_accepts_again():
    schedule, table = fallen()
    pace = schedule.pace
    idle(schedule, pace.probe_after - 1)
    assert table == [0] * 9
    idle(schedule, 1)
    assert schedule.is_probing and table == [0, *[15] * 3, *[3] * 5]
    for _ in range(pace.probe_steps):
        assert schedule.is_probing
        schedule.step(15, 1, 3, is_verifying=True)
    # 64 trees as calibrated beside 16 that accepted nothing.
    assert not schedule.is_probing
    assert schedule.ratio.value == pytest.approx(64 / 80, abs=0.01)
    assert table[1] == 15 and table[8] == 3
    feed(schedule, 4096, 3.0)
    assert schedule.ratio.value > 0.97
    assert schedule.schedule == CALIBRATED


def test_probe_that_finds_nothing_costs_its_steps_only():
    schedule, table = fallen()
    pace = schedule.pace
    steps_with_drafts = 0
    for _ in range(3 * (pace.probe_after + pace.probe_steps)):
        is_drafting = table[1] > 0
        steps_with_drafts += is_drafting
        schedule.step(table[1], int(is_drafting), 0, is_verifying=is_drafting)
    assert steps_with_drafts == 3 * pace.probe_steps
    assert table == [0] * 9


def test_probe_without_a_single_tree_changes_nothing():
    schedule, table = fallen()
    before = schedule.ratio.value
    idle(schedule, schedule.pace.probe_after)
    assert schedule.is_probing
    idle(schedule, schedule.pace.probe_steps)
    assert not schedule.is_probing and table == [0] * 9
    # What is known weighs as much as before.
    assert schedule.ratio.value == before
    schedule.step(15, 8, 24, is_verifying=True)
    assert schedule.ratio.value < 0.05


def test_nothing_is_probed_with_the_calibrated_schedule_in_use():
    """Where it has no drafts, a probe would have none either."""
    schedule, table = make(calibrated=((1, 4, 15), (5, 8, 0)))
    for _ in range(3 * schedule.pace.probe_after):
        idle(schedule, 1)
        assert not schedule.is_probing
    assert table == [0, 15, 15, 15, 15, 0, 0, 0, 0]


@pytest.mark.parametrize("ratio", [0.041, 0.071, 0.077, 0.085, 0.26, 0.676, 1.697])
def test_noise_does_not_make_it_flap(ratio):
    """At each of these another schedule becomes the best: its worst places.

    Depths are geometric. If each of the 270 looks led to a choice, the schedule would
    change 37 to 65 times.
    """
    rng = random.Random(0)
    schedule, table = make()
    stay = 3 * ratio / (1 + 3 * ratio)
    changes, before = 0, list(table)
    for step in range(20000):
        accepted = 0
        for _ in range(8):
            while rng.random() < stay:
                accepted += 1
        schedule.step(15, 8, accepted, is_verifying=True)
        if step > 2500:
            # Past the way there.
            changes += table != before
        before = list(table)
    assert changes <= 4


@pytest.mark.parametrize("nodes", [(0, 3), (0, 15), (15,), (0, 3, 15)])
def test_no_width_that_was_not_started_with(nodes):
    rng = random.Random(1)
    calibrated = ((1, 8, max(nodes)),)
    schedule, table = make(nodes, calibrated, pace=Pace(half_life=50, check_every=16))
    seen = set()
    for _ in range(500):
        accepted = rng.choice([0, 1, 3, 8])
        for _ in range(rng.randrange(400)):
            schedule.step(max(nodes), 1, accepted, is_verifying=True)
            seen |= set(table[1:])
    assert seen <= set(nodes)
    assert len(seen) == len(nodes), "nothing was tried"


def test_larger_batches_than_graphs_hold_are_left_out():
    step_ms = {(1, 7): 2.0, (4, 7): 5.0, (8, 7): 9.0, (1, 0): 1.0, (8, 0): 1.0}
    limits = {7: 6, 0: 8}
    assert within(step_ms, (0, 7), limits.__getitem__) == {
        (1, 0): 1.0,
        (8, 0): 1.0,
        (1, 7): 2.0,
        (4, 7): 5.0,
        (6, 7): pytest.approx(7.0),
    }
    # Without any room it is no candidate; past the measured ones nothing is added.
    assert within(step_ms, (7,), lambda nodes: 0) == {}
    assert (99, 7) not in within(step_ms, (7,), lambda nodes: 99)
    schedule, _ = make(largest=lambda nodes: {15: 3}.get(nodes, 8))
    feed(schedule, 20000, 9.0)
    assert schedule.schedule == ((1, 3, 15), (4, 8, 3))


def test_trees_without_an_expectation_are_not_counted():
    schedule, _ = make()
    schedule.step(7, 500, 3000, is_verifying=True)
    schedule.step(0, 500, 0, is_verifying=True)
    assert schedule.ratio.value == 1.0


def test_log_says_what_has_changed_at_most_once_a_minute(monkeypatch):
    said: list[str] = []
    logger = SimpleNamespace(info=lambda text, *values: said.append(text % values))
    monkeypatch.setattr(running, "logger", logger)
    now = 1000.0
    pace = Pace(half_life=50, check_every=16, prior=50)
    schedule, table = make(pace=pace, clock=lambda: now)
    feed(schedule, 400, 0.0)
    # It went there by several schedules.
    assert table == [0] * 9
    (line,) = said
    assert "of what was calibrated: budget by batch size is now [[" in line
    said.clear()
    now += 59
    idle(schedule, 2)
    assert not said
    now += 2
    idle(schedule, 2)
    (line,) = said
    assert line.endswith("is now [[1, 8, 0]]")
    said.clear()
    now += 600
    # Neither a probe that finds nothing, nor a change that was taken back.
    idle(schedule, pace.probe_after + pace.probe_steps)
    assert not said


def test_tables_and_ranges():
    assert by_batch_size(((1, 2, 5), (3, 4, 0)), 6) == [0, 5, 5, 0, 0, 0, 0]
    assert by_batch_size(((1, 2, 5), (3, 9, 7)), 4) == [0, 5, 5, 7, 7]
    assert to_ranges([0, 5, 5, 7, 0]) == ((1, 2, 5), (3, 3, 7), (4, 4, 0))


def test_table_is_vllms():
    from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

    for schedule in (((1, 2, 5), (3, 9, 7)), ((1, 1, 8), (2, 3, 4)), ((1, 64, 2),)):
        for largest in (1, 2, 8, 70):
            assert by_batch_size(schedule, largest) == build_dynamic_sd_schedule_lookup(
                list(schedule), largest, 16
            )
