# SPDX-License-Identifier: Apache-2.0
"""Prompts, held-out check, shards, anchors, batches, configs, pieces."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from training_runs import ROOT, random_rows

from vllm_dflash_training.blocks import block_tokens, draw_anchors, make_blocks
from vllm_dflash_training.config import (
    PromptOptions,
    SpeculativeOptions,
    load_config,
)
from vllm_dflash_training.data import Batches, Responses, load_responses
from vllm_dflash_training.draft_shape import spread_layers
from vllm_dflash_training.heldout import HeldOut, prompt_hash
from vllm_dflash_training.pieces import join, split
from vllm_dflash_training.prompts import collect_prompts, synthetic_prompts
from vllm_dflash_training.shards import require_same_run, write_rows

HELD_OUT = ROOT / "evals/prompts/heldout.jsonl"
CONFIGS = sorted((ROOT / "training/configs").glob("*.yaml"))


@pytest.fixture(scope="module")
def heldout() -> HeldOut:
    return HeldOut(HELD_OUT)


def ask(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def write_jsonl(path: Path, rows: list) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_prompts_are_the_same_for_a_seed_and_all_different(heldout):
    rows = synthetic_prompts(500, 7, heldout)
    assert rows == synthetic_prompts(500, 7, heldout)
    assert rows != synthetic_prompts(500, 8, heldout)
    assert len({row["hash"] for row in rows}) == 500
    assert {row["kind"] for row in rows} == {"chat", "code", "arithmetic", "summarise"}
    assert not heldout.hashes & {row["hash"] for row in rows}


def test_more_prompts_than_the_material_gives_are_refused(heldout, monkeypatch):
    monkeypatch.setattr("vllm_dflash_training.prompts.KINDS", {"code": 1.0})
    with pytest.raises(ValueError, match="more than material.yaml gives .*Type"):
        synthetic_prompts(1_000_000, 0, heldout)


@pytest.mark.parametrize("change", ["same", "case", "system"])
def test_a_file_with_a_held_out_prompt_is_refused(tmp_path, heldout, change):
    leaked = heldout.rows[5]["messages"]
    if change == "case":
        leaked = ask("  " + leaked[-1]["content"].upper().replace(" ", "  ") + "!!")
    elif change == "system":
        leaked = [{"role": "system", "content": "Be brief."}, *leaked]
    file = write_jsonl(tmp_path / "p.jsonl", [{"messages": leaked}])
    with pytest.raises(ValueError, match="1 of the 50 held-out prompts"):
        collect_prompts(PromptOptions(files=[file]), 0, heldout)


def test_prompts_that_are_none_are_refused(tmp_path, heldout):
    file = write_jsonl(tmp_path / "p.jsonl", [{"messages": ask("Why?")}, {"text": "a"}])
    with pytest.raises(ValueError, match="line 2 of .* is no prompt"):
        collect_prompts(PromptOptions(files=[file]), 0, heldout)
    with pytest.raises(ValueError, match="can't be read"):
        collect_prompts(PromptOptions(files=["no/such.jsonl"]), 0, heldout)


def test_several_turns_in_files_are_told_apart(tmp_path, heldout):
    def file(name: str, conversations: list) -> str:
        rows = [{"messages": messages} for messages in conversations]
        return write_jsonl(tmp_path / name, rows)

    def reply(text: str) -> dict[str, str]:
        return {"role": "assistant", "content": text}

    talks = [[*ask(f"Name {i}."), reply("A."), *ask("Shorter.")] for i in (1, 2, 1)]
    options = PromptOptions(files=[file("a.jsonl", talks)])
    found = collect_prompts(options, 0, heldout)
    assert len(found) == 2
    leaked = [*ask("Hello."), reply("Hi."), heldout.rows[3]["messages"][-1]]
    options = PromptOptions(files=[file("b.jsonl", [leaked])])
    with pytest.raises(ValueError, match="held-out"):
        collect_prompts(options, 0, heldout)


def test_responses_to_a_held_out_prompt_are_refused(tmp_path, heldout):
    row = dict(prompt=[1, 2], response=[3] * 9, kind="x", temperature=0.0)
    good = {**row, "hash": prompt_hash(ask("What is new?"))}
    write_rows(tmp_path / "responses-00000-0.jsonl", [good])
    assert len(load_responses([tmp_path], 64, heldout)) == 1
    bad = {**row, "hash": prompt_hash(heldout.rows[0]["messages"])}
    write_rows(tmp_path / "responses-00001-0.jsonl", [bad])
    with pytest.raises(ValueError, match="held-out"):
        load_responses([tmp_path], 64, heldout)


def test_files_of_the_repository_hold_no_held_out_prompt(heldout):
    for config in map(load_config, CONFIGS):
        names = [n for n in config.prompts.files if (ROOT / n).exists()]
        rows = collect_prompts(PromptOptions(files=names), 0, heldout)
        assert len(rows) >= len(names)


def test_long_responses_are_cut_and_empty_ones_left_out(tmp_path, heldout):
    rows = [
        dict(prompt=[1] * 4, response=[2] * 30, hash="a"),
        dict(prompt=[1] * 4, response=[2] * 3, hash="b"),
        dict(prompt=[1] * 14, response=[2] * 30, hash="c"),
    ]
    write_rows(tmp_path / "responses-00000-0.jsonl", rows)
    responses = load_responses([tmp_path], 16, heldout)
    assert responses.lens.tolist() == [16]
    assert responses.num_response_tokens == 12


def test_an_empty_folder_is_refused(tmp_path, heldout):
    with pytest.raises(ValueError, match="nothing to train on .*--stages"):
        load_responses([tmp_path], 16, heldout)


def test_a_folder_goes_on_only_with_what_it_was_begun_with(tmp_path):
    path = tmp_path / "facts.json"
    require_same_run(path, {"seed": 1, "passes": (1, 2)})
    require_same_run(path, {"seed": 1, "passes": (1, 2)})
    with pytest.raises(ValueError, match="another config: seed .*got seed 2"):
        require_same_run(path, {"seed": 2, "passes": (1, 2)})


def test_an_interrupted_shard_is_not_there(tmp_path):
    def rows():
        yield {"a": 1}
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_rows(tmp_path / "responses-0.jsonl", rows())
    assert not list(tmp_path.glob("*.jsonl"))


def test_anchors_lie_in_the_response_and_have_something_to_predict():
    responses = Responses(random_rows(40))
    batch = responses.batch(range(40), 8)
    anchors, is_used = draw_anchors(batch, 10, torch.Generator().manual_seed(0))
    blocks = make_blocks(batch, anchors, is_used, 7)
    tokens = block_tokens(batch, anchors, 8, 5)
    for seq in range(40):
        prompt, length = int(batch.prompt_lens[seq]), int(batch.lens[seq])
        used = anchors[seq][is_used[seq]].tolist()
        assert len(used) == len(set(used)) == min(10, length - prompt - 1)
        assert used == sorted(used)
        assert all(prompt <= a < length - 1 for a in used)
        assert anchors[seq].tolist() == sorted(anchors[seq].tolist())
        for block, anchor in enumerate(anchors[seq].tolist()):
            sequence = batch.tokens[seq, :length].tolist()
            assert tokens[seq, block].tolist() == [sequence[anchor], *[5] * 7]
            valid = blocks.is_valid[seq, block]
            labels = blocks.labels[seq, block][valid].tolist()
            if is_used[seq, block]:
                assert labels == sequence[anchor + 1 : anchor + 8]
            else:
                assert not labels


def test_every_anchor_is_drawn_at_times():
    responses = Responses([([1] * 5, [2] * 12)])
    batch = responses.batch([0], 8)
    generator = torch.Generator().manual_seed(0)
    seen = {draw_anchors(batch, 1, generator)[0].item() for _ in range(300)}
    assert seen == set(range(5, 16))


def test_batches_depend_on_seed_and_number_alone():
    responses = Responses(random_rows(23))
    one, other = Batches(responses, 4, 1), Batches(responses, 4, 1)
    assert one.per_epoch == 5
    for number in (0, 7, 3, 12):
        first, generator = one.get(number)
        second, again = other.get(number)
        assert torch.equal(first.tokens, second.tokens)
        assert torch.equal(
            torch.rand(3, generator=generator), torch.rand(3, generator=again)
        )
    assert not torch.equal(one.get(0)[0].tokens, one.get(1)[0].tokens)
    # An epoch shows no sequence twice.
    groups = [one._shuffle(4).flatten().tolist() for _ in range(2)]
    assert groups[0] == groups[1] and len(set(groups[0])) == 20


def test_batches_are_what_was_stored():
    rows = random_rows(9)
    responses = Responses(rows)
    batch = responses.batch(np.array([4, 2]), 16)
    assert batch.tokens.shape[1] % 16 == 0
    for row, index in enumerate((4, 2)):
        prompt, response = rows[index]
        assert int(batch.prompt_lens[row]) == len(prompt)
        stored = batch.tokens[row, : int(batch.lens[row])].tolist()
        assert stored == prompt + response


@pytest.mark.parametrize(
    ("num_layers", "expected"),
    [(30, [1, 8, 14, 20, 27]), (36, [1, 9, 17, 25, 33]), (32, [1, 8, 15, 22, 29])],
)
def test_layers_spread_as_published_drafts_have_them(num_layers, expected):
    assert spread_layers(num_layers, 5) == expected


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_configs_of_the_repository_load(path):
    assert load_config(path).training.steps > 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("work_dir: x\ntrainig: {}", r"trainig is wrong .*Allowed: .*training"),
        ("target: embedded", "work_dir is wrong"),
        ("work_dir: x\ntraining: {steps: many}", "training.steps is wrong"),
        ("work_dir: x\ntraining: {steps: 0}", "more than 0"),
        ("work_dir: x\ntraining: {steps: true}", "training.steps is wrong"),
        ("work_dir: x\nloss: {kind: mse}", "Allowed: ce, ce_decay"),
        ("work_dir: x\ngeneration: {engines: 0}", "engines is wrong .*more than 0"),
        (
            "work_dir: x\ndraft: {init_from: embedded}\n"
            "generation: {backend: transformers, engines: 2}",
            "engines is wrong .*1 with generation.backend: transformers",
        ),
        ("work_dir: x", "draft.mask_token_id is wrong"),
        (
            "work_dir: x\ndraft: {init_from: embedded, num_layers: 0}",
            "draft.num_layers is wrong .*more than 0",
        ),
        (
            "work_dir: x\ndraft: {init_from: embedded}\n"
            "generation: {backend: transformers, speculative: true}",
            "speculative is wrong .*false with backend: transformers",
        ),
        (
            "work_dir: x\ndraft: {mask_token_id: 4}\ngeneration: {speculative: true}",
            "speculative.model is wrong .*the folder of a draft",
        ),
        (
            "work_dir: x\ndraft: {init_from: embedded}\ngeneration: {speculative: "
            "true, engine_args: {speculative_config: {method: ngram}}}",
            "speculative_config is wrong .*generation.speculative in its place",
        ),
        (
            "work_dir: x\ndraft: {init_from: embedded}\n"
            "generation: {speculative: {nodes: 256}}",
            "speculative.nodes is wrong .*1 to 255",
        ),
        (
            "work_dir: x\ndraft: {init_from: embedded}\n"
            "generation: {speculative: {nodes: 7, depth: 8}}",
            "speculative.depth is wrong .*1 to 7",
        ),
        (
            "work_dir: x\ndraft: {init_from: embedded}\n"
            "generation: {speculative: fast}",
            "speculative is wrong .*the keys model, nodes, depth",
        ),
        ("- 1", "work_dir is wrong"),
        ("a: [", "can't be read"),
    ],
)
def test_wrong_configs_are_refused_with_what_is_allowed(tmp_path, text, message):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        load_config(path)


def test_values_can_be_changed_on_the_command_line():
    path = ROOT / "training/configs/embedded.yaml"
    config = load_config(path, ["loss.kind=distill", "training.learning_rate=1e-5"])
    assert config.loss.kind == "distill"
    assert config.training.learning_rate == 1e-5
    with pytest.raises(ValueError, match="section.key=value"):
        load_config(path, ["loss"])


def test_a_section_that_may_be_left_out_is_a_switch():
    path = ROOT / "training/configs/embedded.yaml"

    def speculative(*words: str):
        overrides = [f"generation.speculative{word}" for word in words]
        return load_config(path, overrides).generation.speculative

    assert speculative() is None
    assert speculative("=true") == SpeculativeOptions()
    assert speculative("=true", "=false") is None
    assert speculative("=null") is None
    assert speculative("=true", ".nodes=7") == SpeculativeOptions(nodes=7)
    assert speculative("={model: x, depth: 3}") == SpeculativeOptions("x", depth=3)


def test_pieces_make_the_file_again(tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_bytes(bytes(range(256)) * 10)
    pieces = split(file, tmp_path / "pieces", 1000)
    assert [p.stat().st_size for p in pieces[:-1]] == [1000, 1000, 560]
    back = join(pieces[-1], tmp_path / "back")
    assert back.read_bytes() == file.read_bytes()
    pieces[1].write_bytes(b"x" * 1000)
    with pytest.raises(ValueError, match="SHA-256"):
        join(pieces[-1], tmp_path / "back")
    pieces[1].unlink()
    with pytest.raises(ValueError, match="missing are model.safetensors.part01"):
        join(pieces[-1], tmp_path / "back")
