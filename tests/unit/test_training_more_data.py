# SPDX-License-Identifier: Apache-2.0
"""Training on the answers of several runs, and rows that are filled up."""

import dataclasses
import json
import re
import shutil

import pytest
import torch
from tiny_models import BLOCK_SIZE, write_draft, write_target
from tiny_tokenizer import write_tokenizer
from training_runs import load_target, random_rows, tiny_config, trainer

from vllm_dflash_training import losses
from vllm_dflash_training.cli import main
from vllm_dflash_training.config import LossOptions


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory) -> str:
    folder = write_target(tmp_path_factory.mktemp("target"))
    write_tokenizer(folder)
    return folder


def command(path, work, target, **more) -> list[str]:
    training = dict(steps=2, max_length=512, sequences_per_batch=4)
    training |= dict(anchors_per_sequence=4, loss_chunk=64, probe_blocks=2)
    words = dict(
        work_dir=str(work),
        target=target,
        draft=dict(num_layers=1, block_size=BLOCK_SIZE, mask_token_id=5),
        prompts=dict(synthetic=6),
        generation=dict(backend="transformers", max_tokens=8),
        training=training,
        evaluation=dict(limit=2, max_tokens=4),
    )
    path.write_text(json.dumps(words | more))
    return ["--config", str(path), "--stages"]


def test_answers_of_other_runs_are_trained_on_too(tmp_path, target_folder, capsys):
    run = command(tmp_path / "a.yaml", tmp_path / "a", target_folder)
    assert main([*run, "prompts,generate,train"]) == 0
    told = capsys.readouterr().err
    number = int(re.search(r"(\d+) responses, \d+ tokens", told)[1])
    assert number >= 6
    shutil.copytree(tmp_path / "a/data", tmp_path / "b/data")
    more = dict(more_data=[str(tmp_path / "a/data")])
    run = command(tmp_path / "b.yaml", tmp_path / "b", target_folder, **more)
    assert main([*run, "train"]) == 0
    assert f"{2 * number} responses, " in capsys.readouterr().err
    # A folder that isn't there, and answers of another target.
    assert main([*run, "train", "--set", f"more_data=[{tmp_path}/none]"]) == 2
    told = capsys.readouterr().err
    assert "more_data is no data folder of a run" in told
    assert "Type more_data with the data folder of a run for" in told
    (tmp_path / "a/data/facts.json").write_text('{"target": "some/other-model"}')
    assert main([*run, "train"]) == 2
    assert "more_data holds answers of another target" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["ce_decay", "ce_reach", "distill"])
def test_rows_that_fill_up_chunks_change_nothing(tmp_path, target_folder, kind):
    """A compiled loss gets whole chunks; here the same without compiling."""
    draft, target = write_draft(tmp_path / "draft"), load_target(target_folder)

    def weights(name: str, is_filled: bool) -> dict[str, torch.Tensor]:
        config = tiny_config(tmp_path / name, draft, loss_chunk=50)
        config = dataclasses.replace(config, loss=LossOptions(kind=kind, top_k=4))
        training = trainer(config, target, random_rows(9))
        sizes = set()

        def loss_rows(logits, *args):
            sizes.add(len(logits))
            return losses.loss_rows(logits, *args)

        training.loss_kernel = loss_rows
        training.forward.is_compiled = is_filled
        for _ in range(3):
            training.train_step(1e-2)
        assert (sizes == {50}) is is_filled
        return training.average.named()

    plain, filled = weights("plain", False), weights("filled", True)
    start = trainer(tiny_config(tmp_path / "start", draft), target, random_rows(9))
    assert any(
        not torch.equal(start.average.named()[name], weight)
        for name, weight in plain.items()
    )
    for name, weight in plain.items():
        torch.testing.assert_close(filled[name], weight, atol=1e-6, rtol=1e-5)
