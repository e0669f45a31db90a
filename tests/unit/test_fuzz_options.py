# SPDX-License-Identifier: Apache-2.0
"""Arbitrary words as options: refused with a message, or exactly what was typed."""

import copy
import json
import math
from typing import Any

import pytest
from front_end import build_config
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_models import BLOCK_SIZE, write_draft, write_target

from vllm_dflash import patches
from vllm_dflash.config import (
    MAX_BUDGET,
    MAX_MAX_CHILDREN,
    OPTION_NAMES,
    DDTreeConfig,
    get_ddtree_config,
    parse_ddtree_option,
)

DEPTH = 7

# What JSON can say, and what only Python's callers can.
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-2, 300),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["auto", "fixed", "true", "47", "", "AUTO"]),
)
json_values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.text(max_size=6), inner, max_size=4),
    ),
    max_leaves=12,
)
odd_values = st.one_of(
    st.binary(max_size=4),
    st.complex_numbers(),
    st.tuples(st.integers(), st.integers()),
    st.sets(st.integers(), max_size=3),
    st.builds(object),
)
values = st.one_of(json_values, odd_values)
ranges = st.lists(
    st.one_of(
        st.lists(st.integers(-1, 300), min_size=2, max_size=4),
        st.tuples(st.integers(1, 4), st.integers(1, 8), st.integers(0, 64)),
        json_values,
    ),
    max_size=5,
)
# One alone too: next to another wrong one, a wrong option may go unnoticed.
alone = st.tuples(st.sampled_from(OPTION_NAMES), st.one_of(scalars, ranges, values))
options = alone.map(lambda item: dict([item])) | st.fixed_dictionaries(
    {},
    optional={
        "budget": st.one_of(values, st.integers(0, 260)),
        "max_children": st.one_of(values, st.integers(0, 34)),
        "scale_by_temperature": values,
        "use_noise": values,
        "budget_per_batch_size": st.one_of(values, ranges),
    },
)


def parse(value: Any, tokens: Any = DEPTH, block_size: Any = DEPTH + 1) -> Any:
    return parse_ddtree_option(
        value, num_speculative_tokens=tokens, block_size=block_size, is_cpu=True
    )


def check_refusal(error: ValueError, *names: str) -> None:
    """The message names the option, what is allowed, and what to type."""
    text = str(error)
    assert any(name in text for name in names), text
    assert "(got" in text
    assert ". Type " in text


def check_tree(tree: DDTreeConfig) -> None:
    """Nothing but integers and switches in their ranges."""
    assert type(tree.depth) is int
    assert 1 <= tree.depth <= MAX_BUDGET
    assert type(tree.budget) is int
    assert tree.depth <= tree.budget <= MAX_BUDGET
    assert type(tree.max_children) is int
    assert 1 <= tree.max_children <= MAX_MAX_CHILDREN
    assert type(tree.scale_by_temperature) is bool
    assert type(tree.use_noise) is bool
    following = 1
    for first, last, nodes in tree.budget_per_batch_size or ():
        assert {type(first), type(last), type(nodes)} == {int}
        assert following == first <= last
        assert 0 <= nodes <= tree.budget
        following = last + 1
    assert max(tree.widths) <= tree.width
    assert DDTreeConfig.from_dict(json.loads(json.dumps(tree.to_dict()))) == tree


def same(given_value: Any, taken: Any) -> bool:
    """Whether an option was taken as typed; lists and tuples are alike."""
    if isinstance(given_value, list | tuple):
        return [list(entry) for entry in given_value] == [list(e) for e in taken]
    return type(given_value) is type(taken) and given_value == taken


@settings(max_examples=600, deadline=None)
@given(options)
def test_options_are_taken_as_typed_or_refused(option):
    typed = copy.copy(option)
    try:
        tree = parse(option)
    except ValueError as error:
        check_refusal(error, *(f"ddtree.{name}" for name in option))
        return
    finally:
        assert option.keys() == typed.keys(), "the parser wrote to the user's dict"
    check_tree(tree)
    for name, value in option.items():
        if name == "budget_per_batch_size" and (value is None or value == "fixed"):
            assert tree.budget_per_batch_size is None
        elif name != "budget_per_batch_size" or value != "auto":
            assert same(value, getattr(tree, name)), name


@settings(max_examples=300, deadline=None)
@given(st.one_of(values, st.dictionaries(st.text(max_size=12), values, max_size=3)))
def test_value_of_the_key_is_a_switch_or_options(value):
    try:
        tree = parse(value)
    except ValueError as error:
        check_refusal(error, "ddtree")
        return
    if value is False:
        assert tree is None
        return
    assert value is None or value is True or isinstance(value, dict)
    assert not isinstance(value, dict) or set(value) <= set(OPTION_NAMES)
    assert tree.demanded == (value is not None)
    check_tree(tree)


@settings(max_examples=200, deadline=None)
@given(
    st.dictionaries(
        st.one_of(st.integers(), st.none(), st.tuples()), values, min_size=1
    )
)
def test_keys_that_are_no_names_are_refused(option):
    with pytest.raises(ValueError) as error:
        parse(option)
    check_refusal(error.value, "ddtree has no option")


@settings(max_examples=300, deadline=None)
@given(st.one_of(st.none(), values, st.integers(-1, 300)), st.one_of(st.none(), values))
def test_depth_and_block_size(tokens, block_size):
    try:
        tree = parse(True, tokens, block_size)
    except ValueError as error:
        check_refusal(error, "num_speculative_tokens", "block_size", "ddtree.budget")
        return
    check_tree(tree)
    assert block_size is None or type(block_size) is int
    assert tokens is None or same(tokens, tree.depth)
    if tokens is None:
        assert tree.depth == block_size - 1


# Keys of SpeculativeConfig whose values vLLM checks; with "model" or "method" it would
# look for another draft.
VLLM_KEYS = (
    "num_speculative_tokens",
    "num_speculative_tokens_per_batch_size",
    "draft_sample_method",
    "rejection_sample_method",
    "enable_adaptive_verification",
    "use_local_argmax_reduction",
    "draft_tensor_parallel_size",
    "quantization",
    "max_model_len",
    "attention_backend",
)


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("fuzz")
    return write_target(folder / "target"), write_draft(folder / "draft")


def build(target: str, words: Any) -> tuple[Any, Exception | None]:
    """Return the config or the error of the front end."""
    try:
        return build_config(target, words), None
    except Exception as error:
        return None, error


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    words=st.fixed_dictionaries(
        {"ddtree": st.one_of(options, values)},
        optional={key: json_values for key in VLLM_KEYS},
    )
)
def test_speculative_config_of_arbitrary_words(pair, words):
    """Our errors are ValueErrors; others come from vLLM, which raises them alone."""
    target, draft = pair
    words = dict(method="dflash", model=draft, **words)
    config, error = build(target, copy.deepcopy(words))
    if error is None:
        tree = get_ddtree_config(config)
        if words["ddtree"] is False:
            assert tree is None
        elif tree is not None:
            check_tree(tree)
            assert tree.depth <= BLOCK_SIZE - 1
        else:
            assert words["ddtree"] is None, "a demanded tree gave way silently"
        return
    if isinstance(error, ValueError):
        names = ("ddtree", "DDTree", "num_speculative_tokens", *words)
        assert any(name in str(error) for name in names), error
        return
    chain = {key: value for key, value in words.items() if key != "ddtree"}
    chain.setdefault("num_speculative_tokens", 1)
    with_plugin_off = build_without_plugin(target, chain)
    assert type(with_plugin_off) is type(error), error


def build_without_plugin(target: str, words: Any) -> Exception | None:
    """Return what vLLM's own functions raise for the same words."""
    from vllm.engine.arg_utils import EngineArgs

    wrapped = EngineArgs.create_engine_config, EngineArgs.create_speculative_config
    EngineArgs.create_engine_config = patches.original("create_engine_config")
    EngineArgs.create_speculative_config = patches.original("create_speculative_config")
    try:
        EngineArgs(
            model=target,
            speculative_config=words,
            skip_tokenizer_init=True,
            max_model_len=256,
            enforce_eager=True,
            dtype="float32",
        ).create_engine_config()
    except Exception as error:
        return error
    finally:
        EngineArgs.create_engine_config, EngineArgs.create_speculative_config = wrapped
    return None


@settings(max_examples=100, deadline=None)
@given(words=values.filter(lambda value: value is not None))
def test_words_that_are_no_object(pair, words):
    if isinstance(words, dict) and all(isinstance(key, str) for key in words):
        return
    _, error = build(pair[0], words)
    assert isinstance(error, ValueError)
    check_refusal(error, "speculative_config")


def test_not_a_number_is_no_option():
    for value in (math.nan, math.inf, -math.inf, 1e400):
        for name in ("budget", "max_children"):
            with pytest.raises(ValueError, match=f"ddtree.{name} is out of range"):
                parse({name: value})
