"""Each source of a split builds what the blend takes from it, once."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from megazpp.data.blend import BlendedDataset
from megazpp.data.indexed_dataset_builder import IndexedDatasetBuilder
from megazpp.data.sources import Sampling, Source, SourceBlend, build_split, indexed_source, open_sources


def write(prefix: Path, *, documents: int, length: int = 16) -> Path:
    with IndexedDatasetBuilder(prefix, np.uint16) as builder:
        for d in range(documents):
            builder.add_document(np.full(length, d))
        builder.finalize()
    return prefix


def sampling(tmp_path: Path, num_samples: int) -> Sampling:
    return Sampling(num_samples, seq_length=8, seed=1, vocab_size=100, cache_path=tmp_path / "cache")


def test_a_fingerprint_changes_with_the_files_and_only_with_them(tmp_path: Path) -> None:
    prefix = write(tmp_path / "a", documents=3)
    first = indexed_source(prefix, "--data-path").fingerprint
    assert indexed_source(tmp_path / "." / "a", "--data-path").fingerprint == first
    os.utime(tmp_path / "a.bin", ns=(1, 1))
    assert indexed_source(prefix, "--data-path").fingerprint != first


def test_a_blend_builds_exactly_the_samples_it_takes_of_each_source(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a", documents=4), write(tmp_path / "b", documents=50)
    blend = open_sources(["3", str(a), "1", str(b)], flag_name="--data-path")
    dataset = build_split("train", blend, (0.0, 1.0), sampling(tmp_path, 100))
    assert isinstance(dataset, BlendedDataset)
    # 75 samples of 8 tokens are 10 epochs of a's 64 tokens and give 79; 25 are within b's one epoch of 99
    assert [len(part) for part in dataset.datasets] == [79, 99]
    assert len(dataset) == 100


def test_the_same_split_is_built_once_and_another_seed_anew(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a", documents=4), write(tmp_path / "b", documents=5)
    blend = open_sources([str(a), str(b), str(a)], flag_name="--data-path")
    how = sampling(tmp_path, 30)
    build_split("train", blend, (0.0, 1.0), how)
    cache = tmp_path / "cache" / "indices"
    built = {path.name: path.stat().st_ino for path in cache.glob("[!.]*")}
    assert len(built) == 3  # one blend; a's two shares are equal, so they have the same indices
    build_split("valid", blend, (0.0, 1.0), how)
    assert {path.name: path.stat().st_ino for path in cache.glob("[!.]*")} == built
    build_split("train", blend, (0.0, 1.0), how._replace(seed=2))
    assert len(list(cache.glob("[!.]*"))) == 5


def test_edges_of_a_split_are_rounded_to_the_nearest_document(tmp_path: Path) -> None:
    blend = open_sources([str(write(tmp_path / "a", documents=7))], flag_name="--data-path")
    documents: list[set[int]] = []
    for bounds in ((0.0, 0.35), (0.35, 0.9), (0.9, 1.0)):  # 2.45, 6.3
        dataset = build_split("train", blend, bounds, sampling(tmp_path, 4))
        documents.append({int(token) for i in range(len(dataset)) for token in dataset[i]})
    assert documents == [{0, 1}, {2, 3, 4, 5}, {6}]


def test_a_share_of_no_document_is_refused(tmp_path: Path) -> None:
    source: Source = indexed_source(write(tmp_path / "a", documents=7), "--data-path")
    with pytest.raises(ValueError, match=r"--split leaves test none of the 7 documents of .*a; give it a larger"):
        build_split("test", SourceBlend((source,), None), (0.99, 1.0), sampling(tmp_path, 4))
