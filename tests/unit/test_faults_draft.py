# SPDX-License-Identifier: Apache-2.0
"""Drafts that don't fit or are damaged are refused before anything is loaded.

Unlike a feature without trees, such a draft is no chain either, so it is refused with
and without the key `ddtree`; `"ddtree": false` leaves it to vLLM.
"""

import json
from pathlib import Path

import pytest
import torch
from front_end import build_config
from safetensors.torch import load_file, save_file
from tiny_models import (
    BLOCK_SIZE,
    HIDDEN_SIZE,
    MASK_TOKEN,
    VOCAB_SIZE,
    write_draft,
    write_speculators_draft,
    write_target,
)

from vllm_dflash.config import get_ddtree_config
from vllm_dflash.draft_weights import expected_shapes

WEIGHTS = "model.safetensors"
ABSENT = object()


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> str:
    return write_target(tmp_path_factory.mktemp("fault_target"))


def spec(draft: str, **words) -> dict:
    return dict(method="dflash", model=draft, **words)


def refusal(target: str, draft: str, **words) -> str:
    """Return the one message, which must not depend on whether a tree was demanded."""
    with pytest.raises(ValueError) as demanded:
        build_config(target, spec(draft, ddtree=True, **words))
    with pytest.raises(ValueError) as absent:
        build_config(target, spec(draft, **words))
    assert str(absent.value) == str(demanded.value)
    return str(demanded.value)


def dflash(**changes) -> dict:
    options = dict(mask_token_id=MASK_TOKEN, target_layer_ids=[0, 1])
    options.update(changes)
    return {name: value for name, value in options.items() if value is not ABSENT}


MISFITS = {
    "hidden size": (
        dict(hidden_size=32),
        "got hidden_size 32",
        f"hidden_size {HIDDEN_SIZE} is the target's",
    ),
    "hidden size of the target": (
        dict(target_hidden_size=128),
        "got target_hidden_size 128",
        f"target_hidden_size {HIDDEN_SIZE} is the target's",
    ),
    "vocabulary": (
        dict(vocab_size=600),
        "got vocab_size 600",
        f"vocab_size {VOCAB_SIZE} is the target's",
    ),
    "vocabulary of the draft": (
        dict(draft_vocab_size=600),
        "got draft_vocab_size 600",
        f"draft_vocab_size 1 to {VOCAB_SIZE} is allowed",
    ),
    "layer that the target lacks": (
        dict(dflash_config=dflash(target_layer_ids=[0, 3])),
        "target_layer_ids [0, 3]",
        "layers of the target, 0 to 2, in ascending order",
    ),
    "layers in another order": (
        dict(dflash_config=dflash(target_layer_ids=[1, 0])),
        "target_layer_ids [1, 0]",
        "in ascending order",
    ),
    "a layer twice": (
        dict(dflash_config=dflash(target_layer_ids=[1, 1])),
        "target_layer_ids [1, 1]",
        "in ascending order",
    ),
    "a layer that is no number": (
        dict(dflash_config=dflash(target_layer_ids=["1"])),
        "target_layer_ids ['1']",
        "0 to 2",
    ),
    "no layers": (
        dict(dflash_config=dflash(target_layer_ids=ABSENT)),
        "target_layer_ids None",
        "0 to 2",
    ),
    "mask token beyond the vocabulary": (
        dict(dflash_config=dflash(mask_token_id=VOCAB_SIZE)),
        f"mask_token_id {VOCAB_SIZE}",
        f"mask_token_id 0 to {VOCAB_SIZE - 1} is allowed",
    ),
    "mask token below the vocabulary": (
        dict(dflash_config=dflash(mask_token_id=-1)),
        "mask_token_id -1",
        f"0 to {VOCAB_SIZE - 1} is allowed",
    ),
    "mask token that is no number": (
        dict(dflash_config=dflash(mask_token_id="5")),
        "mask_token_id '5'",
        f"0 to {VOCAB_SIZE - 1} is allowed",
    ),
    "no mask token": (
        dict(dflash_config=dflash(mask_token_id=ABSENT)),
        "dflash_config.mask_token_id None",
        f"0 to {VOCAB_SIZE - 1} is allowed",
    ),
}


@pytest.mark.parametrize("name", MISFITS)
def test_draft_of_another_target(target, tmp_path, name):
    changes, got, allowed = MISFITS[name]
    draft = write_draft(tmp_path / "draft", **changes)
    message = refusal(target, draft)
    assert message.startswith(f"the draft {draft} does not fit the target {target}")
    assert got in message
    assert allowed in message
    assert 'Type "model": with a DFlash draft made for this target' in message


@pytest.mark.parametrize("options", [ABSENT, None, [1], "x", 3])
def test_draft_without_a_dflash_config(target, tmp_path, options):
    draft = Path(write_draft(tmp_path / "draft"))
    config = json.loads((draft / "config.json").read_text())
    del config["dflash_config"]
    if options is not ABSENT:
        config["dflash_config"] = options
    (draft / "config.json").write_text(json.dumps(config))
    message = refusal(target, str(draft))
    assert f"dflash_config {None if options is ABSENT else options!r}" in message
    assert "target_layer_ids None" in message


def test_every_misfit_is_named_at_once(target, tmp_path):
    draft = write_draft(tmp_path / "draft", hidden_size=32, vocab_size=600)
    message = refusal(target, draft)
    assert "got hidden_size 32, and vocab_size 600" in message


def test_depth_beyond_the_trained_block(target, tmp_path):
    draft = write_draft(tmp_path / "draft")
    words = spec(draft, num_speculative_tokens=BLOCK_SIZE, ddtree=True)
    with pytest.raises(ValueError) as error:
        build_config(target, words)
    assert str(error.value) == (
        f"num_speculative_tokens is not a depth this draft can reach (got {BLOCK_SIZE})"
        f". 1 to {BLOCK_SIZE - 1} is allowed, for the draft's block_size {BLOCK_SIZE}. "
        f'Type "num_speculative_tokens": {BLOCK_SIZE - 1}.'
    )


@pytest.mark.parametrize("size", ["8", 1, 0, -8, 8.0, True, [8]])
def test_block_size_that_is_none(target, tmp_path, size):
    draft = write_draft(tmp_path / "draft", block_size=size)
    with pytest.raises(ValueError, match="A DFlash draft has a block_size") as error:
        build_config(target, spec(draft, ddtree=True))
    assert f"(got block_size {size!r})" in str(error.value)


def test_mask_token_at_the_top_of_the_config(target, tmp_path):
    draft = write_draft(
        tmp_path / "draft",
        dflash_config=dflash(mask_token_id=ABSENT),
        mask_token_id=MASK_TOKEN,
    )
    assert get_ddtree_config(build_config(target, spec(draft, ddtree=True)))


def test_misfit_is_left_to_vllm_on_request(target, tmp_path):
    draft = write_draft(
        tmp_path / "draft", dflash_config=dflash(target_layer_ids=[0, 9])
    )
    config = build_config(target, spec(draft, num_speculative_tokens=7, ddtree=False))
    assert config.speculative_config.num_speculative_tokens == 7


def test_layouts_that_fit_are_taken(target, tmp_path):
    plain = write_draft(tmp_path / "plain")
    other = write_speculators_draft(tmp_path / "speculators", target=target)
    for draft in (plain, other):
        assert get_ddtree_config(build_config(target, spec(draft, ddtree=True)))


class TestFiles:
    """What is in the folder of the draft."""

    @pytest.fixture
    def draft(self, tmp_path) -> Path:
        return Path(write_draft(tmp_path / "draft"))

    @pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 0.999])
    def test_truncated_file(self, target, draft, share):
        file = draft / WEIGHTS
        size = int(file.stat().st_size * share)
        file.write_bytes(file.read_bytes()[:size])
        message = refusal(target, str(draft))
        assert f"the draft's file {file} can't be read (got {size} bytes, " in message
        assert 'Type "model": with a complete copy of the draft' in message

    def test_pointer_in_place_of_the_file(self, target, draft):
        (draft / WEIGHTS).write_text("version https://git-lfs.github.com/spec/v1\n")
        assert "can't be read (got 43 bytes" in refusal(target, str(draft))

    def test_no_weights(self, target, draft):
        (draft / WEIGHTS).unlink()
        message = refusal(target, str(draft))
        assert f"the draft {draft} has no weights (got no *.safetensors" in message

    @pytest.mark.parametrize("name", ["pytorch_model.bin", "draft.pt", "draft.pth"])
    def test_pickle(self, target, draft, name):
        (draft / WEIGHTS).rename(draft / name)
        message = refusal(target, str(draft))
        assert f"weights in pickles (got {name}), which can hold code" in message
        assert "safetensors" in message

    @pytest.mark.parametrize("load_format", ["pt", "npcache"])
    def test_load_format_of_pickles(self, target, draft, load_format):
        with pytest.raises(ValueError, match=f"got load_format {load_format}"):
            build_config(target, spec(str(draft), ddtree=True), load_format=load_format)

    def test_pickle_beside_the_weights_is_not_read(self, target, draft):
        (draft / "pytorch_model.bin").write_bytes(b"not read")
        assert get_ddtree_config(build_config(target, spec(str(draft), ddtree=True)))

    def test_dummy_weights_need_no_files(self, target, draft):
        (draft / WEIGHTS).unlink()
        config = build_config(
            target, spec(str(draft), ddtree=True), load_format="dummy"
        )
        assert get_ddtree_config(config)

    def test_missing_shard(self, target, draft):
        tensors = load_file(draft / WEIGHTS)
        halves = [sorted(tensors)[::2], sorted(tensors)[1::2]]
        names = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
        weight_map = {}
        for name, half in zip(names, halves, strict=True):
            save_file({key: tensors[key] for key in half}, draft / name)
            weight_map |= dict.fromkeys(half, name)
        (draft / WEIGHTS).unlink()
        index = draft / f"{WEIGHTS}.index.json"
        index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
        assert get_ddtree_config(build_config(target, spec(str(draft), ddtree=True)))
        (draft / names[1]).unlink()
        assert f"missing are {names[1]}" in refusal(target, str(draft))
        index.write_text('{"weight_map": [')
        assert f"file {index} can't be read" in refusal(target, str(draft))

    @pytest.mark.parametrize(
        "name", ["fc.weight", "norm.weight", "layers.1.mlp.down_proj.weight"]
    )
    def test_missing_tensor(self, target, draft, name):
        tensors = load_file(draft / WEIGHTS)
        num_tensors = len(tensors)
        del tensors[name]
        save_file(tensors, draft / WEIGHTS)
        message = refusal(target, str(draft))
        assert f"lacks 1 of the {num_tensors} tensors" in message
        assert f"(missing are {name})" in message

    def test_many_missing_tensors_are_counted(self, target, draft):
        tensors = load_file(draft / WEIGHTS)
        kept = {k: v for k, v in tensors.items() if not k.startswith("layers.1.")}
        save_file(kept, draft / WEIGHTS)
        message = refusal(target, str(draft))
        assert "lacks 11 of" in message
        assert "and 7 more)" in message

    def test_tensor_of_another_shape(self, target, draft):
        tensors = load_file(draft / WEIGHTS)
        tensors["fc.weight"] = torch.zeros(HIDDEN_SIZE, HIDDEN_SIZE)
        save_file(tensors, draft / WEIGHTS)
        message = refusal(target, str(draft))
        assert (
            f"fc.weight [{HIDDEN_SIZE}, {HIDDEN_SIZE}] instead of "
            f"[{HIDDEN_SIZE}, {2 * HIDDEN_SIZE}]"
        ) in message

    def test_vocabulary_of_its_own_needs_a_mapping(self, target, tmp_path):
        draft = Path(write_speculators_draft(tmp_path / "other", target=target))
        tensors = load_file(draft / WEIGHTS)
        del tensors["d2t"]
        save_file(tensors, draft / WEIGHTS)
        assert "missing are d2t" in refusal(target, str(draft))

    def test_names_that_vllm_knows_too(self, target, draft):
        tensors = load_file(draft / WEIGHTS)
        attention = "layers.0.self_attn."
        tensors[f"{attention}qkv_proj.weight"] = torch.cat(
            [tensors.pop(f"{attention}{name}_proj.weight") for name in "qkv"]
        )
        tensors["encoder.fc.weight"] = tensors.pop("fc.weight")
        save_file(tensors, draft / WEIGHTS)
        assert get_ddtree_config(build_config(target, spec(str(draft), ddtree=True)))

    def test_damage_is_left_to_vllm_on_request(self, target, draft):
        (draft / WEIGHTS).unlink()
        words = spec(str(draft), num_speculative_tokens=7, ddtree=False)
        assert build_config(target, words).speculative_config is not None


@pytest.mark.parametrize(
    "changes",
    [{}, {"attention_bias": True}, {"dflash_config": dflash(attention_sink_bias=True)}],
)
def test_expected_tensors_are_the_parameters_of_vllms_model(target, tmp_path, changes):
    """Each name is one that vLLM's draft loads, and together they are all of them."""
    draft = write_draft(tmp_path / "draft", **changes)
    words = spec(draft, ddtree=True)
    config = build_config(target, words, load_format="dummy").speculative_config
    shapes = expected_shapes(
        config.draft_model_config.hf_config, config.target_model_config
    )
    parameters = _parameters_of_vllms_draft(target, words)
    shared = {"model.embed_tokens.weight", "lm_head.weight", "model.mask_embedding"}
    assert {_parameter_of(name) for name in shapes} == set(parameters) - shared
    sizes = dict.fromkeys(parameters, 0)
    for name, shape in shapes.items():
        sizes[_parameter_of(name)] += torch.Size(shape).numel()
    assert {n: s for n, s in sizes.items() if n not in shared} == {
        n: p.numel() for n, p in parameters.items() if n not in shared
    }


def _parameter_of(name: str) -> str:
    for part, whole in (
        ("q_proj", "qkv_proj"),
        ("k_proj", "qkv_proj"),
        ("v_proj", "qkv_proj"),
        ("gate_proj", "gate_up_proj"),
        ("up_proj", "gate_up_proj"),
    ):
        if f".{part}." in name:
            name = name.replace(part, whole)
            break
    return f"model.{name}"


def _parameters_of_vllms_draft(target: str, words: dict) -> dict:
    """Build vLLM's module for a draft without loading anything."""
    import vllm.v1.worker.cpu.shm  # noqa: F401
    from vllm.config import set_current_vllm_config
    from vllm.distributed import (
        cleanup_dist_env_and_memory,
        init_distributed_environment,
        initialize_model_parallel,
    )
    from vllm.model_executor.models.qwen3_dflash import DFlashQwen3ForCausalLM

    config = build_config(target, words, load_format="dummy")
    with set_current_vllm_config(config):
        init_distributed_environment(
            1, 0, "tcp://127.0.0.1:0", local_rank=0, backend="gloo"
        )
        initialize_model_parallel(1)
        try:
            with torch.device("meta"):
                model = DFlashQwen3ForCausalLM(vllm_config=config)
        finally:
            cleanup_dist_env_and_memory()
    # Layers are numbered after the target's.
    return dict(model.named_parameters())
