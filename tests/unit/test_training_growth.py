# SPDX-License-Identifier: Apache-2.0
"""A draft with more layers computes the same, and then learns."""

import dataclasses
import json
import math
from types import SimpleNamespace

import pytest
import torch
from tiny_models import DRAFT_LAYERS, write_draft, write_target
from training_runs import load_target, random_rows, tiny_config, trainer

from vllm_dflash_training.blocks import draw_anchors
from vllm_dflash_training.checkpoint import draft_folder as draft_folder_of
from vllm_dflash_training.draft import DFlashDraft
from vllm_dflash_training.draft_shape import shape_from_config
from vllm_dflash_training.growth import grow


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return load_target(write_target(tmp_path_factory.mktemp("target")))


@pytest.fixture(scope="module")
def draft_folder(tmp_path_factory) -> str:
    return write_draft(
        tmp_path_factory.mktemp("draft"),
        layer_types=["full_attention"] * DRAFT_LAYERS,
        max_window_layers=DRAFT_LAYERS,
    )


def make(tmp_path, target, draft: str, num_layers: int | None, **options):
    config = tiny_config(tmp_path, draft, **options)
    config = dataclasses.replace(
        config, draft=dataclasses.replace(config.draft, num_layers=num_layers)
    )
    return trainer(config, target, random_rows(20))


def logits_of(training) -> torch.Tensor:
    batch, generator = training.batches.get(0)
    anchors, _ = draw_anchors(batch, 6, generator)
    with torch.no_grad():
        hidden, _ = training.forward.hidden(batch, anchors)
        return training.forward.logits(hidden)


@pytest.mark.parametrize("num_layers", [3, 5])
def test_a_grown_draft_computes_the_same(tmp_path, target, draft_folder, num_layers):
    plain = make(tmp_path / "plain", target, draft_folder, None)
    grown = make(tmp_path / "grown", target, draft_folder, num_layers)
    assert len(grown.draft.layers) == num_layers
    expected = logits_of(plain)
    assert torch.equal(logits_of(grown), expected)
    # Every new layer takes part: it is only its projections that are zero.
    for layer in grown.draft.layers[DRAFT_LAYERS:]:
        with torch.no_grad():
            layer.self_attn.o_proj.weight.fill_(0.1)
        assert not torch.equal(logits_of(grown), expected)
        with torch.no_grad():
            layer.self_attn.o_proj.weight.zero_()
        assert layer.mlp.gate_proj.weight.std() > 0.1


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_new_layers_are_trained(tmp_path, target, draft_folder, optimizer):
    options = dict(optimizer=optimizer, learning_rate=1e-3, steps=4, weight_decay=0.0)
    training = make(tmp_path, target, draft_folder, DRAFT_LAYERS + 1, **options)
    before = {n: w.clone() for n, w in training.average.named().items()}
    training.train_step(1e-3)
    new = f"layers.{DRAFT_LAYERS}."
    # Behind a zero projection nothing has a gradient yet.
    moved = {
        name.removeprefix(new)
        for name, weight in training.average.named().items()
        if name.startswith(new) and not torch.equal(weight, before[name])
    }
    assert moved == {"self_attn.o_proj.weight", "mlp.down_proj.weight"}
    for _ in range(3):
        training.train_step(1e-3)
    after = training.average.named()
    for name, weight in after.items():
        assert weight.isfinite().all(), name
        assert not torch.equal(weight, before[name]), name


def test_the_exported_config_names_all_layers_and_goes_on(
    tmp_path, target, draft_folder
):
    grown = make(tmp_path / "grown", target, draft_folder, 3)
    folder = tmp_path / "out"
    grown.export(folder)
    config = json.loads((folder / "config.json").read_text())
    assert config["num_hidden_layers"] == config["max_window_layers"] == 3
    assert config["layer_types"] == ["full_attention"] * 3
    again = make(tmp_path / "again", target, str(folder), 3)
    assert torch.equal(logits_of(again), logits_of(grown))
    # The number is that of the draft which it starts from, if none is named.
    assert len(make(tmp_path / "third", target, str(folder), None).draft.layers) == 3


def test_fewer_layers_are_refused_by_name(tmp_path, target, draft_folder):
    with pytest.raises(ValueError, match=r"draft.num_layers is less .*got 1, it has 2"):
        make(tmp_path, target, draft_folder, 1)


def test_new_layers_are_copies_of_the_last_ones_in_order():
    weights = {
        f"layers.{i}.{name}.weight": torch.full((2,), float(i + 1))
        for i in range(3)
        for name in ("self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj")
    }
    config = {"num_hidden_layers": 3}
    found, grown = grow(config, weights, 8)
    assert found == {"num_hidden_layers": 8}
    assert config == {"num_hidden_layers": 3}
    values = [float(grown[f"layers.{i}.self_attn.q_proj.weight"][0]) for i in range(8)]
    assert values == [1, 2, 3, 2, 3, 1, 2, 3]
    assert len(weights) == 9 and len(grown) == 24
    for name, weight in grown.items():
        is_new = int(name.split(".")[1]) >= 3
        assert bool(weight.any()) != (is_new and "q_proj" not in name), name


def test_the_embedded_draft_with_a_sixth_layer_stays_small():
    folder = draft_folder_of("embedded")
    config = json.loads((folder / "config.json").read_text())
    config, _ = grow(config, {}, 6)
    target = SimpleNamespace(hidden_size=576, vocab_size=49152, num_hidden_layers=30)
    with torch.device("meta"):
        draft = DFlashDraft(shape_from_config(config, target))
    num_bytes = 2 * sum(math.prod(p.shape) for p in draft.parameters())
    assert 45e6 < num_bytes < 48e6
