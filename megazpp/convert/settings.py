"""The values of a config.json or of a checkpoint's arguments: each read with a check, and an error names its key."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

_LARGEST = 2**31 - 1


class Settings:
    """Values by key, as they were read from `where`, which messages name."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self._values, self.where = values, where

    def __contains__(self, key: str) -> bool:
        """Return whether it has a value other than null."""
        return self._values.get(key) is not None

    def __bool__(self) -> bool:
        """Return whether it has any key."""
        return bool(self._values)

    def is_null(self, key: str) -> bool:
        """Return whether the key is there, without a value."""
        return key in self._values and self._values[key] is None

    def one_of(self, key: str, alias: str) -> str:
        """Return the one of two names of a setting that is given; the first if none is."""
        if key in self and alias in self and self._values[key] != self._values[alias]:
            values = f"{key} {self._values[key]!r} and {alias} {self._values[alias]!r}"
            raise ValueError(f"{self.where}: {values} are two values for one setting")
        return alias if alias in self and key not in self else key

    def count(self, key: str, default: int | None = None) -> int:
        """A positive integer of a size that a model can have."""
        value = self._get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{self.where}: {key} {value!r} is not a positive integer")
        if value > _LARGEST:
            raise ValueError(f"{self.where}: {key} {value!r} is larger than any model's")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number."""
        value = self._get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise ValueError(f"{self.where}: {key} {value!r} is not a number")
        if not abs(value) <= sys.float_info.max:  # not NaN either, nor an integer that no float holds
            raise ValueError(f"{self.where}: {key} {value!r} is not a finite number")
        return float(value)

    def positive(self, key: str, default: float | None = None) -> float:
        """A finite number above zero."""
        value = self.number(key, default)
        if value <= 0.0:
            raise ValueError(f"{self.where}: {key} {value!r} is not positive")
        return value

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

    def each(self, key: str, *allowed: Any) -> None:
        """A list of which only some items exist here; no value is an empty list."""
        items = self._get(key, [])
        others = [item for item in items if item not in allowed] if isinstance(items, list) else [items]
        if others:
            known = f" (only {', '.join(map(str, allowed))})" if allowed else ""
            raise ValueError(f"{self.where}: {key} {others[0]!r} is not supported here{known}")

    def nothing_but(self, *keys: str) -> None:
        """No other keys than these have a value."""
        self.absent(*(key for key in self._values if key not in keys), empty=(None,))

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
