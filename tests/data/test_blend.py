"""Blending follows the weights, in Megatron's order."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megazpp.data.blend import BlendedDataset, blend_indices, parse_blend
from megazpp.data.gpt_dataset import GPTDataset


class Constant:
    """One document of a single id over and over."""

    def __init__(self, token: int, length: int) -> None:
        self.ids = np.full(length, token)
        self.lengths = np.array([length], dtype=np.int32)

    def get(self, index: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        return self.ids[offset : None if length is None else offset + length]


def naive_blend(weights: list[float], n: int) -> list[tuple[int, int]]:
    """Take each sample from the dataset that is furthest behind its share, the first of them in a tie."""
    shares = (np.array(weights) / np.sum(weights)).tolist()
    taken, result = [0] * len(weights), []
    for i in range(n):
        best, best_error = 0, shares[0] * max(i, 1) - taken[0]
        for d in range(1, len(weights)):
            error = shares[d] * max(i, 1) - taken[d]
            if error > best_error:
                best, best_error = d, error
        result.append((best, taken[best]))
        taken[best] += 1
    return result


@settings(max_examples=60)
@given(
    weights=st.lists(st.floats(0.01, 10) | st.integers(1, 5).map(float), min_size=1, max_size=6),
    n=st.integers(1, 80),
)
def test_blend_indices_equal_the_naive_ones(weights: list[float], n: int) -> None:
    datasets, samples = blend_indices(weights, n)
    assert list(zip(datasets.tolist(), samples.tolist(), strict=True)) == naive_blend(weights, n)


def test_blend_indices_are_those_megatron_core_0_16_1_built_for_the_same_weights() -> None:
    datasets, samples = blend_indices([0.2, 0.3, 0.5], 12)
    assert datasets.tolist() == [2, 1, 0, 2, 1, 2, 0, 2, 1, 2, 0, 2]
    assert samples.tolist() == [0, 0, 0, 1, 1, 2, 1, 3, 2, 4, 2, 5]


@settings(max_examples=30)
@given(weights=st.lists(st.floats(0.1, 10), min_size=2, max_size=5))
def test_every_prefix_has_the_proportions_to_within_one_sample_per_dataset(weights: list[float]) -> None:
    datasets, _ = blend_indices(weights, 300)
    for n in (1, 7, 100, 300):
        counts = np.bincount(datasets[:n], minlength=len(weights))
        assert np.abs(counts - n * np.array(weights) / sum(weights)).max() < len(weights)


def test_samples_and_token_counts_come_in_the_proportions() -> None:
    datasets = [
        GPTDataset(Constant(token, 400), (0, 1), num_samples=90, seq_length=4, seed=0, name=str(token))
        for token in (3, 5)
    ]
    blended = BlendedDataset(datasets, *blend_indices([0.25, 0.75], 100))
    tokens = [int(blended[i][0]) for i in range(len(blended))]
    assert (tokens.count(3), tokens.count(5)) == (25, 75)
    counts = blended.token_counts(8)
    np.testing.assert_allclose(counts / counts.sum(), [0, 0, 0, 0.25, 0, 0.75, 0, 0])
    with pytest.raises(IndexError, match="sample 100 of 100"):
        blended[100]


@pytest.mark.parametrize(
    ("values", "prefixes", "weights"),
    [
        ("A", ("A",), None),
        ("A B", ("A", "B"), None),
        ("A B C", ("A", "B", "C"), None),
        ("0.3 A 0.7 B", ("A", "B"), (0.3, 0.7)),
        ("30 A 70 B", ("A", "B"), (30.0, 70.0)),
        ("1 A", ("A",), (1.0,)),
        ("", (), None),
    ],
)
def test_data_paths_are_read_with_and_without_weights(
    values: str, prefixes: tuple[str, ...], weights: tuple[float, ...] | None
) -> None:
    assert parse_blend(values.split(), flag_name="--data-path") == (prefixes, weights)


@pytest.mark.parametrize("values", ["0.3 A B", "A 0.3 B 0.7", "0.3 A 0.7", "0 A 1 B", "-1 A 2 B", "nan A 1 B", "inf A"])
def test_bad_weights_are_refused_with_the_flag_and_its_value(values: str) -> None:
    with pytest.raises(ValueError, match=f"--train-data-path {values}: .*weight"):
        parse_blend(values.split(), flag_name="--train-data-path")
