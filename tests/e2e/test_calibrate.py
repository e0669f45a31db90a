# SPDX-License-Identifier: Apache-2.0
"""vllm-dflash calibrate on a tiny pair: measured, kept, and used by the next engine."""

import json

import pytest
from engines import engine, gpu_memory_args
from tiny_models import write_draft, write_target
from tiny_tokenizer import write_tokenizer
from vllm.distributed import cleanup_dist_env_and_memory

from vllm_dflash.attention.registry import remove_tree_backends
from vllm_dflash.calibrate import measure
from vllm_dflash.cli.main import main
from vllm_dflash.config import get_ddtree_config

pytestmark = pytest.mark.e2e


@pytest.fixture
def accepted_drafts(monkeypatch):
    """What the random draft lacks: every tree is accepted three nodes deep."""
    verified = []
    accepted_paths = measure.Bench.accepted_paths

    def three_nodes(self, *args):
        verified.append(len(accepted_paths(self, *args)))
        return [[1, 2, 3]] * verified[-1]

    monkeypatch.setattr(measure.Bench, "accepted_paths", three_nodes)
    return verified


def test_the_next_engine_uses_what_was_measured(
    tmp_path, monkeypatch, capsys, accepted_drafts
):
    target, draft = write_target(tmp_path / "target"), write_draft(tmp_path / "draft")
    write_tokenizer(target)
    monkeypatch.setenv("VLLM_DFLASH_CACHE", str(tmp_path / "cache"))
    options = ["--budget", "8", "--max-num-seqs", "2", "--max-tokens", "12"]
    options += ["--context", "24"]
    vllm_options = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "512"]
    vllm_options += ["--block-size", "32", "--num-gpu-blocks-override", "64"]
    vllm_options += gpu_memory_args()

    def calibrate(*more: str) -> int:
        code = main(["calibrate", target, draft, *options, *more, "--", *vllm_options])
        remove_tree_backends()
        cleanup_dist_env_and_memory()
        return code

    assert calibrate("--check") == 2
    assert "there is no kept schedule to check" in capsys.readouterr().err
    assert not accepted_drafts, "measured for nothing"
    code = calibrate()
    out = capsys.readouterr().out
    assert code == 0 and accepted_drafts[0] > 16
    rows = [line for line in out.splitlines() if line.startswith("|")]
    # Head, rule, and the numbers of nodes: no drafts, 3, 7 (the depth too) and 8.
    assert [row.split("|")[1].strip() for row in rows[2:]] == ["0", "3", "7", "8"]
    (path,) = (tmp_path / "cache" / "schedules").glob("*.json")
    kept = json.loads(path.read_text())
    assert kept["verified_trees"] == accepted_drafts[0]
    assert kept["tokens_by_nodes"] == {"0": 1.0, "3": 4.0, "7": 4.0, "8": 4.0}
    assert {entry[0] for entry in kept["step_ms"]} == {1, 2}
    # Four tokens for hardly more than the time of one.
    assert all(entry[2] > 0 for entry in kept["budget_per_batch_size"])
    assert calibrate("--check") in (0, 1)
    out = capsys.readouterr().out
    assert f'Kept: "budget_per_batch_size": {kept["budget_per_batch_size"]}' in out
    assert "At worst " in out
    assert json.loads(path.read_text()) == kept
    speculative = dict(method="dflash", model=draft)
    speculative["ddtree"] = dict(budget=8, budget_per_batch_size="auto")
    with engine(target, speculative) as llm:
        tree = get_ddtree_config(llm.llm_engine.vllm_config)
    assert tree.to_dict()["budget_per_batch_size"] == kept["budget_per_batch_size"]
