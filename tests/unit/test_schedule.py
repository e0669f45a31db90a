# SPDX-License-Identifier: Apache-2.0
"""The automatic schedule: fewer nodes under load, by the size of the model."""

from types import SimpleNamespace

import pytest

from vllm_dflash.config import DEFAULT_BUDGET, parse_ddtree_option
from vllm_dflash.schedule import (
    DEFAULT_PARAMETERS,
    auto_schedule,
    estimate_parameters,
)

QWEN3_8B = dict(
    hidden_size=4096,
    num_hidden_layers=36,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    intermediate_size=12288,
    vocab_size=151936,
)
CODER_30B_A3B = dict(
    QWEN3_8B,
    hidden_size=2048,
    num_hidden_layers=48,
    num_key_value_heads=4,
    num_experts_per_tok=8,
    moe_intermediate_size=768,
)


def test_parameters_of_a_dense_model():
    assert estimate_parameters(SimpleNamespace(**QWEN3_8B), 1) == pytest.approx(
        7.6e9, rel=0.05
    )
    assert estimate_parameters(SimpleNamespace(**QWEN3_8B), 2) == pytest.approx(
        3.8e9, rel=0.05
    )


def test_parameters_of_a_mixture_are_those_of_one_token():
    parameters = estimate_parameters(SimpleNamespace(**CODER_30B_A3B), 1)
    assert parameters == pytest.approx(3.0e9, rel=0.1)


def test_parameters_of_layers_that_differ():
    from transformers import Gemma4TextConfig

    sizes = dict(QWEN3_8B, num_hidden_layers=2, head_dim=128)
    kinds = ["sliding_attention", "full_attention"]
    config = Gemma4TextConfig(**sizes, layer_types=kinds, global_head_dim=256)
    alike = SimpleNamespace(**dict(sizes, head_dim=192))
    assert estimate_parameters(config, 1) == estimate_parameters(alike, 1)


def test_unknown_layout():
    assert estimate_parameters(SimpleNamespace(), 1) == DEFAULT_PARAMETERS


def test_schedule_of_an_8b_model():
    assert auto_schedule(DEFAULT_BUDGET, 8e9) == (
        (1, 2, 47),
        (3, 4, 31),
        (5, 8, 15),
        (9, 17, 7),
        (18, 102, 3),
        (103, 103, 0),
    )


@pytest.mark.parametrize("parameters", [1e8, 1e9, 4e9, 3e10, 1e12])
@pytest.mark.parametrize("budget", [15, 47, 96, 255])
def test_schedule_is_contiguous_and_falls(parameters, budget):
    schedule = auto_schedule(budget, parameters)
    assert schedule[0][0] == 1 and schedule[0][2] == budget and schedule[-1][2] == 0
    for before, after in zip(schedule, schedule[1:], strict=False):
        assert after[0] == before[1] + 1 and before[0] <= before[1]
        assert after[2] < before[2]


def test_small_models_keep_wide_trees_longer():
    last = [auto_schedule(47, p)[0][1] for p in (1.35e8, 1e9, 8e9, 7e10)]
    assert last == sorted(last, reverse=True)
    assert last[0] > 64 and last[-1] == 1


@pytest.mark.parametrize("option", [{}, {"budget_per_batch_size": "auto"}])
def test_default_on_a_gpu(option):
    tree = parse_ddtree_option(
        option,
        num_speculative_tokens=None,
        block_size=16,
        is_cpu=False,
        parameters=8e9,
    )
    assert tree.budget_per_batch_size == auto_schedule(DEFAULT_BUDGET, 8e9)


def test_schedule_is_one_that_vllm_takes():
    from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

    lookup = build_dynamic_sd_schedule_lookup(
        list(auto_schedule(47, 8e9)),
        vllm_max_batch_size=256,
        vllm_num_speculative_tokens=47,
    )
    assert lookup[1] == lookup[2] == 47 and lookup[102] == 3 and lookup[256] == 0
