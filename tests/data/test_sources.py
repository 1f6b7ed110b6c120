"""Each source of a split builds what the blend takes from it, once."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from megazpp.data.blend import (
    BlendedDataset,
    MockSequences,
    TokenRange,
    build_split,
    fit_for_split,
    indexed_source,
    open_sources,
)
from megazpp.data.gpt_dataset import GPTDataset
from megazpp.data.indexed_dataset import IndexedDatasetBuilder


def write(prefix: Path, *, documents: int, length: int = 16) -> Path:
    with IndexedDatasetBuilder(prefix, np.uint16) as builder:
        for d in range(documents):
            builder.add_document(np.full(length, d))
        builder.finalize()
    return prefix


def sampling(tmp_path: Path, num_samples: int) -> dict[str, Any]:
    return {
        "num_samples": num_samples,
        "seq_length": 8,
        "seed": 1,
        "vocab_size": 100,
        "cache_path": tmp_path / "cache",
    }


def test_a_fingerprint_changes_with_the_files_and_only_with_them(tmp_path: Path) -> None:
    prefix = write(tmp_path / "a", documents=3)
    first = indexed_source(prefix, "--data-path").fingerprint
    assert indexed_source(tmp_path / "." / "a", "--data-path").fingerprint == first
    os.utime(tmp_path / "a.bin", ns=(1, 1))
    assert indexed_source(prefix, "--data-path").fingerprint != first


def test_a_blend_builds_exactly_the_samples_it_takes_of_each_source(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a", documents=4), write(tmp_path / "b", documents=50)
    sources, weights = open_sources(["3", str(a), "1", str(b)], flag_name="--data-path")
    dataset = build_split("train", sources, weights, (0.0, 1.0), **sampling(tmp_path, 100))
    assert isinstance(dataset, BlendedDataset)
    # 75 samples of 8 tokens are 10 epochs of a's 64 tokens and give 79; 25 are within b's one epoch of 99
    assert [len(part) for part in dataset.datasets] == [79, 99]
    assert len(dataset) == 100


def test_the_same_split_is_built_once_and_another_seed_anew(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a", documents=4), write(tmp_path / "b", documents=5)
    sources, weights = open_sources([str(a), str(b), str(a)], flag_name="--data-path")
    how = sampling(tmp_path, 30)
    build_split("train", sources, weights, (0.0, 1.0), **how)
    cache = tmp_path / "cache" / "indices"
    built = {path.name: path.stat().st_ino for path in cache.glob("[!.]*")}
    assert len(built) == 3  # one blend; a's two shares are equal, so they have the same indices
    build_split("valid", sources, weights, (0.0, 1.0), **how)
    assert {path.name: path.stat().st_ino for path in cache.glob("[!.]*")} == built
    build_split("train", sources, weights, (0.0, 1.0), **{**how, "seed": 2})
    assert len(list(cache.glob("[!.]*"))) == 5


def test_edges_of_a_split_are_rounded_to_the_nearest_document(tmp_path: Path) -> None:
    sources, weights = open_sources([str(write(tmp_path / "a", documents=7))], flag_name="--data-path")
    documents: list[set[int]] = []
    for bounds in ((0.0, 0.35), (0.35, 0.9), (0.9, 1.0)):  # 2.45, 6.3
        dataset = build_split("train", sources, weights, bounds, **sampling(tmp_path, 4))
        documents.append({int(token) for i in range(len(dataset)) for token in dataset[i]})
    assert documents == [{0, 1}, {2, 3, 4, 5}, {6}]


SPLIT = ((0.0, 0.5), (0.5, 0.97), (0.97, 1.0))


def test_sources_of_a_blend_are_cut_by_tokens_each_by_its_own_number_of_documents(tmp_path: Path) -> None:
    many, few = write(tmp_path / "many", documents=50), write(tmp_path / "few", documents=7)
    sources, weights = open_sources([str(many), str(few)], flag_name="--data-path")
    sources = fit_for_split(sources, SPLIT)
    assert [source.by_tokens for source in sources] == [False, True]
    dataset = build_split("valid", sources, weights, SPLIT[1], **sampling(tmp_path, 40))
    assert isinstance(dataset, BlendedDataset)
    assert [part.tokens_per_epoch for part in dataset.datasets] == [
        23 * 16,
        53,
    ]  # documents 25 to 47, tokens 56 to 108 of 112


def test_a_share_that_is_empty_on_purpose_wants_no_document(tmp_path: Path) -> None:
    sources, _ = open_sources([str(write(tmp_path / "a", documents=2))], flag_name="--data-path")
    assert fit_for_split(sources, ((0.0, 0.5), (0.5, 1.0), (1.0, 1.0))) == sources


def test_parts_cut_by_tokens_have_indices_of_their_own(tmp_path: Path) -> None:
    sources, weights = open_sources([str(write(tmp_path / "a", documents=1, length=90))], flag_name="--data-path")
    sources = fit_for_split(sources, SPLIT)
    for bounds in (SPLIT[0], SPLIT[1], SPLIT[0]):
        build_split("train", sources, weights, bounds, **sampling(tmp_path, 3))
    assert len(list((tmp_path / "cache" / "indices").glob("[!.]*"))) == 2


@settings(max_examples=200)
@given(lengths=st.lists(st.integers(0, 9), max_size=8), data=st.data())
def test_a_range_of_tokens_is_that_part_of_the_line_of_documents(lengths: list[int], data: st.DataObject) -> None:
    line = list(range(sum(lengths)))
    ends = list(itertools.accumulate(lengths))
    start = data.draw(st.integers(0, len(line)))
    stop = data.draw(st.integers(start, len(line)))
    part = TokenRange(Line(lengths), start, stop)
    read = [part.get(i).tolist() for i in range(len(part.lengths))]
    assert list(itertools.chain.from_iterable(read)) == line[start:stop]
    assert [len(ids) for ids in read] == part.lengths.tolist()
    assert {ids[-1] + 1 for ids in read if ids} <= {*ends, stop}  # documents end where they did
    for i, ids in enumerate(read):
        for offset in range(len(ids)):
            assert part.get(i, offset).tolist() == ids[offset:]
            assert part.get(i, offset, 1).tolist() == ids[offset : offset + 1]


class Line:
    """Sequences whose ids count up from the first's first."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = np.array(lengths, dtype=np.int32)

    def get(self, index: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        size = int(self.lengths[index]) - offset if length is None else length
        assert 0 <= offset <= offset + size <= self.lengths[index]
        start = int(self.lengths[:index].sum()) + offset
        return np.arange(start, start + size)


def test_parts_of_a_made_up_document_are_parts_of_the_whole() -> None:
    sequences = MockSequences(vocab_size=300, eod=299)
    whole = sequences.get(5).tolist()
    assert len(whole) == sequences.lengths[5]
    assert whole[:3] == [1, 2, 3]
    assert whole[-1] == 299
    n = len(whole)
    for offset, length in ((0, n), (0, n - 1), (3, 4), (n - 1, 1), (n, 0), (2, None)):
        stop = n if length is None else offset + length
        assert sequences.get(5, offset, length).tolist() == whole[offset:stop]


def test_without_eod_the_counting_goes_on() -> None:
    sequences = MockSequences(vocab_size=300, eod=None)
    n = int(sequences.lengths[0])
    assert sequences.get(0).tolist()[-1] == n % 300


def test_samples_of_made_up_documents_stay_in_the_vocabulary() -> None:
    sequences = MockSequences(vocab_size=50, eod=49)
    dataset = GPTDataset(sequences, (0, 20), num_samples=50, seq_length=64, seed=0, name="mock", vocab_size=50)
    assert all(len(dataset[i]) == 65 for i in range(50))
