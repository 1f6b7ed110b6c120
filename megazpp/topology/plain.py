"""Records as JSON and back: what comes back can be nothing but what the annotations say.

For what one process tells another through a store or a file that others can write to, where a pickle would run code.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from typing import Any, TypeVar

T = TypeVar("T")


def to_json(record: object) -> str:
    """A dataclass or NamedTuple of numbers, texts, None, tuples and further records, as JSON."""
    return json.dumps(_plain(record))


def from_json(kind: type[T], text: str | bytes) -> T:
    """The record of type `kind` that `to_json` has written.

    Raises:
        ValueError: it is something else.
    """
    try:
        return _record(kind, json.loads(text))
    except (ValueError, TypeError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise ValueError(f"{text[:80]!r} is no {kind.__name__}: {error}") from None


def _plain(value: Any) -> Any:
    if _is_record(value):
        return {name: _plain(getattr(value, name)) for name in typing.get_type_hints(type(value))}
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def _record(kind: Any, plain: Any) -> Any:
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return None if plain is None else _record(parts[0], plain)
    if origin is tuple:
        if not isinstance(plain, list):
            raise TypeError(f"{plain!r} is no list")
        return tuple(_record(parts[0], item) for item in plain)
    if _is_record(kind):
        fields = typing.get_type_hints(kind)
        if not isinstance(plain, dict) or plain.keys() != fields.keys():
            raise TypeError(f"{plain!r} has not the fields {', '.join(fields)}")
        return kind(**{name: _record(fields[name], item) for name, item in plain.items()})
    if type(plain) is not kind and not (kind is float and type(plain) is int):
        raise TypeError(f"{plain!r} is no {kind.__name__}")
    return kind(plain)


def _is_record(value: Any) -> bool:
    """Of a dataclass or NamedTuple, or an instance."""
    return dataclasses.is_dataclass(value) or hasattr(value, "_fields")
