"""Test blends of data sources.

Samples follow the weights in Megatron's order, and each source's indices are built once.
"""

import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.pairs import Lists, write_pair
from helpers.refusals import not_refused
from hypothesis import given, settings
from hypothesis import strategies as st

from megazpp.data.blend import DataSource, MockSequences, TokenRange, build_split, fit_for_split, open_sources
from megazpp.data.config import parse_blend
from megazpp.data.gpt_dataset import GPTDataset
from megazpp.kernels.blend_order import blend_order


@settings(max_examples=60)
@given(
    weights=st.lists(st.floats(0.01, 10) | st.integers(1, 5).map(float), min_size=1, max_size=6),
    n=st.integers(1, 80),
)
def test_each_sample_is_from_the_dataset_furthest_behind_its_share(weights, n):
    shares, taken = np.array(weights) / np.sum(weights), np.zeros(len(weights), dtype=np.int64)
    for i, (dataset, sample) in enumerate(zip(*blend_order(weights, n, say=print), strict=True)):
        # the next sample is from the dataset furthest behind its share, the first one of several such datasets
        assert dataset == np.argmax(shares * max(i, 1) - taken)
        assert sample == taken[dataset]
        taken[dataset] += 1
    assert taken.sum() == n


def test_blend_order_matches_megatron_core_0_16_1():
    datasets, samples = blend_order([0.2, 0.3, 0.5], 12, say=print)
    assert datasets.tolist() == [2, 1, 0, 2, 1, 2, 0, 2, 1, 2, 0, 2]
    assert samples.tolist() == [0, 0, 0, 1, 1, 2, 1, 3, 2, 4, 2, 5]


def test_data_paths_parse_with_or_without_weights_or_are_rejected():
    for values, prefixes, weights in (
        ("A B C", ("A", "B", "C"), None),
        ("0.3 A 0.7 B", ("A", "B"), (0.3, 0.7)),
        ("1 A", ("A",), (1.0,)),
        ("", (), None),
    ):
        assert parse_blend(values.split(), flag_name="--data-path") == (prefixes, weights), values
    some, positive = "give a weight before every dataset, or before none", "weights must be positive numbers"
    wrong = dict.fromkeys(["0.3 A B", "A 0.3 B 0.7", "0.3 A 0.7"], some)
    wrong |= dict.fromkeys(["0 A 1 B", "-1 A 2 B", "nan A 1 B", "inf A"], positive)
    rows = [(values, f"--train-data-path {values}: {reason}") for values, reason in wrong.items()]
    ours = f"{some}; a number is read as a weight, so a dataset with the name 2020 has to be given as ./2020"
    rows += [(values, ours) for values in ("2020", "2020 A B", "A 2020")]
    assert not not_refused(rows, lambda values: parse_blend(values.split(), flag_name="--train-data-path"))


def test_more_datasets_than_a_blend_can_number_are_rejected():
    with pytest.raises(ValueError, match="--data-path names 32768 datasets, but a blend has at most 32767"):
        open_sources(["a"] * 32768, flag_name="--data-path")


def test_numeric_dataset_names_are_not_read_as_weights(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for prefix in ("2020", "2021"):
        write_pair(tmp_path / prefix, [[1] * 16])
    with pytest.raises(
        ValueError, match=r"2020 2021: the weight 2020 is also the name of a dataset; .* given as \./2020"
    ):
        open_sources(["2020", "2021"], flag_name="--data-path")
    sources, weights = open_sources(["2020", "./2020", "1", "./2021"], flag_name="--data-path")
    assert (len(sources), weights) == (2, (2020.0, 1.0))
    assert open_sources(["./2020", "./2021"], flag_name="--data-path")[1] is None


# ---- samples of a training, validation or test split ------------------------------------------------------------


SPLIT = ((0.0, 0.5), (0.5, 0.97), (0.97, 1.0))


def write(prefix: Path, *, documents: int, length: int = 16, first_id: int = 0) -> str:
    return str(write_pair(prefix, [[first_id + d] * length for d in range(documents)]))


def split_of(folder: Path, sources: Sequence[DataSource], bounds: tuple[float, float] = (0.0, 1.0), **how: Any) -> Any:
    """Build the dataset of one split, with its index cache in `folder`.

    By default the dataset has 40 samples with a sequence length of 8 tokens. `how` replaces arguments of `build_split`.
    """
    options = {"weights": None, "num_samples": 40, "seq_length": 8, "seed": 1, "vocab_size": 100}
    return build_split("train", sources, bounds=bounds, cache_path=folder / "cache", **(options | how))


def sources_of(*prefixes: str) -> list[DataSource]:
    return open_sources(prefixes, flag_name="--data-path")[0]


def cached(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_ino for path in (folder / "cache" / "indices").glob("[!.]*")}


def test_cached_indices_follow_the_lengths_and_not_path_size_and_time(tmp_path):
    orders = [[4, 9, 30], [30, 9, 4], [9, 30, 4], [4, 9, 30]]
    for at, lengths in enumerate(orders):
        prefix = tmp_path / ("a" if at < 3 else "moved")
        write_pair(prefix, [range(length) for length in lengths])
        for suffix in (".bin", ".idx"):
            os.utime(f"{prefix}{suffix}", ns=(1, 1))
        dataset = split_of(tmp_path, sources_of(str(prefix)), num_samples=5)
        assert all(len(dataset[index]) == 9 for index in range(len(dataset))), lengths
    assert len(cached(tmp_path)) == 3


def test_blend_takes_its_shares_and_builds_only_needed_samples(tmp_path):
    sources = sources_of(write(tmp_path / "a", documents=4), write(tmp_path / "b", documents=50, first_id=50))
    dataset = split_of(tmp_path, sources, weights=(3.0, 1.0), num_samples=100)
    # Of 100 samples of 8 tokens, source a gets 75. It needs 10 epochs of its 64 tokens, which give 639 // 8 = 79
    # samples. Source b gets 25 samples, and one epoch of its 800 tokens already gives 799 // 8 = 99.
    assert [len(part) for part in dataset.datasets] == [79, 99]
    assert sum(int(dataset[i][0]) < 4 for i in range(len(dataset))) == 75
    with pytest.raises(IndexError, match="sample 100 of a blended dataset is not one of its 100"):
        dataset[100]


def test_equal_split_is_built_once_and_another_one_separately(tmp_path):
    a, b = write(tmp_path / "a", documents=4), write(tmp_path / "b", documents=5)
    sources = sources_of(a, b, a)
    for bounds, how, built in (
        # builds three files: the blend, and indices for a and for b; both occurrences of a have the same share, and use
        # the same indices
        ((0.0, 1.0), {}, 3),
        ((0.0, 1.0), {}, 0),
        ((0.0, 1.0), {"seed": 2}, 2),
        # the first halves of a and of b have documents of equal lengths, so they share the cached indices for equally
        # many samples
        ((0.0, 0.5), {}, 3),
        ((0.0, 1.0), {"seq_length": 7}, 4),
        ((0.0, 1.0), {"num_samples": 30}, 3),
    ):
        before = cached(tmp_path)
        split_of(tmp_path, sources, bounds, **how)
        assert before.items() <= cached(tmp_path).items()
        assert len(cached(tmp_path)) - len(before) == built, (bounds, how)
    (by_tokens,) = fit_for_split(sources_of(write(tmp_path / "c", documents=1, length=90)), SPLIT)
    # the two splits have equally many samples from different ranges of the data, so each needs indices of its own
    for source in (by_tokens, sources[0]):
        before = cached(tmp_path)
        for bounds in (SPLIT[0], SPLIT[1], SPLIT[0]):
            split_of(tmp_path, [source], bounds, num_samples=3)
        assert len(cached(tmp_path)) == len(before) + 2, source.name


def test_blended_sources_are_split_by_tokens_if_documents_are_too_few(tmp_path):
    many, few = write(tmp_path / "many", documents=50), write(tmp_path / "few", documents=7)
    sources = fit_for_split(sources_of(many, few), SPLIT)
    assert [source.by_tokens for source in sources] == [False, True]
    # The validation split (0.5 to 0.97) has 23 of 50 documents (25 to 47) of one source, and tokens 56 to 108 of the
    # other's 112.
    assert [part.tokens_per_epoch for part in split_of(tmp_path, sources, SPLIT[1]).datasets] == [23 * 16, 53]
    sources = sources_of(write(tmp_path / "two", documents=2))
    # the empty test split (1.0 to 1.0) is what the user asked for, so it is no reason to split inside documents
    assert fit_for_split(sources, ((0.0, 0.5), (0.5, 1.0), (1.0, 1.0))) == sources


@given(lengths=st.lists(st.integers(0, 9), max_size=8), data=st.data())
def test_token_range_is_a_slice_of_the_concatenated_documents(lengths, data):
    line, ends = list(range(sum(lengths))), list(itertools.accumulate(lengths))
    start = data.draw(st.integers(0, len(line)))
    stop = data.draw(st.integers(start, len(line)))
    part = TokenRange(Lists([range(end - length, end) for end, length in zip(ends, lengths, strict=True)]), start, stop)
    read = [part.get(i).tolist() for i in range(len(part.lengths))]
    assert list(itertools.chain.from_iterable(read)) == line[start:stop]
    assert [len(ids) for ids in read] == part.lengths.tolist()
    # each piece that was read ends with the last token of a document, or of the whole range
    assert {ids[-1] + 1 for ids in read if ids} <= {*ends, stop}
    for i, ids in enumerate(read):
        for offset in range(len(ids)):
            assert part.get(i, offset).tolist() == ids[offset:]
            assert part.get(i, offset, 1).tolist() == ids[offset : offset + 1]


def test_mock_documents_count_up_and_their_slices_agree():
    sequences = MockSequences(vocab_size=300, eod=299)
    whole = sequences.get(5).tolist()
    n = len(whole)
    assert n == sequences.lengths[5]
    assert (whole[:3], whole[-1]) == ([1, 2, 3], 299)
    for offset, length in ((0, n), (0, n - 1), (3, 4), (n - 1, 1), (n, 0), (2, None)):
        stop = n if length is None else offset + length
        assert sequences.get(5, offset, length).tolist() == whole[offset:stop]
    # without an end-of-document token, the document's last id continues the count
    assert MockSequences(vocab_size=300, eod=None).get(5).tolist()[-1] == n % 300
    GPTDataset(sequences, (0, 20), num_samples=50, seq_length=64, seed=0, name="mock", vocab_size=300)[49]
