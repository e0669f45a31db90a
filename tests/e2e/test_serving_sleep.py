# SPDX-License-Identifier: Apache-2.0
"""Engines with trees that sleep, and requests that outlast it.

On a GPU the weights go to the host and the KV cache is dropped. vLLM's CPU worker keeps
its memory; scheduling stops and the cache is forgotten there too.
"""

import pytest
import torch
from engines import engine, generate, params, random_prompts, token_ids, tree_config
from schedule_log import ScheduleLog
from stepper import DECODING, Stepper, num_free_blocks

pytestmark = pytest.mark.e2e

HAS_GPU = torch.cuda.is_available()
OPTIONS = dict(enable_sleep_mode=True) if HAS_GPU else {}
PROMPTS = random_prompts((35, 64, 60, 70), seed=61)
MIX = [dict(), dict(temperature=1.0, seed=1), dict(repetition_penalty=1.2), dict()]


def mix() -> list:
    return [params(40, **kwargs) for kwargs in MIX]


@pytest.mark.parametrize("graphs", [False, pytest.param(True, marks=pytest.mark.gpu)])
def test_sleep_and_wake(tiny_target, tiny_draft, rig, monkeypatch, graphs):
    with engine(tiny_target) as llm:
        expected = token_ids(generate(llm, PROMPTS, mix()))
    rig.add_references(PROMPTS, expected)
    log = ScheduleLog()
    log.install(monkeypatch)
    options = dict(OPTIONS, enforce_eager=not graphs)
    with engine(tiny_target, tree_config(tiny_draft), **options) as llm:
        free_blocks = num_free_blocks(llm)
        stepper = Stepper(llm)
        for i, (prompt, option) in enumerate(zip(PROMPTS, mix(), strict=True)):
            stepper.add(f"r{i}", prompt, option)
        stepper.step(6)
        assert all(stepper.phases(f"r{i}") == {DECODING} for i in range(4))
        llm.sleep(level=1, mode="keep")
        # On a GPU a step was under way.
        stepper.step(2)
        said = dict(stepper.tokens)
        stepper.step(2)
        assert stepper.tokens == said
        assert num_free_blocks(llm) == free_blocks
        llm.wake_up()
        num_paths = len(rig.paths)
        stepper.run()
        assert [stepper.tokens[f"r{i}"] for i in range(4)] == expected
        # All were preempted by the sleep, and verify trees again.
        assert len(log.preempted) == 4
        assert any(p != list(range(len(p))) for p in rig.paths[num_paths:])

        llm.sleep(level=1)
        llm.wake_up()
        assert token_ids(generate(llm, PROMPTS, mix())) == expected


@pytest.mark.skipif(HAS_GPU, reason="a GPU can sleep")
def test_sleep_mode_of_a_cpu_is_vllms_to_refuse(tiny_target, tiny_draft):
    config = tree_config(tiny_draft)
    with (
        pytest.raises(ValueError, match="Sleep mode is not supported"),
        engine(tiny_target, config, enable_sleep_mode=True),
    ):
        pass
