"""Test the order of samples in a blend of datasets.

C and Python code agree with Megatron's loop for any number of datasets.
"""

import itertools
import shutil
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megazpp.kernels import blend_order as module
from megazpp.kernels import c_library
from megazpp.kernels.blend_order import blend_order, native, reference
from megazpp.kernels.c_library import CLibrary

needs_compiler = pytest.mark.skipif(not any(map(shutil.which, c_library.COMPILERS)), reason="needs a C compiler")
PLANS = [
    pytest.param(native.plan, marks=needs_compiler, id="C"),
    pytest.param(reference.plan, id="Python"),
]


def megatrons_loop(weights: np.ndarray, num_samples: int) -> tuple[np.ndarray, np.ndarray]:
    """Order samples like Megatron: take sample n from the dataset with the largest share * max(n, 1) - taken.

    A dataset's share is its normalized weight, and `taken` the number of samples that were taken from it before n.
    Return for each sample the index of its dataset, and its number within the dataset.
    """
    shares, taken = weights / np.sum(weights), np.zeros(len(weights))
    datasets, numbers = np.empty(num_samples, dtype=np.int16), np.empty(num_samples, dtype=np.int64)
    for n in range(num_samples):
        chosen = int(np.argmax(shares * max(n, 1) - taken))
        datasets[n], numbers[n] = chosen, taken[chosen]
        taken[chosen] += 1
    return datasets, numbers


def planned(plan: Callable, weights: np.ndarray, num_samples: int, *cuts: int) -> tuple[np.ndarray, np.ndarray]:
    """Plan the samples by several calls of `plan`, one for each range of samples that ends at one of `cuts`."""
    # the C code needs a multiple of AT_ONCE datasets; a dataset that has provided infinitely many samples is not chosen
    padding = (0, -len(weights) % native.AT_ONCE)
    shares = np.pad(weights / np.sum(weights), padding)
    taken = np.pad(np.zeros(len(weights)), padding, constant_values=np.inf)
    datasets, numbers = np.empty(num_samples, dtype=np.int16), np.empty(num_samples, dtype=np.int64)
    for first, last in itertools.pairwise((0, *cuts, num_samples)):
        plan(shares, taken, first, datasets[first:last], numbers[first:last])
    return datasets, numbers


def same(plan: Callable, weights: np.ndarray, num_samples: int, *cuts: int) -> bool:
    pairs = zip(planned(plan, weights, num_samples, *cuts), megatrons_loop(weights, num_samples), strict=True)
    return all(np.array_equal(one, other) for one, other in pairs)


@pytest.mark.parametrize("plan", PLANS)
def test_planner_matches_megatrons_loop_for_many_datasets(plan):
    random = np.random.default_rng(3)
    for count in (1, 2, 16, 17, 63, 400):
        for weights in (
            np.ones(count),
            random.lognormal(0, 2, count),  # weights spread over orders of magnitude, like the sizes of files
            # many equal weights, so that datasets are often exactly equally far behind
            random.integers(1, 5, count).astype(float),
            # one very large dataset, and others with nearly equal weights
            np.concatenate([[1e6], 1 + 1e-9 * random.random(count)]),
            random.permutation(1.0 + np.arange(count)),
        ):
            assert same(plan, weights, 1500, 1, 2, 700), (count, weights[:3])


@pytest.mark.parametrize("plan", PLANS)
@settings(max_examples=60, deadline=None)
@given(
    weights=st.lists(st.floats(1e-3, 1e3) | st.integers(1, 3).map(float), min_size=1, max_size=200),
    num_samples=st.integers(0, 300),
    cut=st.integers(0, 300),
)
def test_planner_matches_megatrons_loop_for_any_weights_and_parts(plan, weights, num_samples, cut):
    assert same(plan, np.array(weights), num_samples, min(cut, num_samples))


def test_blend_order_without_compiler_uses_python_and_logs_progress(monkeypatch):
    moments, lines = itertools.count(step=2.0), list[str]()
    monkeypatch.setattr(native, "library", lambda: CLibrary(missing="no C compiler found"))
    monkeypatch.setattr(module, "_AT_ONCE", 1600)
    datasets, numbers = blend_order([0.2, 0.3, 0.5], 450, say=lines.append, clock=lambda: next(moments))
    expected = megatrons_loop(np.array([0.2, 0.3, 0.5]), 450)
    assert (datasets.tolist(), numbers.tolist()) == (expected[0].tolist(), expected[1].tolist())
    how = "blend of 3 datasets in Python (no C compiler found)"
    assert lines == [f"{how}: 200 of 450 samples, 5 s left", f"{how}: 400 of 450 samples, 1 s left"]


@needs_compiler
def test_blend_order_below_three_seconds_logs_nothing(monkeypatch):
    monkeypatch.setattr(module, "_AT_ONCE", 10)
    moments, lines = itertools.count(step=0.1), list[str]()
    blend_order([1.0, 2.0], 290, say=lines.append, clock=lambda: next(moments))
    assert lines == []
