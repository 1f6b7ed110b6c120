"""The values of a config.json or of a checkpoint's arguments: each read with a check, and an error names its key."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

_LARGEST = 2**31 - 1


class Settings:
    """Values by key, as they were read from `where`; messages name that, and keys with their `prefix`."""

    def __init__(self, values: Mapping[str, Any], where: str, prefix: str = "") -> None:
        self.values, self.where, self._prefix = values, where, prefix

    def __contains__(self, key: str) -> bool:
        """Return whether it has a value other than null."""
        return self.values.get(key) is not None

    def count(self, key: str, default: int | None = None) -> int:
        """A positive integer of a size that a model can have."""
        value = self._get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self._wrong(key, value, "is not a positive integer")
        if value > _LARGEST:
            raise self._wrong(key, value, "is larger than any model's")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number."""
        value = self._get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self._wrong(key, value, "is not a number")
        if not abs(value) <= sys.float_info.max:  # not NaN either, nor an integer that no float holds
            raise self._wrong(key, value, "is not a finite number")
        return float(value)

    def positive(self, key: str, default: float | None = None) -> float:
        """A finite number above zero."""
        value = self.number(key, default)
        if value <= 0.0:
            raise self._wrong(key, value, "is not positive")
        return value

    def truth(self, key: str, default: bool) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, value, "is not true or false")
        return value

    def text(self, key: str) -> str:
        return str(self._get(key, None))

    def only(self, key: str, *allowed: Any, default: Any = None) -> Any:
        """A value of which only some exist here."""
        value = self._get(key, default if default is not None else allowed[0])
        if value not in allowed:
            raise self._wrong(key, value, f"is not supported here (only {', '.join(map(str, allowed))})")
        return value

    def each(self, key: str, *allowed: Any) -> list[Any]:
        """Return a list, empty where there is no value; raises ValueError for an item that is not allowed."""
        items = self._get(key, [])
        for item in items if isinstance(items, list) else [items]:
            if item not in allowed or not isinstance(items, list):
                raise self._wrong(key, item, "is not supported here")
        return items

    def absent(self, *keys: str, empty: tuple[Any, ...] = (None, False)) -> None:
        """Keys of what does not exist here."""
        for key in keys:
            value = self.values.get(key)
            if not any(value is nothing or (nothing is not None and value == nothing) for nothing in empty):
                raise self._wrong(key, value, "is not supported here")

    def part(self, key: str) -> Settings:
        """The settings inside a value; none where there is no value."""
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
