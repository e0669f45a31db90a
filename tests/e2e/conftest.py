# SPDX-License-Identifier: Apache-2.0
"""Tiny checkpoints and reference runs shared by the end-to-end tests."""

import pytest
from engines import engine, generate, params, random_prompts, token_ids
from rigged_draft import RiggedDraft
from sampling_checks import write_spoken_target
from tiny_models import write_draft, write_target

PROMPT_LENGTHS = (35, 20, 60, 5, 17, 90)


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory) -> str:
    return write_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="session")
def tiny_draft(tmp_path_factory) -> str:
    return write_draft(tmp_path_factory.mktemp("draft"))


@pytest.fixture(scope="session")
def spoken_target(tmp_path_factory) -> str:
    return write_spoken_target(tmp_path_factory.mktemp("spoken"))


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    return random_prompts(PROMPT_LENGTHS)


@pytest.fixture(scope="session")
def greedy_reference(tiny_target, prompts) -> list[list[int]]:
    """Greedy tokens without speculation."""
    with engine(tiny_target) as llm:
        return token_ids(generate(llm, prompts, params()))


@pytest.fixture
def rig(monkeypatch) -> RiggedDraft:
    """A draft that hits the reference at random ranks."""
    rigged = RiggedDraft()
    rigged.install(monkeypatch)
    return rigged
