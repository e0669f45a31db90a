# SPDX-License-Identifier: Apache-2.0
"""The loop: interruptions, several processes, trees of the product."""

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import BLOCK_SIZE, MASK_TOKEN, write_draft, write_target
from tiny_tokenizer import write_tokenizer
from training_runs import (
    ROOT,
    load_target,
    random_rows,
    tiny_config,
    tiny_responses,
    trainer,
)

from vllm_dflash_kernels.topk_logprobs import topk_logprobs
from vllm_dflash_kernels.tree_build import build_tree
from vllm_dflash_kernels.tree_walk import walk_tree
from vllm_dflash_training.acceptance import block_acceptance, walk
from vllm_dflash_training.blocks import draw_anchors, make_blocks
from vllm_dflash_training.checkpoint import draft_folder as draft_folder_of
from vllm_dflash_training.cli import main
from vllm_dflash_training.config import DraftOptions, LossOptions
from vllm_dflash_training.data import Responses
from vllm_dflash_training.draft import DFlashDraft
from vllm_dflash_training.draft_shape import new_draft_config, shape_from_config
from vllm_dflash_training.optimiser import learning_rate

STEPS = 6


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory) -> str:
    folder = write_target(tmp_path_factory.mktemp("target"))
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def draft_folder(tmp_path_factory) -> str:
    return write_draft(tmp_path_factory.mktemp("draft"))


def weights_of(training) -> dict[str, torch.Tensor]:
    return {n: w.clone() for n, w in training.average.named().items()}


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("kind", ["ce_decay", "ce_reach", "distill"])
def test_an_interrupted_training_gives_the_weights_of_a_whole_one(
    tmp_path, target_folder, draft_folder, optimizer, kind
):
    target = load_target(target_folder)

    def start(folder: str):
        options = dict(optimizer=optimizer, ema_decay=0.9, accumulation=2)
        config = tiny_config(tmp_path / folder, draft_folder, **options)
        config = dataclasses.replace(config, loss=LossOptions(kind=kind, top_k=4))
        return trainer(config, target, random_rows(20))

    whole = start("whole")
    assert whole.train(None)
    first = start("parts")
    step = first.train_step

    def stopping_step(rate: float):
        result = step(rate)
        if first.step == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return result

    first.train_step = stopping_step
    assert not first.train(None)
    assert first.step == 3
    second = start("parts")
    assert second.resume()
    assert second.train(None)
    assert second.step == STEPS
    assert any(
        not torch.equal(weight, weights_of(first)[name])
        for name, weight in weights_of(second).items()
    )
    for name, weight in weights_of(whole).items():
        assert torch.equal(weight, weights_of(second)[name]), name


def test_the_teacher_of_a_label_is_the_target_one_token_before(tmp_path, target_folder):
    prompts = [prompt for prompt, _ in random_rows(6)]
    rows = tiny_responses(target_folder, prompts, 20)
    config = tiny_config(tmp_path, None)
    config = dataclasses.replace(config, loss=LossOptions(kind="distill", top_k=3))
    training = trainer(config, load_target(target_folder), rows)
    batch, generator = training.batches.get(0)
    anchors, is_used = draw_anchors(batch, 6, generator)
    blocks = make_blocks(batch, anchors, is_used, BLOCK_SIZE - 1)
    _, final = training.forward.hidden(batch, anchors)
    chosen = blocks.is_valid.flatten().nonzero()[:, 0]
    teacher = training._teacher(final, blocks, chosen)
    # The answers are greedy, so the label is the teacher's first token.
    assert torch.equal(teacher.tokens[:, 0], blocks.labels.flatten()[chosen])
    assert (teacher.probs[:, 0] >= teacher.probs[:, 1]).all()


_TWO = """
import sys, torch
sys.path[:0] = {paths!r}
import training_runs as runs
from vllm_dflash_training.distributed import world
from vllm_dflash_training.data import Responses
from vllm_dflash_training.trainer import Trainer
from pathlib import Path
with world() as this:
    config = runs.tiny_config(Path({work!r}), {draft!r}, steps=3)
    config.folder().mkdir(parents=True, exist_ok=True)
    target = runs.load_target({target!r})
    one = Trainer(config, target, Responses(runs.random_rows(20)), this)
    assert one.train(None)
"""


@pytest.mark.slow
def test_two_processes_train_as_one_with_twice_the_batches(
    tmp_path, target_folder, draft_folder
):
    config = tiny_config(tmp_path / "one", draft_folder, steps=3, accumulation=2)
    one = trainer(config, load_target(target_folder), random_rows(20))
    one.train(None)
    paths = [str(ROOT / p) for p in ("tests/helpers", "training", "kernels", "")]
    work = str(tmp_path / "two")
    code = _TWO.format(paths=paths, work=work, draft=draft_folder, target=target_folder)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    launch = dict(WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    both = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env={**os.environ, **launch, "RANK": str(i), "LOCAL_RANK": str(i)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    for process in both:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors[-2000:]
    state = torch.load(tmp_path / "two/state/state.pt", weights_only=True)
    for name, weight in weights_of(one).items():
        # The sums of two processes are rounded in another order.
        torch.testing.assert_close(state["draft"][name], weight, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("budget", [7, 16, 47])
def test_accepted_lengths_are_those_of_the_products_build_and_walk(budget):
    generator = torch.Generator().manual_seed(budget)
    num, depth, vocab, children = 12, 7, 60, 4
    logits = torch.randn(num, depth, vocab, generator=generator) * 2
    # Labels among the best tokens, so that deep paths off the first branch occur.
    ranks = torch.randint(0, 5, (num, depth), generator=generator)
    order = logits.argsort(-1, descending=True)
    labels = order.gather(-1, ranks[..., None])[..., 0]
    is_valid = torch.ones(num, depth, dtype=torch.bool)
    is_valid[0, 3:] = False
    got = block_acceptance(logits, labels, is_valid, budget, children)
    width, slots = budget + 1, torch.arange(num)
    tokens, logprobs = topk_logprobs(logits.view(-1, vocab), children)
    parents = torch.zeros(num, width, dtype=torch.int32)
    depths, num_nodes = torch.zeros_like(parents), torch.zeros(num, dtype=torch.int32)
    ancestors = torch.zeros(num, width, 1, dtype=torch.int64)
    drafts = torch.zeros(num, budget, dtype=torch.int64)
    build_tree(
        tokens,
        logprobs,
        slots.repeat_interleave(depth),
        num_reqs=num,
        depth=depth,
        parents=parents,
        depths=depths,
        ancestors=ancestors,
        num_nodes=num_nodes,
        chain_only=torch.zeros(num, dtype=torch.uint8),
        draft_tokens=drafts,
    )
    nodes = torch.cat([torch.zeros(num, 1, dtype=torch.int64), drafts], 1)
    # The target's token at a node of depth d is label d + 1, if that path is right.
    ends = labels.masked_fill(~is_valid, -1)
    ends = torch.cat([ends, torch.full((num, 1), -1)], 1)
    wanted = ends.gather(1, depths.long())
    sampled = torch.zeros(num, width, dtype=torch.int64)
    num_sampled = torch.zeros(num, dtype=torch.int32)
    path = torch.zeros(num, depth + 1, dtype=torch.int32)
    walk_tree(
        wanted.flatten(),
        nodes.flatten().int(),
        torch.arange(0, num * width + 1, width, dtype=torch.int32),
        slots,
        parents=parents,
        tree_len=num_nodes,
        num_reqs=num,
        sampled=sampled,
        num_sampled=num_sampled,
        path=path,
    )
    assert got.tree.tolist() == (num_sampled - 1).tolist()
    assert (got.tree > got.chain).any()
    greedy = (order[..., 0] == labels) & is_valid
    assert torch.equal(got.is_match, greedy)


def test_a_walk_skips_what_a_round_has_committed():
    # From anchor 0: 2 accepted and the bonus; anchor 3: none; anchor 4: one; end.
    assert walk([2, 9, 9, 0, 1, 9]) == (6, 3)
    assert walk([]) == (0, 0)


def test_learning_rate_rises_and_falls():
    options = tiny_config(ROOT, None, learning_rate=1.0, warmup=0.1).training
    assert learning_rate(0.05, options) == pytest.approx(0.5)
    assert learning_rate(0.1, options) == pytest.approx(1.0)
    assert learning_rate(0.55, options) == pytest.approx(0.505)
    assert learning_rate(1.0, options) == pytest.approx(0.01)


def test_a_time_limit_ends_the_rate_and_start_up_does_not_count(
    tmp_path, target_folder, draft_folder, monkeypatch
):
    clock = iter(range(0, 10_000, 10))
    monkeypatch.setattr(
        "vllm_dflash_training.trainer.time.perf_counter", clock.__next__
    )
    config = tiny_config(tmp_path, draft_folder, steps=1000, time_limit_s=200.0)
    training = trainer(config, load_target(target_folder), random_rows(20))
    rates = []
    step = training.train_step

    def noting_step(rate: float):
        rates.append(rate)
        return step(rate)

    training.train_step = noting_step
    assert training.train(None)
    assert 5 < training.step < 25
    assert training.start_up_s == 20
    assert rates[0] < rates[2] and rates[1] < rates[2]
    assert rates[2:] == sorted(rates[2:], reverse=True)
    assert rates[-1] < 0.1 * config.training.learning_rate


def test_the_command_makes_a_draft_and_goes_on_where_it_was(
    tmp_path, target_folder, capsys
):
    config = tmp_path / "run.yaml"
    work = tmp_path / "run"
    config.write_text(
        json.dumps(
            dict(
                work_dir=str(work),
                target=target_folder,
                export_dtype="float32",
                draft=dict(num_layers=1, block_size=BLOCK_SIZE, mask_token_id=5),
                prompts=dict(synthetic=12, self_generated=dict(count=6, max_tokens=9)),
                generation=dict(
                    backend="transformers",
                    max_tokens=12,
                    shard_size=8,
                    passes=[dict(temperature=0.0), dict(temperature=0.8, share=0.5)],
                ),
                training=dict(
                    steps=4,
                    max_length=512,
                    sequences_per_batch=4,
                    anchors_per_sequence=4,
                    loss_chunk=64,
                    log_every=2,
                    evaluate_every=2,
                    probe_blocks=2,
                ),
                evaluation=dict(limit=2, max_tokens=8, engine_budgets=[]),
            )
        )
    )
    stages = ["--stages", "prompts,generate"]
    assert main(["--config", str(config), *stages]) == 0
    shards = sorted((work / "data").glob("responses-*.jsonl"))
    assert len(shards) >= 3
    texts = {path: path.read_text() for path in shards}
    shards[1].unlink()
    # Only the missing shard is made again, and it is the same.
    before = shards[0].stat().st_mtime_ns
    assert main(["--config", str(config), *stages]) == 0
    assert shards[0].stat().st_mtime_ns == before
    assert {path: path.read_text() for path in shards} == texts
    # With everything there, no model is loaded.
    capsys.readouterr()
    assert main(["--config", str(config), *stages]) == 0
    assert "all responses are there" in capsys.readouterr().err
    stop = ["--set", "training.time_limit_s=1e-6"]
    assert main(["--config", str(config), "--stages", "train", *stop]) == 0
    assert main(["--config", str(config)]) == 0
    draft = json.loads((work / "draft/config.json").read_text())
    assert draft["architectures"] == ["DFlashDraftModel"]
    assert draft["dflash_config"]["mask_token_id"] == MASK_TOKEN
    metrics = [json.loads(x) for x in (work / "metrics.jsonl").read_text().splitlines()]
    assert metrics[-1]["step"] == 4
    held = [row["heldout"] for row in metrics if "heldout" in row][-1]
    assert 1 <= held["chain_walk"] <= held["tree_walk"] <= BLOCK_SIZE
    assert len(held["match_by_depth"]) == BLOCK_SIZE - 1
    # Another loss or seed would mix two runs.
    command = ["--config", str(config), "--stages", "train"]
    assert main([*command, "--set", "loss.kind=ce"]) == 2
    assert "was begun otherwise: loss" in capsys.readouterr().err
    assert main(["--config", str(config), "--set", "seed=5"]) == 2
    assert "begun with another config: seed" in capsys.readouterr().err


def test_wrong_stages_and_files_end_with_a_message(tmp_path, capsys):
    path = ROOT / "training/configs/embedded.yaml"
    assert main(["--config", str(path), "--stages", "bake"]) == 2
    assert "Allowed: prompts, generate, train" in capsys.readouterr().err
    assert main(["--config", str(tmp_path / "none.yaml")]) == 2
    assert "can't be read" in capsys.readouterr().err


def test_drafts_that_cannot_be_trained_are_refused(tmp_path, target_folder):
    target = load_target(target_folder)
    wrong = write_draft(tmp_path / "d", layer_types=["sliding_attention"] * 2)
    with pytest.raises(ValueError, match="layer_types can't be trained here"):
        trainer(tiny_config(tmp_path / "w", wrong), target, random_rows(8))
    with pytest.raises(ValueError, match="draft.init_from can't be read"):
        config = tiny_config(tmp_path / "w", str(tmp_path / "nothing"))
        trainer(config, target, random_rows(8))


def test_the_embedded_draft_is_what_the_module_and_a_new_config_hold():
    folder = draft_folder_of("embedded")
    config = json.loads((folder / "config.json").read_text())
    target = SimpleNamespace(
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        vocab_size=49152,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        bos_token_id=1,
        eos_token_id=2,
    )
    shape = shape_from_config(config, target)
    weights = load_file(folder / "model.safetensors")
    module = {n: p.shape for n, p in DFlashDraft(shape).named_parameters()}
    assert module == {name: weight.shape for name, weight in weights.items()}
    new = new_draft_config(target, DraftOptions(mask_token_id=4))
    assert shape_from_config(new, target) == shape
    assert {k: config[k] for k in new} == new


def test_held_out_answers_never_take_part_in_training(target_folder, tmp_path):
    config = tiny_config(tmp_path, None, evaluate_every=2)
    training = trainer(config, load_target(target_folder), random_rows(12))
    training.train(Responses(random_rows(3, seed=9)))
    plain = trainer(
        tiny_config(tmp_path / "plain", None),
        load_target(target_folder),
        random_rows(12),
    )
    plain.train(None)
    for name, weight in weights_of(plain).items():
        assert torch.equal(weight, weights_of(training)[name]), name
