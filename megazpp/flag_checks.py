"""Checks that many flags have in common; each error names the flag and its value."""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any, Literal

from megazpp.flags import flag_name


def check_positive(config: Any, *names: str) -> None:
    """Raises ValueError for the first of these fields whose value is given and not above 0."""
    for name in names:
        value = getattr(config, name)
        if value is not None and not value > 0:
            raise ValueError(f"{spelling(config, name)} {value} is not positive")


def check_not_negative(config: Any, *names: str) -> None:
    """Raises ValueError for the first of these fields whose value is given and not at least 0."""
    for name in names:
        value = getattr(config, name)
        if value is not None and not value >= 0:
            raise ValueError(f"{spelling(config, name)} {value} is negative")


def spelling(config: Any, name: str) -> str:
    """The flag of a config's field, as it is written."""
    return next(flag_name(field) for field in dataclasses.fields(config) if field.name == name)


def wrong_types(config: type, values: dict[str, Any]) -> list[str]:
    """A line for each of `values`, as JSON has them, that a field of this dataclass cannot hold; others are ignored."""
    hints = typing.get_type_hints(config)
    return [
        f"{name} is {value!r:.80}, not {getattr(hints[name], '__name__', None) or hints[name]}"
        for name, value in values.items()
        if name in hints and not _has_type(value, hints[name])
    ]


def _has_type(value: Any, hint: Any) -> bool:
    """Whether `value` is what `hint` says; an int is a float, but no bool is a number, and a list is a tuple."""
    kind, parts = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return True
    if kind in (typing.Union, types.UnionType):
        return any(_has_type(value, part) for part in parts)
    if kind is Literal:
        return any(type(value) is type(part) and value == part for part in parts)
    if kind is tuple:
        items = parts[:1] * len(value) if isinstance(value, (tuple, list)) and parts[-1] is ... else parts
        return isinstance(value, (tuple, list)) and _have_types(value, items)
    if kind is list:
        return isinstance(value, list) and _have_types(value, parts * len(value))
    if kind is dict:
        return isinstance(value, dict) and _have_types([*value.values()], parts[1:] * len(value))
    if isinstance(value, bool) or hint is bool:
        return isinstance(value, bool) and hint is bool
    return isinstance(value, (int, float) if hint is float else hint)


def _have_types(values: Any, hints: Any) -> bool:
    return len(values) == len(hints) and all(map(_has_type, values, hints))
