"""Choose the test cases of the three tiers: the default tier, the slow tier and the nightly tier.

Of a grid of settings, the default tier gets a small number of cases, which contain each pair of values of any two
settings.
"""

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import pytest


def slow(*values: Any) -> Any:
    """Mark a test case as one that only the slow tier runs; `values` are its parameters."""
    return pytest.param(*values, marks=pytest.mark.slow)


def nightly(*values: Any) -> Any:
    """Mark a test case as one that only the nightly tier runs; `values` are its parameters."""
    return pytest.param(*values, marks=pytest.mark.nightly)


def chosen(cases: Mapping[str, Any], *default: str, slow: Iterable[str] | None = None) -> list[Any]:
    """Return all named cases as test parameters, marked with their tiers; the names become the test ids.

    Args:
        cases: all cases by name.
        default: names of the cases that the default tier runs.
        slow: names of the cases that the slow tier runs; the nightly tier then runs all remaining cases. None puts all
            remaining cases into the slow tier.
    """
    slow = {*cases} if slow is None else {*slow}
    assert {*default} | slow <= {*cases}, f"{default} and {slow} are not all among {[*cases]}"
    tiers = {name: [pytest.mark.slow if name in slow else pytest.mark.nightly] for name in {*cases} - {*default}}
    return [pytest.param(case, id=name, marks=tiers.get(name, [])) for name, case in cases.items()]


def pairwise(grid: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Return the cases of `grid` as test parameters, with marks such that the default tier tests all pairs of values.

    A case is marked slow if the cases of the default tier already contain each pair of its values. The choice is
    greedy: the next case is always the one that adds the most new pairs. The result is small, but not always minimal.
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
