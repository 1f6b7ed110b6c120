"""Fixtures of the data tests."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.process import BaseProcess

import pytest


@pytest.fixture
def new_children() -> Callable[[], list[BaseProcess]]:
    """Child processes that the test has started: not the rank pools of tests before it, which other tests still use."""
    before = multiprocessing.active_children()
    return lambda: [process for process in multiprocessing.active_children() if process not in before]
