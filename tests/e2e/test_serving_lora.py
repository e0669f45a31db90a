# SPDX-License-Identifier: Apache-2.0
"""Adapters on the target: every request is answered as its own adapter would.

vLLM without speculation is the reference. On the CPU it gives a request without an
adapter the adapter of the last slot, so its engine has a slot more than it ever fills.
"""

from typing import Any

import pytest
import torch
from engines import engine, params, random_prompts, token_ids, tree_config
from graph_replays import GraphReplays
from partings import NUM_SCORES, Partings, write_calm_target
from schedule_log import ScheduleLog
from tiny_adapters import RANK, lora_request, write_adapter

from vllm_dflash.runner.runtime import TreeRuntime

pytestmark = pytest.mark.e2e

MAX_TOKENS = 40
LORA = dict(enable_lora=True, max_lora_rank=2 * RANK)
GRAPHS = pytest.param(False, marks=pytest.mark.gpu, id="graphs")
EAGER = pytest.param(True, id="eager")
# vLLM's LoRA kernels of a GPU take no fp32.
cpu_only = pytest.mark.skipif(torch.cuda.is_available(), reason="needs fp32")


@pytest.fixture(scope="module")
def adapters(tmp_path_factory) -> dict[str, Any]:
    """Adapters by name: two on the layers, one on the lm_head, one on everything."""
    root = tmp_path_factory.mktemp("adapters")
    options = {
        "first": dict(seed=10),
        "second": dict(seed=11),
        "head": dict(seed=12, layers=False, lm_head=True),
        "all": dict(seed=13, lm_head=True, embedding=True),
    }
    return {
        name: lora_request(write_adapter(root / name, **values), number)
        for number, (name, values) in enumerate(options.items(), start=1)
    }


@pytest.fixture
def batches(monkeypatch) -> list[set[int]]:
    """Adapters of the rows of logits of each step that has more of them than requests.

    0 stands for requests without one.
    """
    from vllm.lora.model_manager import LRUCacheLoRAModelManager

    seen = []
    set_mapping = LRUCacheLoRAModelManager.set_adapter_mapping

    def spy(self, mapping):
        if len(mapping.prompt_mapping) > self.max_num_seqs:
            seen.append({int(number) for number in mapping.prompt_mapping})
        return set_mapping(self, mapping)

    monkeypatch.setattr(LRUCacheLoRAModelManager, "set_adapter_mapping", spy)
    return seen


def ask(llm: Any, prompts: list, options: Any, loras: list) -> list[list[int]]:
    words = [{"prompt_token_ids": prompt} for prompt in prompts]
    return token_ids(llm.generate(words, options, use_tqdm=False, lora_request=loras))


def mixed_params(count: int) -> list[Any]:
    """Greedy, seeded, and a history-bound request that is verified as a chain."""
    options: list[dict[str, Any]] = [
        {},
        dict(temperature=0.8, seed=2, top_p=0.9, top_k=30),
        {},
        dict(temperature=1.0, seed=1),
        {},
        dict(repetition_penalty=1.2),
        {},
    ]
    return [params(MAX_TOKENS, **options[i % len(options)]) for i in range(count)]


def assert_adapters_matter(expected: list[list[int]], loras: list[Any]) -> None:
    """Greedy answers to one prompt, a request for each adapter."""
    assert len({lora and lora.lora_int_id for lora in loras}) == len(loras)
    assert len({tuple(tokens[:4]) for tokens in expected}) == len(expected)


@cpu_only
def test_two_adapters_and_none_in_one_batch(
    tiny_target, tiny_draft, adapters, rig, batches, monkeypatch
):
    first, second = adapters["first"], adapters["second"]
    log = ScheduleLog()
    log.install(monkeypatch)
    loras = [first, None, second, None, first, second, None, first]
    prompts = random_prompts((35, 64, 60, 70, 5, 17, 90, 40), seed=71)
    # One prompt with each adapter: blocks of one are no hit for another.
    loras += [None, first, second]
    prompts += random_prompts((70,), seed=72) * 3
    options = [*mixed_params(8), *[params(MAX_TOKENS)] * 3]
    with engine(tiny_target, max_loras=3, **LORA) as llm:
        expected = ask(llm, prompts, options, loras)
    assert_adapters_matter(expected[8:], loras[8:])
    rig.add_references(prompts, expected)
    tight = dict(num_gpu_blocks_override=14, max_num_batched_tokens=136)
    with engine(
        tiny_target, tree_config(tiny_draft), max_loras=2, **LORA, **tight
    ) as llm:
        got = ask(llm, prompts, options, loras)
    assert got == expected
    assert log.preempted, "the pool was large enough: nothing was tested"
    assert any(step.is_mixed for step in log.steps)
    assert {0, 1, 2} in batches
    assert rig.num_branching_paths > 20


@cpu_only
def test_adapters_of_the_lm_head_take_turns(
    tiny_target, tiny_draft, adapters, rig, batches
):
    """Every row of logits needs its own; more adapters than slots; several widths."""
    head, whole, first = adapters["head"], adapters["all"], adapters["first"]
    loras = [head, None, whole, first, head, whole, None, head]
    prompts = random_prompts((35, 20, 60, 5, 17, 90, 40, 30), seed=73)
    loras += [None, head, whole, first]
    prompts += random_prompts((40,), seed=74) * 4
    options = [*mixed_params(8), *[params(MAX_TOKENS)] * 4]
    # The last slot of five stays empty.
    with engine(tiny_target, max_loras=5, **LORA) as llm:
        expected = ask(llm, prompts, options, loras)
    assert_adapters_matter(expected[8:], loras[8:])
    rig.add_references(prompts, expected)
    config = tree_config(
        tiny_draft, budget_per_batch_size=[[1, 2, 16], [3, 3, 5], [4, 4, 9]]
    )
    with engine(tiny_target, config, max_loras=2, **LORA) as llm:
        got = ask(llm, prompts, options, loras)
    assert got == expected
    assert {3, 4} in batches
    assert any(0 in batch and len(batch) > 1 for batch in batches)
    assert {6, 10, 17} <= set(rig.tree_lens)
    assert rig.num_branching_paths > 20


def find_lora_partings(
    target: str, draft: str, rig: Any, adapters: dict[str, Any], eager: bool
) -> Partings:
    """Greedy answers in 16 bits with several adapters in each batch."""
    rig.strict = False
    turns = [None, *adapters.values()]
    prompts = random_prompts(tuple(5 + i * 7 % 60 for i in range(40)), seed=75)
    loras = [turns[i % len(turns)] for i in range(len(prompts))]
    options = dict(dtype="bfloat16", enforce_eager=eager, **LORA)
    words = [{"prompt_token_ids": prompt} for prompt in prompts]
    with engine(target, max_loras=5, **options) as llm:
        plain = llm.generate(
            words, params(16, logprobs=NUM_SCORES), use_tqdm=False, lora_request=loras
        )
    rig.add_references(prompts, token_ids(plain))
    with engine(target, tree_config(draft), max_loras=4, **options) as llm:
        replays = GraphReplays(llm)
        said = ask(llm, prompts, params(16), loras)
        assert eager or replays.verify.total() > 5
    partings = Partings()
    for output, tokens in zip(plain, said, strict=True):
        partings.add(output.outputs[0], tokens)
    print(sorted(round(gap, 3) for gap in partings.gaps), rig.num_branching_paths)
    return partings


@pytest.mark.parametrize("eager", [EAGER, GRAPHS])
def test_16_bits_leave_no_speculation_at_near_ties(
    tmp_path, tiny_draft, rig, adapters, eager
):
    target = write_calm_target(tmp_path)
    found = find_lora_partings(target, tiny_draft, rig, adapters, eager)
    assert rig.num_branching_paths > 50
    assert found.largest_gap < 0.1
    assert found.share_of_parting < 0.5


@pytest.mark.slow
def test_rows_of_the_lm_head_of_another_request_are_no_near_tie(
    tmp_path, tiny_draft, rig, adapters, monkeypatch
):
    """What the runner would do of itself, made to fit."""

    def first_rows(self, values):
        num_logits = self.num_logits_np
        rows = len(values) if num_logits is None else int(num_logits.sum())
        return (*values, *[0] * (rows - len(values)))

    monkeypatch.setattr(TreeRuntime, "spread_over_logits", first_rows)
    target = write_calm_target(tmp_path)
    found = find_lora_partings(target, tiny_draft, rig, adapters, eager=True)
    assert found.largest_gap > 0.4
