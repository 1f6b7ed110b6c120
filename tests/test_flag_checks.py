"""Checks that many flags have in common."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest

from megazpp.flag_checks import check_not_negative, check_positive
from megazpp.flags import flag


@dataclass(frozen=True, kw_only=True)
class Config:
    how_many: float | None = flag(None, "a number")
    odd: int = flag(1, "a number", name="--odd_spelling")


@pytest.mark.parametrize("value", [None, 1, 0.5, math.inf])
def test_what_is_positive_or_not_given_passes(value: float | None):
    check_positive(Config(how_many=value), "how_many", "odd")
    check_not_negative(Config(how_many=value), "how_many", "odd")
    check_not_negative(Config(how_many=0), "how_many")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"how_many": 0}, "--how-many 0 is not positive"),
        ({"how_many": math.nan}, "--how-many nan is not positive"),
        ({"odd": -1}, "--odd_spelling -1 is not positive"),
    ],
)
def test_what_is_not_positive_is_refused_by_the_flag_s_spelling(values: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=f"^{message}$"):
        check_positive(Config(**values), "how_many", "odd")


def test_what_is_negative_is_refused_by_the_flag_s_spelling():
    for value in (-1, math.nan):
        with pytest.raises(ValueError, match=f"^--how-many {value} is negative$"):
            check_not_negative(Config(how_many=value), "how_many")
