# SPDX-License-Identifier: Apache-2.0
"""The `ddtree` option: defaults, ranges, and what a refusal says."""

import json
from types import SimpleNamespace

import pytest

from vllm_dflash.config import (
    DEFAULT_BUDGET,
    DEFAULT_BUDGET_CPU,
    MAX_BUDGET,
    DDTreeConfig,
    get_ddtree_config,
    parse_ddtree_option,
    resolve_depth,
)


def parse(value, *, tokens=None, block_size=16, is_cpu=False):
    return parse_ddtree_option(
        value, num_speculative_tokens=tokens, block_size=block_size, is_cpu=is_cpu
    )


def test_absent_key_gives_a_tree_that_nobody_demanded():
    tree = parse(None, is_cpu=True)
    assert tree == DDTreeConfig(budget=DEFAULT_BUDGET_CPU, depth=15)
    assert (tree.width, tree.widths, tree.demanded) == (17, (17,), False)


@pytest.mark.parametrize("value", [True, {}, {"budget": DEFAULT_BUDGET}])
def test_typed_key_demands_the_tree(value):
    tree = parse(value)
    assert (tree.budget, tree.depth, tree.demanded) == (DEFAULT_BUDGET, 15, True)


def test_false_is_vllms_chain():
    assert parse(False) is None


def test_default_budget_on_the_cpu():
    assert parse(None, is_cpu=True).budget == DEFAULT_BUDGET_CPU


@pytest.mark.parametrize(("is_cpu", "block_size"), [(False, 64), (True, 32)])
def test_default_budget_covers_the_depth(is_cpu, block_size):
    tree = parse(None, block_size=block_size, is_cpu=is_cpu)
    assert tree.budget == tree.depth == block_size - 1


@pytest.mark.parametrize(
    ("tokens", "block_size", "depth"),
    [(None, 16, 15), (15, 16, 15), (1, 16, 1), (None, 2, 1), (20, None, 20)],
)
def test_depth(tokens, block_size, depth):
    assert resolve_depth(tokens, block_size) == depth


@pytest.mark.parametrize("tokens", [0, -1, 16, True, 3.0, "7"])
def test_depth_the_draft_cannot_reach(tokens):
    with pytest.raises(ValueError, match=r"got .*1 to 15 is allowed.*block_size 16"):
        resolve_depth(tokens, 16)


def test_depth_without_any_number():
    with pytest.raises(ValueError, match='names no block_size.*"num_speculative_to'):
        resolve_depth(None, None)


@pytest.mark.parametrize("block_size", [0, 1])
def test_draft_without_mask_tokens(block_size):
    with pytest.raises(ValueError, match=f"got block_size {block_size}"):
        resolve_depth(None, block_size)


@pytest.mark.parametrize("budget", [15, 16, 128, MAX_BUDGET])
def test_budget_range(budget):
    assert parse({"budget": budget}).budget == budget


@pytest.mark.parametrize("budget", [14, 0, -1, 256, True, 48.0, "48", None, [48]])
def test_budget_out_of_range(budget):
    with pytest.raises(ValueError) as error:
        parse({"budget": budget})
    text = str(error.value)
    assert f"got {budget!r}" in text
    assert "15 to 255 is allowed" in text
    assert f'"ddtree": {{"budget": {DEFAULT_BUDGET}}}' in text


@pytest.mark.parametrize("children", [1, 32])
def test_max_children_range(children):
    assert parse({"max_children": children}).max_children == children


@pytest.mark.parametrize("children", [0, 33, False, 8.0])
def test_max_children_out_of_range(children):
    with pytest.raises(ValueError, match="max_children.*1 to 32 is allowed"):
        parse({"max_children": children})


@pytest.mark.parametrize(
    ("name", "default"), [("scale_by_temperature", False), ("use_noise", True)]
)
def test_switches(name, default):
    assert getattr(parse({name: True}), name) is True
    assert getattr(parse({name: False}), name) is False
    assert getattr(parse({}), name) is default


@pytest.mark.parametrize("scale", [0, 1, "true", None])
def test_scale_by_temperature_is_a_switch(scale):
    with pytest.raises(ValueError, match="scale_by_temperature.*true and false"):
        parse({"scale_by_temperature": scale})


@pytest.mark.parametrize("value", [5, "true", [48], 1, 0, 48.0])
def test_option_of_a_wrong_type(value):
    with pytest.raises(ValueError, match="neither a switch nor a set of options"):
        parse(value)


@pytest.mark.parametrize("key", ["budgets", "tree_budget", "depth", ""])
def test_unknown_option(key):
    with pytest.raises(ValueError, match="has no option.*budget_per_batch_size"):
        parse({key: 3})


def test_schedule():
    tree = parse(
        {"budget": 64, "budget_per_batch_size": [[1, 4, 64], [5, 16, 15], [17, 64, 0]]}
    )
    assert tree.budget_per_batch_size == ((1, 4, 64), (5, 16, 15), (17, 64, 0))
    assert tree.widths == (1, 16, 65)


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        ([], "not a schedule"),
        ({"1": 2}, "not a schedule"),
        (48, "not a schedule"),
        ("always", "not a schedule"),
        ([[1, 4]], "wrong entry"),
        ([[1, 4, 48.0]], "wrong entry"),
        ([[True, 4, 48]], "wrong entry"),
        (["148"], "wrong entry"),
        ([[2, 4, 48]], "starts at 1"),
        ([[1, 4, 48], [6, 8, 15]], "starts at 5"),
        ([[1, 4, 48], [4, 8, 15]], "starts at 5"),
        ([[1, 0, 48]], "empty range"),
        ([[1, 4, 49]], "number of nodes out of range"),
        ([[1, 4, -1]], "number of nodes out of range"),
        ([[1, 4, 0]], "never drafts"),
    ],
)
def test_wrong_schedule(schedule, words):
    with pytest.raises(ValueError, match=words) as error:
        parse({"budget": 48, "budget_per_batch_size": schedule})
    assert "Type" in str(error.value)


def test_schedule_is_one_that_vllm_takes():
    from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

    schedule = parse(
        {"budget": 48, "budget_per_batch_size": [[1, 2, 48], [3, 4, 20], [5, 6, 0]]}
    ).budget_per_batch_size
    lookup = build_dynamic_sd_schedule_lookup(
        list(schedule), vllm_max_batch_size=8, vllm_num_speculative_tokens=48
    )
    assert lookup[1:] == [48, 48, 20, 20, 0, 0, 0, 0]


def test_fewer_nodes_than_the_depth_at_high_load():
    tree = parse({"budget": 48, "budget_per_batch_size": [[1, 4, 48], [5, 64, 3]]})
    assert tree.widths == (4, 49)


@pytest.mark.parametrize(
    ("option", "is_cpu"), [({"budget_per_batch_size": "fixed"}, False), ({}, True)]
)
def test_fixed_budget(option, is_cpu):
    assert parse(option, is_cpu=is_cpu).budget_per_batch_size is None


@pytest.mark.parametrize(
    "value",
    [None, {"budget": 64, "budget_per_batch_size": [[1, 4, 64], [5, 8, 15]]}],
)
def test_round_trip_through_json(value):
    tree = parse(value)
    assert DDTreeConfig.from_dict(json.loads(json.dumps(tree.to_dict()))) == tree


def engine(method="dflash", additional_config=None):
    speculative_config = None if method is None else SimpleNamespace(method=method)
    return SimpleNamespace(
        speculative_config=speculative_config, additional_config=additional_config
    )


def test_options_of_an_engine():
    tree = parse(True)
    assert get_ddtree_config(engine(additional_config={"ddtree": tree.to_dict()})) == (
        tree
    )


@pytest.mark.parametrize(
    "config",
    [
        engine(None, {"ddtree": {}}),
        engine("ngram", {"ddtree": {}}),
        engine(additional_config={}),
        engine(additional_config={"other": 1}),
        engine(additional_config=object()),
    ],
)
def test_engines_without_a_tree(config):
    assert get_ddtree_config(config) is None


def test_config_is_frozen():
    with pytest.raises(AttributeError):
        parse(None).budget = 3
