# SPDX-License-Identifier: Apache-2.0
"""Drafts with `mask_embedding.pt`, the one pickle that vLLM reads of a draft."""

import pickle
from pathlib import Path

import pytest
import torch
from engines import engine, generate, model_runner, params, token_ids, tree_config
from tiny_models import HIDDEN_SIZE, MASK_TOKEN, write_draft

pytestmark = pytest.mark.e2e

NAME = "mask_embedding.pt"


@pytest.fixture
def draft(tmp_path) -> Path:
    return Path(write_draft(tmp_path / "draft"))


class _Code:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize("is_named", [False, True])
def test_embedding_is_loaded(
    tiny_target, draft, prompts, greedy_reference, rig, is_named
):
    embedding = torch.randn(HIDDEN_SIZE)
    words = dict(mask_token_id=MASK_TOKEN, embedding=embedding)
    torch.save(words if is_named else embedding, draft / NAME)
    rig.add_references(prompts, greedy_reference)
    with engine(tiny_target, tree_config(str(draft))) as llm:
        model = model_runner(llm).speculator.model.model
        assert model.has_separate_mask_embedding
        assert torch.equal(model.mask_embedding.cpu(), embedding)
        got = token_ids(generate(llm, prompts, params()))
    assert got == greedy_reference
    assert rig.num_branching_paths > 0


@pytest.mark.parametrize("is_archive", [True, False])
def test_code_in_it_ends_the_start_and_does_not_run(
    tiny_target, draft, tmp_path, is_archive
):
    trace = tmp_path / "it ran"
    code = _Code(trace)
    torch.save(code, draft / NAME, _use_new_zipfile_serialization=is_archive)
    with (
        pytest.raises(pickle.UnpicklingError, match="Weights only load failed"),
        engine(tiny_target, tree_config(str(draft))),
    ):
        pass
    assert not trace.exists()
    # It would have run: the file is what it is taken for.
    torch.load(draft / NAME, weights_only=False)
    assert trace.exists()
