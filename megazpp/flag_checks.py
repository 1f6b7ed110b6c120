"""Checks that many flags have in common; each error names the flag and its value."""

from __future__ import annotations

import dataclasses
from typing import Any

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
