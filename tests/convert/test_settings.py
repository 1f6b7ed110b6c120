"""Settings are read with a check, and an error names the file and the key."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from megazpp.convert.settings import Settings

SETTINGS = Settings(
    {
        "n": 3,
        "x": 0.5,
        "b": False,
        "nothing": None,
        "words": "abc",
        "inner": {"n": 4},
        "minus": -1,
        "list": [1],
        "vast": 10**400,
        "nan": math.nan,
    },
    "file",
)


def test_values_and_defaults():
    assert (SETTINGS.count("n"), SETTINGS.count("nothing", 7), SETTINGS.count("absent", 8)) == (3, 7, 8)
    assert (SETTINGS.number("x", 1.0), SETTINGS.number("n", 1.0), SETTINGS.number("absent", 1.5)) == (0.5, 3.0, 1.5)
    assert (SETTINGS.truth("b", True), SETTINGS.truth("nothing", True)) == (False, True)
    assert (SETTINGS.only("words", "x", "abc"), SETTINGS.only("absent", "x", "abc")) == ("abc", "x")
    assert (SETTINGS.positive("x"), SETTINGS.positive("absent", 2.0)) == (0.5, 2.0)
    assert (SETTINGS.one_of("n", "absent"), SETTINGS.one_of("absent", "n"), SETTINGS.one_of("a", "b2")) == (
        "n",
        "n",
        "a",
    )
    assert (SETTINGS.is_null("nothing"), SETTINGS.is_null("absent"), SETTINGS.is_null("n")) == (True, False, False)
    assert (bool(SETTINGS.part("inner")), bool(SETTINGS.part("absent"))) == (True, False)
    SETTINGS.each("list", 1, 2)
    SETTINGS.each("absent", 1)
    SETTINGS.part("inner").nothing_but("inner.n")
    assert SETTINGS.part("inner").count("inner.n") == 4
    assert "inner.n" not in SETTINGS.part("absent")
    assert ("n" in SETTINGS, "nothing" in SETTINGS) == (True, False)
    SETTINGS.absent("b", "nothing", "absent")


REFUSED: list[tuple[Callable[[Settings], Any], str]] = [
    (lambda s: s.count("absent"), "file: absent is missing"),
    (lambda s: s.count("minus"), "file: minus -1 is not a positive integer"),
    (lambda s: s.count("b"), "file: b False is not a positive integer"),
    (lambda s: s.count("x"), "file: x 0.5 is not a positive integer"),
    (lambda s: s.number("words", 1.0), "file: words 'abc' is not a number"),
    (lambda s: s.count("vast"), f"file: vast {10**400} is larger than any model's"),
    (lambda s: s.number("vast"), f"file: vast {10**400} is not a finite number"),
    (lambda s: s.number("nan"), "file: nan nan is not a finite number"),
    (lambda s: s.number("absent"), "file: absent is missing"),
    (lambda s: s.positive("minus"), "file: minus -1.0 is not positive"),
    (lambda s: s.one_of("n", "x"), "file: n 3 and x 0.5 are two values for one setting"),
    (lambda s: s.each("list", 2), r"file: list 1 is not supported here \(only 2\)"),
    (lambda s: s.each("n", 3), r"file: n 3 is not supported here"),
    (lambda s: s.part("inner").nothing_but("inner.m"), "file: inner.n 4 is not supported here"),
    (lambda s: s.truth("n", True), "file: n 3 is not true or false"),
    (lambda s: s.only("list", "x", "y"), r"file: list \[1\] is not supported here \(only x, y\)"),
    (lambda s: s.absent("b", "n"), "file: n 3 is not supported here"),
    (lambda s: s.part("words"), "file: words 'abc' holds no settings"),
    (lambda s: s.part("inner").only("inner.n", 5), "file: inner.n 4 is not supported here"),
]


def test_what_is_wrong_is_named():
    for read, message in REFUSED:
        with pytest.raises(ValueError, match=f"^{message}"):
            read(SETTINGS)
