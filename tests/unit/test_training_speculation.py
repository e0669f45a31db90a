# SPDX-License-Identifier: Apache-2.0
"""Answers made with a draft: what the engine is told, and what is refused."""

import dataclasses
import json
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from tiny_models import write_draft
from training_runs import tiny_config

from vllm_dflash.config import OPTION_KEY, parse_ddtree_option
from vllm_dflash.graphs import verify_sizes
from vllm_dflash_training import speculation
from vllm_dflash_training.backends import engine_arguments
from vllm_dflash_training.config import GenerationOptions, SpeculativeOptions
from vllm_dflash_training.speculation import (
    Speculation,
    choose_plugins,
    find_speculation,
)


def find(draft: str | None, **options) -> Speculation | None:
    """What a run that starts from a draft generates with."""
    config = tiny_config(Path("x"), draft)
    generation = GenerationOptions(speculative=SpeculativeOptions(**options))
    return find_speculation(dataclasses.replace(config, generation=generation))


@pytest.fixture(scope="module")
def draft(tmp_path_factory) -> str:
    """Of blocks of 8."""
    return write_draft(tmp_path_factory.mktemp("draft"))


def test_the_draft_is_that_of_the_run_unless_another_is_named(draft, tmp_path):
    assert find_speculation(tiny_config(tmp_path, draft)) is None
    assert find(draft) == Speculation(Path(draft), nodes=15, depth=7)
    assert find(draft, nodes=4) == Speculation(Path(draft), nodes=4, depth=4)
    assert find(draft, depth=3) == Speculation(Path(draft), nodes=15, depth=3)
    embedded = find(draft, model="embedded")
    assert embedded.depth == 15
    assert (embedded.folder / "model.safetensors").is_file()
    assert find("embedded") == embedded


def test_drafts_that_are_none_are_refused(draft, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="can't be read .*Type generation.speculative"):
        find(str(tmp_path / "nothing"))
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 4}))
    with pytest.raises(ValueError, match="can't be read"):
        find(str(tmp_path))
    with pytest.raises(ValueError, match="depth is out of range .*1 to 7 is allowed"):
        find(draft, depth=8)
    monkeypatch.setattr(speculation, "entry_points", lambda **_: ())
    with pytest.raises(ValueError, match="needs the plugin .*pip install"):
        find(draft)


def arguments(engines: int = 1, is_cpu: bool = False, batch_size: int = 192, **named):
    options = GenerationOptions(
        engines=engines, batch_size=batch_size, engine_args=named
    )
    return engine_arguments(
        torch.float32,
        64,
        options,
        is_cpu,
        lambda: 1000,
        Speculation(Path("/draft"), nodes=15, depth=15),
    )


def test_a_step_holds_the_trees_of_a_whole_batch_and_prompts():
    made = arguments()
    tree = parse_ddtree_option(
        made["speculative_config"].pop(OPTION_KEY),
        num_speculative_tokens=made["speculative_config"]["num_speculative_tokens"],
        block_size=16,
        is_cpu=False,
    )
    assert made["speculative_config"] == dict(
        method="dflash", model="/draft", num_speculative_tokens=15
    )
    # Demanded: it is refused rather than served as something else.
    assert tree.demanded
    assert (tree.budget, tree.depth, tree.widths) == (15, 15, (16,))
    step = made["max_num_batched_tokens"]
    assert step - 192 * (tree.width + tree.depth) == 8192
    # Few graphs, the whole batch among them.
    sizes = made["cudagraph_capture_sizes"]
    assert len(sizes) < 14 < len(verify_sizes(tree, 192, step, None))
    assert {16, 32, 128 * 16, 192 * 16} < set(sizes)
    assert max(sizes) <= step
    assert sum(size > 192 * 16 for size in sizes) == 3
    # The cache of engines that share a GPU is named as before.
    assert arguments(engines=4)["kv_cache_memory_bytes"] == 75


def test_what_is_named_for_the_engine_wins():
    named = arguments(max_num_batched_tokens=9000, max_cudagraph_capture_size=64)
    assert named["max_num_batched_tokens"] == 9000
    assert "cudagraph_capture_sizes" not in named
    assert "cudagraph_capture_sizes" not in arguments(enforce_eager=True)
    fewer = arguments(max_num_seqs=3)
    assert fewer["max_num_batched_tokens"] == 3 * 31 + 8192
    assert fewer["cudagraph_capture_sizes"] == [16, 32, 48, 560, 1072, 2096]


def test_on_the_cpu_there_are_no_graphs_and_prompts_are_prefilled_in_parts():
    made = arguments(is_cpu=True)
    assert "cudagraph_capture_sizes" not in made
    assert made["enforce_eager"]
    assert "enable_chunked_prefill" not in made


@pytest.mark.parametrize("is_cpu_build", [True, False])
@pytest.mark.parametrize(
    ("named", "is_speculative", "expected"),
    [
        (None, False, ""),
        ("mine", False, "mine"),
        (None, True, "dflash,dflash_cpu"),
        # Set for engines without drafts, as in a shell that made some before.
        ("", True, "dflash,dflash_cpu"),
        ("mine", True, "mine,dflash,dflash_cpu"),
        ("mine,dflash", True, "mine,dflash,dflash_cpu"),
        ("dflash_cpu,dflash", True, "dflash_cpu,dflash"),
    ],
)
def test_the_plugin_is_loaded_where_it_is_needed(
    monkeypatch, is_cpu_build, named, is_speculative, expected
):
    platforms = ModuleType("vllm.platforms")
    platforms.vllm_version_matches_substr = lambda text: is_cpu_build
    monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)
    method = "VLLM_WORKER_MULTIPROC_METHOD"
    for name in ("VLLM_PLUGINS", "VLLM_DFLASH_CPU", method):
        # Undone afterwards, whatever is set.
        monkeypatch.setenv(name, "x")
        monkeypatch.delenv(name)
    if named is not None:
        monkeypatch.setenv("VLLM_PLUGINS", named)
    choose_plugins(is_speculative)
    assert os.environ["VLLM_PLUGINS"] == expected
    assert os.environ.get(method) == ("spawn" if is_speculative else None)
    is_set = os.environ.get("VLLM_DFLASH_CPU") == "1"
    assert is_set == (is_speculative and is_cpu_build)
