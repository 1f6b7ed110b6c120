"""Choose the test cases of the default tier: as few of a grid as contain every pair of two settings."""

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import pytest


def slow(*values: Any) -> Any:
    """Return test parameters that only the slow tier runs."""
    return pytest.param(*values, marks=pytest.mark.slow)


def chosen(cases: Mapping[str, Any], *default: str) -> list[Any]:
    """Return the named cases of a grid with their names as ids; those not in `default` run in the slow tier."""
    assert {*default} <= {*cases}, f"{default} are not all among {[*cases]}"
    marks = {name: [] if name in default else [pytest.mark.slow] for name in cases}
    return [pytest.param(case, id=name, marks=marks[name]) for name, case in cases.items()]


def pairwise(grid: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Return the cases of `grid` as test parameters; those that add no new pair of values are marked slow.

    Greedy: the next case is always the one that adds the most pairs. The result is small, but not always minimal.
    """
    cases = list(grid)
    missing = set().union(*(_pairs(case) for case in cases))
    default: set[int] = set()
    while missing:
        best = max(range(len(cases)), key=lambda number: len(_pairs(cases[number]) & missing))
        default.add(best)
        missing -= _pairs(cases[best])
    return [pytest.param(*case) if number in default else slow(*case) for number, case in enumerate(cases)]


def _pairs(case: tuple[Any, ...]) -> set[Any]:
    settings = [(place, repr(value)) for place, value in enumerate(case)]
    return set(itertools.combinations(settings, 2))
