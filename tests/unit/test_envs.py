# SPDX-License-Identifier: Apache-2.0
"""Environment variables are read when used, and wrong values are named."""

import pytest

from vllm_dflash import envs


@pytest.mark.parametrize("name", list(envs.environment_variables))
def test_variables_are_named_after_the_plugin(name):
    assert name.startswith("VLLM_DFLASH_")
    assert name in dir(envs)


@pytest.mark.parametrize(
    ("raw", "value"),
    [("1", True), ("true", True), (" YES ", True), ("0", False), ("off", False)],
)
def test_switch_values(monkeypatch, raw, value):
    monkeypatch.setenv("VLLM_DFLASH_CPU", raw)
    assert envs.VLLM_DFLASH_CPU is value


def test_unset_switch_is_off_and_reading_is_lazy(monkeypatch):
    monkeypatch.delenv("VLLM_DFLASH_CPU", raising=False)
    assert envs.VLLM_DFLASH_CPU is False
    monkeypatch.setenv("VLLM_DFLASH_CPU", "1")
    assert envs.VLLM_DFLASH_CPU is True


def test_wrong_value_is_refused_by_name(monkeypatch):
    monkeypatch.setenv("VLLM_DFLASH_CPU", "maybe")
    with pytest.raises(ValueError, match=r"VLLM_DFLASH_CPU.*'maybe'.*0 and 1"):
        envs.VLLM_DFLASH_CPU  # noqa: B018


def test_unknown_variable_is_an_attribute_error():
    with pytest.raises(AttributeError, match="VLLM_DFLASH_NO_SUCH"):
        envs.VLLM_DFLASH_NO_SUCH  # noqa: B018
