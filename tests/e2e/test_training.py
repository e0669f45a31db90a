# SPDX-License-Identifier: Apache-2.0
"""Training and serving see the same: features, positions, mask; and drafts get better.

A draft that was trained on other context than it is served with still loads and stays
lossless, so only these comparisons show it.
"""

import dataclasses
import json
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from draft_records import record_drafts
from engines import (
    acceptance_counts,
    chain_config,
    engine,
    generate,
    gpu_memory,
    params,
    token_ids,
    tree_config,
)
from tiny_models import BLOCK_SIZE, DRAFT_LAYERS, MASK_TOKEN, write_target
from tiny_tokenizer import write_tokenizer
from training_runs import (
    CPU,
    ROOT,
    answer,
    load_target,
    random_rows,
    tiny_config,
    tiny_responses,
    trainer,
)

from vllm_dflash_training.backends import (
    Sampling,
    TransformersBackend,
    VllmBackend,
)
from vllm_dflash_training.blocks import Batch
from vllm_dflash_training.config import GenerationOptions
from vllm_dflash_training.data import Responses

pytestmark = pytest.mark.e2e

DEPTH = BLOCK_SIZE - 1
# fp32 on both sides, summed in another order. A wrong layer, position or mask moves
# logits by more than 0.1.
LOGITS_ATOL = 1e-4
MAX_TOKENS = 24


def training_logits(training, context: tuple[int, ...]) -> torch.Tensor:
    """The training module's logits for a block after this context."""
    tokens = torch.tensor([context])
    anchor = torch.tensor([[len(context) - 1]])
    batch = Batch(tokens, torch.tensor([1]), torch.tensor([len(context)]))
    with torch.no_grad():
        hidden, _ = training.forward.hidden(batch, anchor)
        return training.forward.logits(hidden)[0, 0]


def test_both_backends_give_the_targets_greedy_answers(
    tiny_target, prompts, greedy_reference, monkeypatch
):
    # Set, so that the backend leaves the plugins of this process alone.
    monkeypatch.setenv("VLLM_PLUGINS", "dflash,dflash_cpu")
    options = GenerationOptions(batch_size=4, engine_args=gpu_memory())
    sampling = Sampling(0.0, 32, 0.0, 0)
    hf = TransformersBackend(tiny_target, torch.float32, CPU, [], options)
    assert answer(hf, prompts, sampling) == greedy_reference
    stop = greedy_reference[0][9]
    hf.stop_ids = [stop]
    answers = answer(hf, prompts, sampling)
    assert answers[0] == greedy_reference[0][: greedy_reference[0].index(stop) + 1]
    from vllm.distributed import cleanup_dist_env_and_memory

    backend = VllmBackend(tiny_target, torch.float32, 256, [stop], options)
    try:
        assert answer(backend, prompts, sampling) == answers
        warm = answer(backend, prompts, Sampling(1.0, 32, 0.0, 7))
        assert warm == answer(backend, prompts, Sampling(1.0, 32, 0.0, 7)) != answers
    finally:
        backend.llm.llm_engine.engine_core.shutdown()
        cleanup_dist_env_and_memory()


def generation_run(folder: Path, target: str) -> list[str]:
    """A command that generates, greedily and with seeds, own prompts included."""
    options = dict(
        target=target,
        draft=dict(num_layers=1, block_size=BLOCK_SIZE, mask_token_id=MASK_TOKEN),
        prompts=dict(
            synthetic=24, self_generated=dict(count=20, max_tokens=48), max_tokens=160
        ),
        generation=dict(
            passes=[dict(temperature=0.0), dict(temperature=0.7, share=0.5)],
            max_tokens=64,
            min_p=0.05,
            batch_size=16,
            shard_size=4,
            # Less than that many prompts, so that some have to wait for their prefill.
            engine_args=dict(max_num_batched_tokens=400, **gpu_memory()),
        ),
        evaluation=dict(limit=4, max_tokens=8),
        work_dir=str(folder),
        target_dtype="float32",
    )
    config = folder.with_suffix(".yaml")
    config.write_text(json.dumps(options))
    command = [sys.executable, str(ROOT / "scripts/train_draft.py")]
    command += ["--config", str(config), "--stages", "prompts,generate"]
    # With the runner that vLLM picks, as in a run that nobody tests.
    unset = ["-u", "VLLM_USE_V2_MODEL_RUNNER", "-u", "VLLM_DFLASH_CPU"]
    return ["env", *unset, "VLLM_PLUGINS=", *command]


def speaking_target(folder: Path) -> str:
    """A target with a tokenizer, many of whose tokens end an answer."""
    # Otherwise no own prompt would have an end.
    target = write_target(folder, eos_token_id=[2, *range(300, 330)])
    write_tokenizer(target)
    return target


def written(folder: Path) -> dict[str, bytes]:
    """The prompts and answers of a run."""
    return {path.name: path.read_bytes() for path in (folder / "data").glob("*.jsonl")}


def engine_process(parent: int, index: int) -> psutil.Process | None:
    for child in psutil.Process(parent).children(recursive=True):
        if f"--engine={index}" in child.cmdline():
            return child
    return None


def test_two_engines_write_what_one_does_also_when_one_is_killed(tmp_path):
    target = speaking_target(tmp_path / "target")
    folders = [tmp_path / "one", tmp_path / "two"]
    one, two = (generation_run(folder, target) for folder in folders)
    subprocess.run(one, check=True, timeout=200)
    engines = [*two, "--set", "generation.engines=2"]
    first = subprocess.Popen(engines, stderr=subprocess.PIPE, text=True)
    # A shard of the second engine.
    mine = folders[1] / "data/responses-00000-1.jsonl"
    while not mine.exists():
        assert first.poll() is None
        time.sleep(0.01)
    engine_process(first.pid, 1).kill()
    _, log = first.communicate(timeout=60)
    assert first.returncode == 2
    assert "error: engine 1 ended with exit code -9" in log
    expected, found = map(written, folders)
    if len(found) == len(expected):
        # It had written everything before it was killed: one shard is missing then too.
        mine.unlink()
    subprocess.run(engines, check=True, timeout=200)
    assert written(folders[1]) == expected
    rows = [row for name in expected for row in expected[name].splitlines()]
    assert len(set(rows)) > 60


def test_answers_made_with_a_draft_are_those_without(tmp_path, tiny_draft):
    """Greedy, with seeds and min_p; a folder that was begun without goes on with it."""
    target = speaking_target(tmp_path / "target")
    command = generation_run(tmp_path / "run", target)
    # Both with the runner that trees need: a seed means another noise in vLLM's other.
    runner = ["VLLM_DFLASH_CPU=1", "VLLM_PLUGINS=dflash,dflash_cpu"]
    at = command.index("VLLM_PLUGINS=")
    plain = [*command[:at], *runner, *command[at + 1 :]]
    subprocess.run(plain, check=True, timeout=300)
    expected = written(tmp_path / "run")
    names = sorted(name for name in expected if name != "prompts.jsonl")
    assert len(names) > 10
    for name in [*names[::2], "self.jsonl"]:
        (tmp_path / "run/data" / name).unlink(missing_ok=True)
    # As from a shell without any of it.
    drafts = [*command, "--set", "generation.engines=2"]
    drafts += ["--set", f"generation.speculative={{model: {tiny_draft}, nodes: 8}}"]
    drafts[drafts.index("VLLM_PLUGINS=")] = "VLLM_LOGGING_LEVEL=INFO"
    done = subprocess.run(drafts, stderr=subprocess.PIPE, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "verifies every DFlash block as a tree: depth 7, budget 8" in done.stderr
    assert written(tmp_path / "run") == expected


def grown_draft(folder: Path, target: str, draft: str) -> str:
    """A draft with a third layer that has learnt something."""
    config = tiny_config(folder, draft, learning_rate=3e-3)
    more = dataclasses.replace(config.draft, num_layers=DRAFT_LAYERS + 1)
    config = dataclasses.replace(config, draft=more)
    training = trainer(config, load_target(target), random_rows(12))
    training.train(None)
    training.export(folder / "draft")
    return str(folder / "draft")


@pytest.mark.parametrize("kind", ["chain", "tree", "grown"])
def test_training_forward_gives_the_logits_that_are_served(
    tiny_target, tiny_draft, prompts, tmp_path, kind
):
    if kind == "grown":
        tiny_draft = grown_draft(tmp_path / "grown", tiny_target, tiny_draft)
    config = chain_config(tiny_draft) if kind == "chain" else tree_config(tiny_draft)
    with engine(tiny_target, config) as llm:
        records = record_drafts(llm)
        generate(llm, prompts, params(MAX_TOKENS))
    assert len(records) > len(prompts)
    target = load_target(tiny_target)
    rows = [(prompt, [11, 12, 13, 14, 15]) for prompt in prompts]
    training = trainer(tiny_config(tmp_path, tiny_draft), target, rows)
    for context, record in records.items():
        expected = training_logits(training, context)
        torch.testing.assert_close(
            record.logits.float(), expected, atol=LOGITS_ATOL, rtol=LOGITS_ATOL
        )


@pytest.mark.parametrize("fault", ["layer", "anchor_in_context", "position"])
def test_the_comparison_notices_a_fault(
    tiny_target, tiny_draft, tmp_path, fault, monkeypatch
):
    target = load_target(tiny_target)
    rows = [(list(range(20, 40)), [11, 12, 13, 14, 15])]
    training = trainer(tiny_config(tmp_path, tiny_draft), target, rows)
    context = tuple(range(20, 50))
    right = training_logits(training, context)
    forward = training.forward
    if fault == "layer":
        features = target.features
        monkeypatch.setattr(
            target, "features", lambda t, ids: features(t, tuple(i + 1 for i in ids))
        )
    elif fault == "anchor_in_context":
        prepare = forward.attention.prepare
        monkeypatch.setattr(
            forward.attention, "prepare", lambda a, n: prepare(a + 1, n)
        )
    else:
        module = forward.module
        monkeypatch.setattr(
            forward,
            "module",
            lambda f, e, a, attend, mask: module(f, e, a + 1, attend, mask),
        )
    wrong = training_logits(training, context)
    assert (wrong - right).abs().max() > 1000 * LOGITS_ATOL


def test_training_raises_the_acceptance_of_the_engine(
    tiny_target, tiny_draft, prompts, tmp_path
):
    """Overfitted on the target's own answers, exported, served as chain and tree."""
    prompts = prompts[:3]
    rows = tiny_responses(tiny_target, prompts, MAX_TOKENS + 1)
    config = tiny_config(
        tmp_path,
        tiny_draft,
        steps=150,
        max_length=128,
        sequences_per_batch=3,
        anchors_per_sequence=24,
        learning_rate=3e-3,
        log_every=150,
    )
    training = trainer(config, load_target(tiny_target), rows)
    before = training._evaluate(Responses(rows))["heldout"]
    first = training.train_step(1e-3)["loss"]
    training.train(None)
    after = training._evaluate(Responses(rows))["heldout"]
    last = training.train_step(0.0)["loss"]
    assert last < first / 4
    assert after["chain_walk"] > before["chain_walk"] + 1
    assert after["tree_walk"] >= after["chain_walk"]
    trained = tmp_path / "trained"
    training.export(trained)

    def serve(speculative_config):
        with engine(tiny_target, speculative_config) as llm:
            answers = token_ids(generate(llm, prompts, params(MAX_TOKENS + 1)))
            rounds, accepted = acceptance_counts(llm)
        assert answers == [answer for _, answer in rows]
        return 1 + accepted / rounds

    untrained = serve(chain_config(tiny_draft))
    chain = serve(chain_config(str(trained)))
    tree = serve(tree_config(str(trained)))
    assert chain > untrained + 1
    assert tree >= chain
    # The proxy counts what the engine does: no round is cut short but the last ones.
    assert chain == pytest.approx(after["chain_walk"], rel=0.15)
