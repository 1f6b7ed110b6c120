"""The values of a config.json or of a checkpoint's arguments: each read with a check, and an error names its key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class Settings:
    """Values by key.

    Args:
        values: as they were read.
        where: the file, for messages.
    """

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self._values, self.where = values, where

    def __contains__(self, key: str) -> bool:
        """Whether it has a value other than null."""
        return self._values.get(key) is not None

    def count(self, key: str, default: int | None = None) -> int:
        """A positive integer."""
        value = self._get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{self.where}: {key} {value!r} is not a positive integer")
        return value

    def number(self, key: str, default: float) -> float:
        value = self._get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise ValueError(f"{self.where}: {key} {value!r} is not a number")
        return float(value)

    def truth(self, key: str, default: bool) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise ValueError(f"{self.where}: {key} {value!r} is not true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        return str(self._get(key, default))

    def only(self, key: str, *allowed: Any, default: Any = None) -> Any:
        """A value of which only some exist here."""
        value = self._get(key, default if default is not None else allowed[0])
        if value not in allowed:
            known = ", ".join(str(choice) for choice in allowed)
            raise ValueError(f"{self.where}: {key} {value!r} is not supported here (only {known})")
        return value

    def absent(self, *keys: str, empty: tuple[Any, ...] = (None, False)) -> None:
        """Keys of what does not exist here."""
        for key in keys:
            value = self._values.get(key)
            if not any(value is nothing or (nothing is not None and value == nothing) for nothing in empty):
                raise ValueError(f"{self.where}: {key} {value!r} is not supported here")

    def part(self, key: str) -> Settings:
        """The settings inside a value; none where there is no value."""
        value = self._get(key, {})
        if not isinstance(value, Mapping):
            raise ValueError(f"{self.where}: {key} {value!r} holds no settings")
        return Settings({f"{key}.{name}": inner for name, inner in value.items()}, self.where)

    def _get(self, key: str, default: Any) -> Any:
        value = self._values.get(key)
        if value is None:
            value = default
        if value is None:
            raise ValueError(f"{self.where}: {key} is missing")
        return value
