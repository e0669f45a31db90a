# SPDX-License-Identifier: Apache-2.0
"""From the words of a YAML file to dataclasses, by their annotations."""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any, Literal

from vllm_dflash.errors import option_error


def set_word(words: dict[str, Any], keys: list[str], value: Any) -> None:
    """Change the value that the keys lead to.

    Raises:
        ValueError: One of them is not a section.
    """
    for number, key in enumerate(keys[:-1], 1):
        held = words.get(key)
        if held is None or held is True:
            # Nothing yet, or a section that was only switched on.
            words[key] = {}
        elif not isinstance(held, dict):
            raise wrong_value(".".join(keys[:number]), held, "a section with keys")
        words = words[key]
    words[keys[-1]] = value


def parse(kind: type, words: Any, place: str) -> Any:
    """Build a dataclass; unknown and missing keys and wrong types are refused.

    Args:
        kind: The dataclass.
        words: Its values.
        place: What messages call them.

    Raises:
        ValueError: Something is wrong with a value.
    """
    if not isinstance(words, dict):
        raise wrong_value(place, words, f"the keys {', '.join(_names(kind))}")
    unknown = sorted(set(words) - set(_names(kind)))
    if unknown:
        raise wrong_value(f"{place}.{unknown[0]}", words[unknown[0]], _names(kind))
    hints = typing.get_type_hints(kind)
    values = {
        name: _value(hints[name], value, f"{place}.{name}")
        for name, value in words.items()
    }
    missing = [
        f.name
        for f in dataclasses.fields(kind)
        if f.name not in values
        and f.default is dataclasses.MISSING
        and f.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise wrong_value(f"{place}.{missing[0]}", None, "a value: it has no default")
    return kind(**values)


def _names(kind: type) -> list[str]:
    return [f.name for f in dataclasses.fields(kind)]


def _value(hint: Any, value: Any, place: str) -> Any:
    origin = typing.get_origin(hint)
    if dataclasses.is_dataclass(hint):
        return parse(hint, value, place)  # type: ignore[arg-type]
    if origin is types.UnionType:
        if value is None and types.NoneType in typing.get_args(hint):
            return None
        hint = next(a for a in typing.get_args(hint) if a is not types.NoneType)
        if dataclasses.is_dataclass(hint) and isinstance(value, bool):
            # A section that may be left out is a switch too.
            return parse(hint, {}, place) if value else None  # type: ignore[arg-type]
        return _value(hint, value, place)
    if origin is Literal:
        if value not in typing.get_args(hint):
            raise wrong_value(place, value, typing.get_args(hint))
        return value
    if origin is dict:
        if not isinstance(value, dict):
            raise wrong_value(place, value, "a mapping")
        return value
    if origin is list:
        if not isinstance(value, list):
            raise wrong_value(place, value, "a list")
        (item,) = typing.get_args(hint)
        return [_value(item, v, f"{place}[{i}]") for i, v in enumerate(value)]
    if hint is float and isinstance(value, int | str) and not isinstance(value, bool):
        # YAML reads 6e-4 as a string.
        try:
            return float(value)
        except ValueError:
            raise wrong_value(place, value, "a number") from None
    is_bool = isinstance(value, bool)
    if not isinstance(value, hint) or (is_bool and hint is not bool):
        raise wrong_value(place, value, f"a value of type {hint.__name__}")
    return value


def wrong_value(place: str, value: Any, allowed: Any) -> ValueError:
    """What is wrong at a place, and what is allowed there."""
    if not isinstance(allowed, str):
        allowed = ", ".join(str(a) for a in allowed)
    name = place.lstrip(".") or "the config"
    return option_error(
        f"{name} is wrong (got {value!r})",
        f"Allowed: {allowed}",
        "a value of docs/training.md",
    )
