"""Checked access to a model's settings: the values of a config.json, or the arguments in a Megatron-LM checkpoint."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

_LARGEST = 2**31 - 1  # largest size in a model's settings that is accepted


class Settings:
    """The values of a config.json, or the arguments in a Megatron-LM checkpoint. Each method checks the value it reads.

    A value of null counts as missing. All errors name the file and the key.

    Args:
        values: values by key.
        where: name of the file, for messages.
        prefix: prefix of keys in messages, for settings that are nested under another key.
    """

    def __init__(self, values: Mapping[str, Any], where: str, prefix: str = "") -> None:
        self.values, self.where, self._prefix = values, where, prefix

    def __contains__(self, key: str) -> bool:
        """Return True if the settings have a value for `key` that is not null."""
        return self.values.get(key) is not None

    def count(self, key: str, default: int | None = None) -> int:
        """Return the value of `key`, such as a size; raise ValueError if it is not an integer from 1 to 2**31 - 1.

        `default` replaces a missing value. Without a default, a missing value is an error.
        """
        value = self._get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self._wrong(key, value, "is not a positive integer")
        if value > _LARGEST:
            raise self._wrong(key, value, f"is above {_LARGEST}, which no model reaches")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return the value of `key` as a float; raise ValueError if it is not a finite number.

        `default` replaces a missing value. Without a default, a missing value is an error.
        """
        value = self._get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self._wrong(key, value, "is not a number")
        if not abs(value) <= sys.float_info.max:  # also rejects NaN and integers beyond fp64
            raise self._wrong(key, value, "is not a finite number")
        return float(value)

    def positive(self, key: str, default: float | None = None) -> float:
        """Return the value of `key` as a float; raise ValueError if it is not a finite number above zero.

        `default` replaces a missing value. Without a default, a missing value is an error.
        """
        value = self.number(key, default)
        if value <= 0.0:
            raise self._wrong(key, value, "is not positive")
        return value

    def truth(self, key: str, default: bool) -> bool:
        """Return the value of `key`, or `default` without a value; raise ValueError for a value that is no bool."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, value, "is not true or false")
        return value

    def text(self, key: str) -> str:
        """Return the value of `key` as a string; raise ValueError if the value is missing."""
        return str(self._get(key, None))

    def only(self, key: str, *allowed: Any) -> Any:
        """Return the value of `key`; raise ValueError if it is not one of `allowed`, the values that are supported.

        The first of `allowed` replaces a missing value.
        """
        value = self._get(key, allowed[0])
        if value not in allowed:
            raise self._wrong(key, value, f"is not supported; supported values are {', '.join(map(str, allowed))}")
        return value

    def each(self, key: str, *allowed: Any) -> list[Any]:
        """Return the list at `key` of the model's config.json, with one item per layer; [] if the key is missing.

        Raises:
            ValueError: an item is not in `allowed`, or the value is not a list.
        """
        items = self._get(key, [])
        for item in items if isinstance(items, list) else [items]:
            if item not in allowed or not isinstance(items, list):
                raise self._wrong(key, item, f"is not supported; supported values are {', '.join(map(str, allowed))}")
        return items

    def absent(self, *keys: str, empty: tuple[Any, ...] = (None, False)) -> None:
        """Raise ValueError if one of `keys`, which belong to features that are not supported, enables its feature.

        Args:
            keys: keys to check. A missing key is accepted.
            empty: values that leave the feature off.
        """
        for key in keys:
            value = self.values.get(key)
            if not any(value is nothing or (nothing is not None and value == nothing) for nothing in empty):
                raise self._wrong(key, value, "is not supported, because it enables a feature that this program lacks")

    def part(self, key: str) -> Settings:
        """Return the settings nested under `key`, such as `rope_parameters`; empty settings if the value is missing."""
        value = self._get(key, {})
        if not isinstance(value, Mapping):
            raise self._wrong(key, value, "is not a set of keys with values")
        return Settings(value, self.where, f"{key}.")

    def _get(self, key: str, default: Any) -> Any:
        """Return the value of the setting `key`, or `default` if the value is missing.

        If the value is missing and `default` is None, raise ValueError.
        """
        value = self.values.get(key)
        value = default if value is None else value
        if value is None:
            raise ValueError(f"{self.where}: {self._prefix}{key} is missing, but the model needs it")
        return value

    def _wrong(self, key: str, value: Any, problem: str) -> ValueError:
        """Return the error for a wrong value of setting `key`. `problem` ends the message, such as "is not true"."""
        return ValueError(f"{self.where}: {self._prefix}{key} {value!r} {problem}")
