# SPDX-License-Identifier: Apache-2.0
"""Two ranks: each builds, walks and compacts its own copy of the same trees.

Nothing is sent between ranks about trees. They agree if every rank has the same logits,
bit for bit, and the same draws; a rank that disagreed would attend along other branches
and nobody would notice. On the CPU two processes stand for two GPUs.
"""

import asyncio
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import (
    ENGINE_DEFAULTS,
    generate,
    gpu_memory,
    params,
    random_prompts,
    token_ids,
)
from engines import tree_config as tree_of
from tiny_adapters import RANK, lora_request, write_adapter

from vllm_dflash.metrics.tree_dump import read_dump

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.device_count() < 2,
        reason="needs two GPUs, or none",
    ),
]

HELPERS = Path(__file__).parents[1] / "helpers"
PROMPTS = random_prompts((35, 20, 60, 5, 17, 90, 40), seed=61)
MAX_TOKENS = 40
# The last request: each rank draws a seed for it from a generator of its own.
SEEDED = slice(0, 6)


def request_params() -> list[Any]:
    options: list[dict[str, Any]] = [
        {},
        dict(temperature=1.0, seed=1),
        dict(temperature=0.8, seed=2, top_p=0.9, top_k=30),
        dict(presence_penalty=0.5),
        {},
        dict(temperature=1.0, seed=3, logprobs=2),
        dict(temperature=1.0),
    ]
    return [params(MAX_TOKENS, **values) for values in options]


@contextmanager
def two_ranks(target: str, **options: Any):
    from vllm import LLM

    # On the CPU a single worker would run in the test's process; two never do.
    with pytest.MonkeyPatch.context() as patch:
        if torch.cuda.is_available():
            # A process that has asked for GPUs can't use them in a fork.
            patch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
        llm = LLM(
            model=target,
            tensor_parallel_size=2,
            distributed_executor_backend="mp",
            **{**ENGINE_DEFAULTS, **gpu_memory(), **options},
        )
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()


@pytest.fixture(scope="module")
def reference(tiny_target) -> list[list[int]]:
    """Tokens of two ranks without speculation; their sums differ from those of one."""
    with two_ranks(tiny_target) as llm:
        return token_ids(generate(llm, PROMPTS, request_params()))


def rank_digests(llm: Any) -> list[list[list[str]]]:
    """[stage, digest] of each record of the two ranks, in order."""
    first, second = llm.collective_rpc("take_digests")
    return [list(map(list, first)), list(map(list, second))]


def test_both_ranks_verify_the_same_trees(
    tiny_target, tiny_draft, reference, monkeypatch, tmp_path
):
    monkeypatch.setenv("PYTHONPATH", str(HELPERS))
    # Only one rank reads its rounds back.
    monkeypatch.setenv("VLLM_DFLASH_DUMP_TREES", str(tmp_path / "trees.jsonl"))
    tree = dict(
        speculative_config=tree_of(tiny_draft),
        worker_extension_cls="rank_worker.RankWorker",
    )
    with two_ranks(tiny_target, **tree) as llm:
        # The draft on its own: candidates of its own logits, hardly any is accepted.
        outputs = token_ids(generate(llm, PROMPTS, request_params()))
        assert outputs[SEEDED] == reference[SEEDED]
        first, second = rank_digests(llm)
        stages = {"candidates", "trees", "sizes", "nodes", "logits", "paths", "emitted"}
        assert {stage for stage, _ in first} == stages
        assert len(first) > 300
        assert first == second
        rounds = read_dump(tmp_path / "trees.jsonl").rounds
        assert len({(item.request, item.step) for item in rounds}) == len(rounds) > 100

        # Deep paths off the first branch.
        before = llm.collective_rpc("rig_counts")
        llm.collective_rpc("rig_to", args=(PROMPTS, reference))
        outputs = token_ids(generate(llm, PROMPTS, request_params()))
        assert outputs[SEEDED] == reference[SEEDED]
        first, second = rank_digests(llm)
        assert first == second
        counts = llm.collective_rpc("rig_counts")
        assert counts[0] == counts[1]
        assert counts[0][1] - before[0][1] > 10

        # Digests see a rank that goes its own way.
        llm.collective_rpc("draw_differently_on", args=(1,))
        generate(llm, PROMPTS, request_params())
        first, second = rank_digests(llm)
        assert first != second


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="vLLM's LoRA kernels of a GPU take no fp32"
)
@pytest.mark.parametrize(
    "fully_sharded", [False, pytest.param(True, marks=pytest.mark.slow)]
)
def test_adapters_on_both_ranks(
    tiny_target, tiny_draft, tmp_path, monkeypatch, fully_sharded
):
    """The adapter of the lm_head is added to the gathered logits, on each rank."""
    monkeypatch.setenv("PYTHONPATH", str(HELPERS))
    first = lora_request(write_adapter(tmp_path / "first", seed=10), 1)
    second = lora_request(write_adapter(tmp_path / "head", seed=13, lm_head=True), 2)
    loras = [first, None, second, None, first, second, None]
    options = dict(
        enable_lora=True, max_lora_rank=2 * RANK, fully_sharded_loras=fully_sharded
    )

    def ask(llm: Any) -> list[list[int]]:
        words = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        return token_ids(
            llm.generate(words, request_params(), use_tqdm=False, lora_request=loras)
        )

    # The last slot stays empty: on the CPU vLLM gives it to requests without one.
    with two_ranks(tiny_target, max_loras=3, **options) as llm:
        expected = ask(llm)
    tree = dict(
        speculative_config=tree_of(tiny_draft),
        worker_extension_cls="rank_worker.RankWorker",
    )
    with two_ranks(tiny_target, max_loras=2, **options, **tree) as llm:
        llm.collective_rpc("rig_to", args=(PROMPTS, expected))
        assert ask(llm)[SEEDED] == expected[SEEDED]
        first_rank, second_rank = rank_digests(llm)
        assert first_rank == second_rank
        (counts, _) = llm.collective_rpc("rig_counts")
        assert counts[1] > 10


def test_data_parallel_engines(tiny_target, tiny_draft, greedy_reference, prompts):
    """Of a dense model: both engines verify trees, and metrics tell them apart."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    from vllm_dflash.metrics.front_end import get_metrics

    async def answer(llm: Any, index: int) -> list[int]:
        prompt = {"prompt_token_ids": prompts[index]}
        async for output in llm.generate(prompt, params(), f"dp-{index}"):
            tokens = list(output.outputs[0].token_ids)
        return tokens

    async def talk() -> list[list[int]]:
        llm = AsyncLLM.from_engine_args(
            AsyncEngineArgs(
                model=tiny_target,
                data_parallel_size=2,
                speculative_config=tree_of(tiny_draft),
                **ENGINE_DEFAULTS,
                **gpu_memory(),
            )
        )
        try:
            return await asyncio.gather(*(answer(llm, i) for i in range(len(prompts))))
        finally:
            llm.shutdown()

    assert asyncio.run(talk()) == greedy_reference
    rounds = {
        sample.labels["engine"]: sample.value
        for sample in get_metrics()
        if sample.name == "vllm_dflash:rounds_total"
    }
    assert rounds.keys() >= {"0", "1"}
    assert min(rounds["0"], rounds["1"]) > 10
