"""Checked access to the values of a config.json or of a checkpoint's arguments; errors name the key."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

_LARGEST = 2**31 - 1


class Settings:
    """Values by key.

    Args:
        values: values of a file.
        where: name of the file, for messages.
        prefix: prefix of keys in messages.
    """

    def __init__(self, values: Mapping[str, Any], where: str, prefix: str = "") -> None:
        self.values, self.where, self._prefix = values, where, prefix

    def __contains__(self, key: str) -> bool:
        """Return True if the key is present and its value is not null."""
        return self.values.get(key) is not None

    def count(self, key: str, default: int | None = None) -> int:
        """Return the value of `key`, a positive integer; raise ValueError if it is larger than a model can have."""
        value = self._get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self._wrong(key, value, "is not a positive integer")
        if value > _LARGEST:
            raise self._wrong(key, value, "is larger than any model's")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return the value of `key` as a finite number; raise ValueError for any other value."""
        value = self._get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self._wrong(key, value, "is not a number")
        if not abs(value) <= sys.float_info.max:  # also rejects NaN and integers beyond fp64
            raise self._wrong(key, value, "is not a finite number")
        return float(value)

    def positive(self, key: str, default: float | None = None) -> float:
        """Return the value of `key` as a finite number above zero; raise ValueError for any other value."""
        value = self.number(key, default)
        if value <= 0.0:
            raise self._wrong(key, value, "is not positive")
        return value

    def truth(self, key: str, default: bool) -> bool:
        """Return the value of `key`, true or false; raise ValueError for any other value."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, value, "is not true or false")
        return value

    def text(self, key: str) -> str:
        """Return the value of `key` as text; raise ValueError if it is missing."""
        return str(self._get(key, None))

    def only(self, key: str, *allowed: Any) -> Any:
        """Return the value of `key`; raise ValueError if it is not in `allowed`, whose first item is the default."""
        value = self._get(key, allowed[0])
        if value not in allowed:
            raise self._wrong(key, value, f"is not supported here (only {', '.join(map(str, allowed))})")
        return value

    def each(self, key: str, *allowed: Any) -> list[Any]:
        """Return a list, empty where there is no value; raise ValueError for an item that is not allowed."""
        items = self._get(key, [])
        for item in items if isinstance(items, list) else [items]:
            if item not in allowed or not isinstance(items, list):
                raise self._wrong(key, item, "is not supported here")
        return items

    def absent(self, *keys: str, empty: tuple[Any, ...] = (None, False)) -> None:
        """Raise ValueError if a key of an unsupported feature has a value other than those in `empty`."""
        for key in keys:
            value = self.values.get(key)
            if not any(value is nothing or (nothing is not None and value == nothing) for nothing in empty):
                raise self._wrong(key, value, "is not supported here")

    def part(self, key: str) -> Settings:
        """Return the settings nested under a key; empty settings if it has no value."""
        value = self._get(key, {})
        if not isinstance(value, Mapping):
            raise self._wrong(key, value, "holds no settings")
        return Settings(value, self.where, f"{key}.")

    def _get(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        value = default if value is None else value
        if value is None:
            raise ValueError(f"{self.where}: {self._prefix}{key} is missing")
        return value

    def _wrong(self, key: str, value: Any, problem: str) -> ValueError:
        return ValueError(f"{self.where}: {self._prefix}{key} {value!r} {problem}")
