# SPDX-License-Identifier: Apache-2.0
"""Drafts in and out in the z-lab layout, and the state of an interrupted training."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from vllm_dflash.errors import option_error
from vllm_dflash_training.config import DraftOptions
from vllm_dflash_training.draft import DFlashDraft
from vllm_dflash_training.draft_shape import new_draft_config, shape_from_config
from vllm_dflash_training.growth import grow
from vllm_dflash_training.speculation import draft_folder
from vllm_dflash_training.target import Target

_STATE = "state.pt"


def make_draft(
    target: Target, options: DraftOptions, seed: int
) -> tuple[DFlashDraft, dict[str, Any]]:
    """Build the draft, new or from another one; return it with its config."""
    if options.init_from is None:
        config = new_draft_config(target.config, options)
        draft = DFlashDraft(shape_from_config(config, target.config))
        draft.initialise(seed, target.final_norm)
        return draft, config
    folder = draft_folder(options.init_from)
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        weights = _load_weights(folder)
    except OSError as error:
        raise option_error(
            f"draft.init_from can't be read (got {folder}: {error})",
            'The folder of a draft, "embedded" or null are allowed',
            "draft.init_from: embedded",
        ) from error
    if options.num_layers is not None:
        config, weights = grow(config, weights, options.num_layers)
    draft = DFlashDraft(shape_from_config(config, target.config))
    expected = {name: tuple(p.shape) for name, p in draft.named_parameters()}
    got = {name: tuple(weight.shape) for name, weight in weights.items()}
    if expected != got:
        different = sorted(
            name for name in expected | got if expected.get(name) != got.get(name)
        )
        raise option_error(
            f"the tensors of {folder} are not those of its config (got "
            f"{', '.join(different[:4])})",
            "A whole draft without an embedding of its own is allowed",
            "draft.init_from: with another folder",
        )
    draft.load_state_dict({name: weight.float() for name, weight in weights.items()})
    return draft, config


def _load_weights(folder: Path) -> dict[str, torch.Tensor]:
    weights: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        weights |= load_file(file)
    if not weights:
        raise FileNotFoundError("no *.safetensors file")
    return weights


def export(
    folder: Path,
    weights: dict[str, torch.Tensor],
    config: dict[str, Any],
    dtype: torch.dtype,
) -> None:
    """Write a draft that vLLM's `dflash` loads.

    The folder appears whole: it is written beside its place and renamed.
    """
    part = folder.with_name(folder.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    config = {**config, "dtype": str(dtype).removeprefix("torch.")}
    text = json.dumps(config, indent=2) + "\n"
    (part / "config.json").write_text(text, encoding="utf-8")
    tensors = {n: w.detach().to("cpu", dtype).contiguous() for n, w in weights.items()}
    save_file(tensors, part / "model.safetensors", metadata={"format": "pt"})
    shutil.rmtree(folder, ignore_errors=True)
    part.replace(folder)


def save_state(folder: Path, state: dict[str, Any]) -> None:
    """Store what training goes on from; the last one stays until this is whole."""
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / (_STATE + ".part")
    torch.save(state, part)
    part.replace(folder / _STATE)


def load_state(folder: Path) -> dict[str, Any] | None:
    """Return the last state, if there is one."""
    path = folder / _STATE
    if not path.is_file():
        return None
    return torch.load(path, map_location="cpu", weights_only=True)
