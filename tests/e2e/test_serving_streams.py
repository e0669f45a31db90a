# SPDX-License-Identifier: Apache-2.0
"""Streams of an engine in a process of its own, as a server has it."""

import asyncio
import time
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from engines import (
    ENGINE_DEFAULTS,
    engine,
    generate,
    gpu_memory,
    params,
    random_prompts,
    token_ids,
)
from engines import tree_config as tree_of
from tiny_server import completion, post, stream, tiny_server, write_pair

pytestmark = pytest.mark.e2e

HELPERS = Path(__file__).parents[1] / "helpers"
PROMPTS = random_prompts((35, 20, 60, 5, 17, 90, 40, 33, 64, 12), seed=51)
MAX_TOKENS = 40
# Fewer requests at a time than clients, and too few blocks for those.
TIGHT = dict(max_num_seqs=4, num_gpu_blocks_override=14, max_num_batched_tokens=140)


def stream_params(index: int) -> Any:
    from vllm.sampling_params import RequestOutputKind

    sampling = [dict(), dict(temperature=1.0, seed=index), dict(presence_penalty=0.5)]
    kind = RequestOutputKind.DELTA
    return params(MAX_TOKENS, **sampling[index % 3], output_kind=kind)


@asynccontextmanager
async def server(target: str, draft: str, monkeypatch: Any):
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    monkeypatch.setenv("PYTHONPATH", str(HELPERS))
    options = {**ENGINE_DEFAULTS, **gpu_memory(), **TIGHT}
    options["disable_log_stats"] = True
    llm = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=target,
            speculative_config=tree_of(draft),
            worker_extension_cls="rigged_worker.RiggedWorker",
            **options,
        )
    )
    try:
        yield llm
    finally:
        llm.shutdown()


class Client:
    """Reads one stream; may go away after some parts of it."""

    def __init__(self, llm: Any, name: str, index: int, parts: int | None = None):
        self.tokens: list[int] = []
        self.num_parts = 0
        self.stream = llm.generate(
            {"prompt_token_ids": PROMPTS[index]}, stream_params(index), name
        )
        self.parts = parts
        self.finish_reason: str | None = None

    async def read(self) -> None:
        async for output in self.stream:
            (completion,) = output.outputs
            self.tokens += completion.token_ids
            self.finish_reason = completion.finish_reason
            self.num_parts += 1
            if self.num_parts == self.parts:
                # What a server does to the stream when the connection is lost.
                raise asyncio.CancelledError


async def all_blocks_are_free(llm: Any) -> bool:
    """An abort takes effect in the next step of the engine."""
    for _ in range(50):
        if await llm.reset_prefix_cache():
            return True
        await asyncio.sleep(0.1)
    return False


def test_clients_that_disconnect(tiny_target, tiny_draft, monkeypatch):
    with engine(tiny_target) as llm:
        options = [stream_params(i) for i in range(len(PROMPTS))]
        expected = token_ids(generate(llm, PROMPTS, options))

    async def talk() -> None:
        async with server(tiny_target, tiny_draft, monkeypatch) as llm:
            await llm.collective_rpc("rig_to", args=(PROMPTS, expected))
            # Before the first part, after some, and never.
            parts = [None, 1, None, 3, None, 0, 2, None, 5, None]
            clients = [Client(llm, f"a{i}", i, n) for i, n in enumerate(parts)]
            tasks = [asyncio.create_task(client.read()) for client in clients]
            await asyncio.sleep(0)
            tasks[parts.index(0)].cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for client, task, tokens in zip(clients, tasks, expected, strict=True):
                if client.parts is None:
                    assert task.exception() is None
                    assert client.tokens == tokens
                    assert client.finish_reason == "length"
                else:
                    assert task.cancelled()
                    assert len(client.tokens) < MAX_TOKENS
                    assert client.tokens == tokens[: len(client.tokens)]
            # Several tokens came in one part where a path was accepted.
            assert any(c.num_parts < len(c.tokens) for c in clients)
            assert await all_blocks_are_free(llm)

            # The places of those who left serve others, a stream closed by hand among
            # them.
            later = [Client(llm, f"b{i}", i) for i in range(len(PROMPTS))]
            tasks = [asyncio.create_task(client.read()) for client in later[1:]]
            async for _ in later[0].stream:
                break
            await later[0].stream.aclose()
            await asyncio.gather(*tasks)
            assert [client.tokens for client in later[1:]] == expected[1:]
            assert await all_blocks_are_free(llm)
            ((num_verified, num_branching),) = await llm.collective_rpc("rig_counts")
            assert num_verified > 50
            assert num_branching > 20

    asyncio.run(talk())


@pytest.mark.slow
def test_connections_that_are_closed_in_the_middle_of_an_answer(tmp_path):
    """Over HTTP, from `vllm serve`: the answer ends there, and its blocks are free."""
    longest = 900
    with tiny_server(write_pair(tmp_path), tmp_path, ddtree=True) as server:

        def say(count: int) -> list[int]:
            status, answer = post(server, "/v1/completions", completion(count))
            assert status == 200, answer
            return answer["choices"][0]["token_ids"]

        expected = say(200)
        before = server.client.counters()

        def wait_for_running(count: int) -> None:
            deadline = time.monotonic() + 30
            while server.client.counters()["vllm:num_requests_running"] != count:
                assert time.monotonic() < deadline, f"there were never {count}"
                time.sleep(0.02)

        # Before the first part is read, and after some.
        for num_parts in (0, 1, 7):
            with stream(server, completion(longest)) as parts:
                got = [token for _ in range(num_parts) for token in next(parts)]
                assert got == expected[: len(got)]
                wait_for_running(1)
            wait_for_running(0)
            assert bool(got) == bool(num_parts)
        # The gauges are those of the last step that there was.
        assert say(200) == expected
        after = server.client.counters()
    assert after["vllm:kv_cache_usage_perc"] == 0
    assert after["vllm:num_requests_running"] == after["vllm:num_requests_waiting"] == 0
    said = (
        after["vllm:generation_tokens_total"] - before["vllm:generation_tokens_total"]
    )
    assert 200 < said < 200 + longest
    assert after["vllm:spec_decode_num_drafts_total"] > 200
