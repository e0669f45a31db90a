# SPDX-License-Identifier: Apache-2.0
"""Metrics, log lines and the dump of trees against what the engine really did."""

import logging
import time
from collections import Counter
from contextlib import contextmanager
from itertools import pairwise

import pytest
import torch
from engines import (
    acceptance_counts,
    chain_config,
    engine,
    generate,
    gpu_memory_args,
    params,
    random_prompts,
    token_ids,
    tree_config,
)

from vllm_dflash.metrics import canary, publisher
from vllm_dflash.metrics.tree_dump import read_dump

pytestmark = pytest.mark.e2e

DEPTH = 7
SCHEDULE = [[1, 1, 16], [2, 2, 5], [3, 4, 9]]


def samples() -> dict[str, dict[str, float]]:
    """Name without prefix -> value of its own label, or "" -> value."""
    from vllm_dflash.metrics.front_end import get_metrics

    seen: dict[str, dict[str, float]] = {}
    for sample in get_metrics():
        [own] = [
            value
            for name, value in {"": "", **sample.labels}.items()
            if name not in {"model_name", "engine"} and (name or len(sample.labels) < 3)
        ]
        name = sample.name.removeprefix("vllm_dflash:")
        seen.setdefault(name, {})[own] = sample.value
    return seen


def wait_for_worker(
    total: float, timed_steps: int | None = None
) -> dict[str, dict[str, float]]:
    """Samples once the worker has published all accepted nodes, and timed all steps.

    Nodes are accepted in the middle of a step that is timed up to its end, so the last
    step may be published in two parts.
    """
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        seen = samples()
        accepted = sum(seen.get("accepted_nodes_by_rank_total", {}).values())
        counts = set(seen.get("stage_time_seconds_count", {}).values())
        is_timed = timed_steps is None or counts == {timed_steps}
        if accepted == total and is_timed:
            return seen
        time.sleep(0.05)
    return samples()


def nonzero(values: dict[str, float]) -> dict[int, float]:
    return {int(float(key)): value for key, value in values.items() if value}


def periodic_lines(llm) -> list[str]:
    """What vLLM's periodic log prints now."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    # vLLM sets its loggers up when an engine is made, so not before.
    logger = logging.getLogger("vllm.v1.metrics.loggers")
    before = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        llm.llm_engine.do_log_stats()
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
    return lines


def test_metrics_lines_and_dump_agree_with_the_paths(
    tiny_target,
    tiny_draft,
    rig,
    prompts,
    greedy_reference,
    tmp_path,
    monkeypatch,
):
    path = tmp_path / "trees.jsonl"
    monkeypatch.setenv("VLLM_DFLASH_DUMP_TREES", str(path))
    monkeypatch.setenv("VLLM_DFLASH_STAGE_TIMES", "1")
    # vLLM makes no logger for periodic lines that nobody would see.
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")
    # The lines begin anew each time they are printed, as while a kernel is compiled.
    monkeypatch.setenv("VLLM_LOG_STATS_INTERVAL", "3600")
    monkeypatch.setattr(publisher, "INTERVAL_S", 0.05)
    rig.add_references(prompts, greedy_reference)
    config = tree_config(tiny_draft, budget_per_batch_size=SCHEDULE)
    # Async scheduling verifies a tree too many for a request that has ended.
    with engine(tiny_target, config, async_scheduling=False) as llm:
        outputs = generate(llm, prompts, params())
        lines = periodic_lines(llm)
        values = {m.name: getattr(m, "value", None) for m in llm.get_metrics()}
        accepted = values["vllm:spec_decode_num_accepted_tokens"]
        rounds = read_dump(path).rounds
        steps = len({r.step for r in rounds})
        seen = wait_for_worker(accepted, timed_steps=steps)
    assert token_ids(outputs) == greedy_reference
    assert rig.num_branching_paths > 10, "the paths are those of a chain"

    # The dump is what was verified, and nobody else's business.
    assert path.stat().st_mode & 0o077 == 0
    assert sorted(list(r.path) for r in rounds) == sorted(rig.paths)
    assert sorted(len(r.tokens) for r in rounds) == sorted(rig.tree_lens)
    for prompt, output in zip(prompts, outputs, strict=True):
        [name] = {
            r.request for r in rounds if r.request.split("-")[0] == output.request_id
        }
        own = [r for r in rounds if r.request == name]
        assert own[0].position == len(prompt)
        tokens = [own[0].tokens[0], *(t for r in own for t in r.emitted)]
        answer = list(output.outputs[0].token_ids)
        # The scheduler cuts the last path at max_tokens.
        assert tokens[: len(answer)] == answer
        for before, after in pairwise(own):
            assert after.tokens[0] == before.bonus
            assert after.position == before.position + len(before.emitted)

    # Scheduler-side counts leave the last step of a request out, if it was cut.
    num_rounds = values["vllm:spec_decode_num_drafts"]
    assert num_rounds == len(rounds)
    assert seen["rounds_total"] == {"": num_rounds}
    by_depth = Counter(d for r in rounds for d in range(1, len(r.path)))
    assert nonzero(seen["accepted_nodes_by_depth_total"]) == by_depth
    assert accepted == by_depth.total()
    by_rank = Counter(
        r.children(parent).index(node)
        for r in rounds
        for parent, node in pairwise(r.path)
    )
    assert nonzero(seen["accepted_nodes_by_rank_total"]) == by_rank
    assert len(by_rank) > 2
    lengths = Counter(len(r.emitted) for r in rounds)
    buckets = seen["acceptance_length_bucket"]
    for length in range(1, DEPTH + 2):
        below = sum(n for value, n in lengths.items() if value <= length)
        assert buckets[f"{float(length)}"] == below
    assert seen["acceptance_length_count"][""] == num_rounds
    assert seen["acceptance_length_sum"][""] == sum(len(r.emitted) for r in rounds)
    widths = Counter(len(r.tokens) for r in rounds)
    assert nonzero(seen["rounds_by_width_total"]) == widths
    assert set(widths) >= {6, 10, 17}
    assert seen["proposed_nodes_total"][""] == sum(len(r.tokens) - 1 for r in rounds)
    assert seen["verify_width"][""] in widths

    # Stages were timed in every step that verified.
    assert set(seen["stage_time_seconds_count"].values()) == {steps}
    assert all(seconds > 0 for seconds in seen["stage_time_seconds_sum"].values())

    [vllms] = [line for line in lines if line.startswith("SpecDecoding metrics")]
    [ours] = [line for line in lines if line.startswith("DDTree metrics")]
    mean = f"Mean acceptance length: {1 + accepted / num_rounds:.2f},"
    assert mean in vllms and mean in ours
    rates = ", ".join(f"{by_depth[d] / num_rounds:.3f}" for d in range(1, DEPTH + 1))
    assert f"Per-position acceptance rate: {rates}, Avg" in vllms
    slots = sum(min(DEPTH, len(r.tokens) - 1) for r in rounds)
    assert vllms.endswith(f"Avg Draft acceptance rate: {accepted / slots:.1%}")
    assert f"Rounds: {num_rounds}," in ours


@contextmanager
def lines_of(name: str):
    """Messages of a logger of ours, from a level of WARNING up."""
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger(name)
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


def test_a_draft_that_is_never_right_is_told_once(tiny_target, tiny_draft, rig):
    prompts, options = random_prompts((35, 20, 60, 5)), params(150)
    answers, warnings, rounds = [], [], []
    # The draft is its random self first, and rigged to what was said then.
    for _ in range(2):
        with (
            engine(tiny_target, tree_config(tiny_draft)) as llm,
            # Not before: making an engine takes the handlers away.
            lines_of(canary.logger.name) as lines,
        ):
            answers.append(token_ids(generate(llm, prompts, options)))
            rounds.append(acceptance_counts(llm)[0])
        warnings.append(lines)
        rig.add_references(prompts, answers[-1])
    assert answers[1] == answers[0]
    # The first was watched long past its warning.
    assert rounds[0] > 2 * canary.CANARY_ROUNDS
    assert rounds[1] > canary.CANARY_ROUNDS
    [warning], others = warnings
    assert others == []
    assert "hardly ever right: the mean acceptance length is 1.0" in warning
    assert tiny_draft in warning and tiny_target in warning


def test_engines_without_trees_have_vllms_loggers_and_no_metric_of_ours(
    tiny_target, tiny_draft
):
    from vllm.v1.metrics.loggers import PerEngineStatLoggerAdapter
    from vllm.v1.spec_decode.metrics import SpecDecodingLogging

    with engine(tiny_target, chain_config(tiny_draft)) as llm:
        manager = llm.llm_engine.logger_manager
        names = [type(each).__name__ for each in manager.stat_loggers]
        for each in manager.stat_loggers:
            if isinstance(each, PerEngineStatLoggerAdapter):
                [inner] = each.per_engine_stat_loggers.values()
                assert type(inner.spec_decoding_logging) is SpecDecodingLogging
        generate(llm, random_prompts((5,)), params(8))
    assert "TreeStatLogger" not in names and names[-1] == "PrometheusStatLogger"


def test_without_statistics_nothing_is_counted_in_the_front_end(
    tiny_target, tiny_draft, monkeypatch
):
    from vllm_dflash.metrics import exchange

    def refuse(self):
        pytest.fail("a folder although nobody reads it")

    monkeypatch.setattr(exchange.FrontEndFolder, "__init__", refuse)
    monkeypatch.setattr(
        publisher.threading, "Thread", lambda **kwargs: pytest.fail("a thread")
    )
    with engine(tiny_target, tree_config(tiny_draft), disable_log_stats=True) as llm:
        assert llm.llm_engine.logger_manager is None
        assert len(generate(llm, random_prompts((5,)), params(8))) == 1


def test_counters_cross_the_border_of_the_engine_process(
    tiny_target, tiny_draft, prompts, monkeypatch
):
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    config = tree_config(tiny_draft)
    with engine(tiny_target, config, async_scheduling=False) as llm:
        assert not hasattr(llm.llm_engine.engine_core, "engine_core")
        # Until the random draft has been right at least once.
        for seed in range(5):
            generate(llm, random_prompts((35, 20, 60, 5), seed=seed), params(60))
            depths = samples()["accepted_nodes_by_depth_total"]
            if sum(depths.values()):
                break
        total = sum(depths.values())
        assert total > 0, "nothing to see"
        seen = wait_for_worker(total)
    assert sum(seen["accepted_nodes_by_rank_total"].values()) == total


@pytest.mark.slow
@pytest.mark.parametrize("num_api_servers", [1, 2])
def test_served_metrics(tmp_path, tiny_draft, num_api_servers):
    """`vllm serve` in its own processes; several API servers share a folder."""
    from tiny_models import write_target
    from tiny_tokenizer import write_tokenizer

    from vllm_dflash.demo.pair import ModelPair
    from vllm_dflash.demo.serve import ServerSpec, VLLMServer, free_port

    target = write_target(tmp_path)
    write_tokenizer(target)
    spec = ServerSpec(
        label="tiny",
        pair=ModelPair(target, tiny_draft, "tiny", is_embedded=True),
        is_cpu=not torch.cuda.is_available(),
        port=free_port(),
        speculative_config=tree_config(tiny_draft),
        max_model_len=256,
        extra_args=[
            *("--api-server-count", str(num_api_servers)),
            # vLLM captures a graph for each of many batch sizes otherwise.
            *("--max-num-seqs", "8"),
            *gpu_memory_args(),
        ],
        variables={"VLLM_DFLASH_STAGE_TIMES": "1"},
    )
    prompts = random_prompts((35, 20, 60, 5, 17, 90, 33, 12), seed=3)
    payload = {
        "model": "tiny",
        "max_tokens": 100,
        "ignore_eos": True,
        "prompt": prompts,
    }
    with VLLMServer(spec, tmp_path / "log", print) as server:
        # Each of several connections may reach another API server.
        for _ in range(4):
            with server.client._open("/v1/completions", payload):
                pass
        time.sleep(3)
        counters = server.client.counters()
    rounds = counters["vllm_dflash:rounds_total"]
    assert rounds == counters["vllm:spec_decode_num_drafts_total"] > 100
    accepted = counters["vllm:spec_decode_num_accepted_tokens_total"]
    assert counters["vllm_dflash:accepted_nodes_by_depth_total"] == accepted > 0
    assert counters["vllm_dflash:accepted_nodes_by_rank_total"] == accepted
    assert counters["vllm_dflash:acceptance_length_sum"] == accepted + rounds
    assert counters["vllm_dflash:rounds_by_width_total"] == rounds
    assert counters["vllm_dflash:verify_width"] == 17
    assert counters["vllm_dflash:stage_time_seconds_sum"] > 0
