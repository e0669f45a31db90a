# SPDX-License-Identifier: Apache-2.0
"""Step times of large targets: their shapes, the table, a run on tiny models."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from evals_modules import EVALS, import_evals
from tiny_models import write_draft, write_target


@pytest.fixture(scope="module")
def evals():
    return import_evals(
        bench="bench_shapes", shapes="model_shapes", projection="projection_model"
    )


@pytest.mark.parametrize("name", ["qwen3-8b", "qwen3-30b-a3b", "llama-70b-rank"])
def test_shapes_are_those_of_the_projection(evals, name, tmp_path):
    """What is measured is what is projected."""
    names = {"qwen3-30b-a3b": "coder-30b-a3b", "llama-70b-rank": "llama-70b-tp2"}
    shape = evals.shapes.parse_shape(name)
    paths = evals.shapes.write_pair(tmp_path, shape)
    target, draft = (json.loads(Path(p, "config.json").read_text()) for p in paths)
    expected = evals.projection.SHAPES[names.get(name, name)]
    assert target["num_hidden_layers"] == expected.layers
    assert target["hidden_size"] == draft["hidden_size"] == expected.hidden
    assert target["vocab_size"] == draft["vocab_size"]
    # Each GPU has its part of what is wide.
    part = expected.num_gpus
    assert part * target["vocab_size"] == expected.vocabulary
    for config in (target, draft):
        assert part * config["num_attention_heads"] == expected.heads
        assert part * config["num_key_value_heads"] == expected.kv_heads
        assert config["head_dim"] == expected.head_size
    experts = target.get("num_experts", 0)
    assert experts == expected.experts
    width = "moe_intermediate_size" if experts else "intermediate_size"
    assert part * target[width] == expected.intermediate
    assert draft["num_hidden_layers"] == expected.draft_layers
    assert part * draft["intermediate_size"] == (
        expected.draft_intermediate or expected.intermediate
    )
    assert not any("expert" in key for key in draft)
    ids = draft["dflash_config"]["target_layer_ids"]
    assert len(set(ids)) == len(ids) == expected.draft_layers
    assert max(ids) < target["num_hidden_layers"]
    assert draft["dflash_config"]["mask_token_id"] < draft["vocab_size"]


def test_fewer_layers_and_wrong_names(evals):
    shape = evals.shapes.parse_shape("llama-70b-rank@12")
    assert shape.target["num_hidden_layers"] == 12
    assert evals.shapes.SHAPES["llama-70b-rank"].target["num_hidden_layers"] == 80
    for text in ("llama-7b", "llama-70b-rank@4", "llama-70b-rank@", "qwen3-8b@x"):
        with pytest.raises(ValueError, match="there is no shape .*Type"):
            evals.shapes.parse_shape(text)


def test_the_table_has_ratios_to_no_speculation(evals, capsys):
    times = {(1, 0): 5.0, (1, 15): 6.0, (1, 47): 7.5, (8, 0): 6.0, (8, 47): 12.0}
    rows = [dict(shape="a", batch=b, nodes=n, ms=ms) for (b, n), ms in times.items()]
    evals.bench.print_table(rows)
    lines = capsys.readouterr().out.splitlines()
    assert "| a | 1 | 5.00 | 6.00 (1.20) | 7.50 (1.50) |" in lines
    assert "| a | 8 | 6.00 | - | 12.00 (2.00) |" in lines


@pytest.mark.slow
def test_an_engine_is_timed_at_every_size(tmp_path):
    target = write_target(tmp_path / "target")
    draft = write_draft(tmp_path / "draft")
    command = [sys.executable, str(EVALS / "bench_shapes.py"), "--shape", "tiny"]
    command += ["--target", target, "--draft", draft, "--load-format", "auto"]
    command += ["--nodes", "0,7,9", "--batches", "1,2", "--context", "20"]
    command += ["--depth", "7", "--kv-cache-gib", "0.1"]
    env = os.environ | {"VLLM_DFLASH_CPU": "1"}
    run = subprocess.run(
        command, input="\n\n", capture_output=True, text=True, env=env, timeout=300
    )
    assert run.returncode == 0, run.stderr[-3000:]
    found = [x for x in run.stdout.splitlines() if x.startswith("@RESULT ")]
    rows = [json.loads(line.removeprefix("@RESULT ")) for line in found]
    expected = [(b, n) for b in (1, 2) for n in (0, 7, 9)]
    assert [(row["batch"], row["nodes"]) for row in rows] == expected
    assert all(row["shape"] == "tiny" and row["ms"] > 0 for row in rows)
