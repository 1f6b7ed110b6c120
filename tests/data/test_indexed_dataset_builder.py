"""A pair is written whole or not at all, whatever stops the writing."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from megazpp.data import indexed_dataset
from megazpp.data.indexed_dataset import IndexedDataset, IndexedDatasetBuilder, check_output


def write(prefix: Path, *documents: list[int]) -> None:
    with IndexedDatasetBuilder(prefix, "<u2") as builder:
        for document in documents:
            builder.add_document(document)
        builder.finalize()


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("piece", [1, 2, 1 << 24])
def test_many_sequences_at_once_are_the_same_bytes_as_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    monkeypatch.setattr(indexed_dataset, "_PIECE", piece)
    with IndexedDatasetBuilder(tmp_path / "a", "<u2") as one_by_one:
        for sentences in ([[1, 2], [3]], [[4]], [], [[5, 6, 7]], [[8]]):
            one_by_one.add_document(*sentences)
        one_by_one.finalize()
    with IndexedDatasetBuilder(tmp_path / "b", "<u2") as at_once:
        at_once.extend(np.array([1, 2, 3, 4]), [2, 1, 1], [2, 3, 3])
        at_once.extend(np.array([], dtype="<u2"), [], [])
        at_once.extend(np.array([5, 6, 7, 8], dtype="<u2"), [3, 1], [1, 2])
        at_once.finalize()
    assert (tmp_path / "a.bin").read_bytes() == (tmp_path / "b.bin").read_bytes()
    assert (tmp_path / "a.idx").read_bytes() == (tmp_path / "b.idx").read_bytes()
    assert IndexedDataset(tmp_path / "b").document_lengths.tolist() == [3, 1, 0, 3, 1]
    with pytest.raises(ValueError, match="65536 do not fit uint16"), IndexedDatasetBuilder(tmp_path / "c", "<u2") as c:
        c.extend(np.array([1, 65536]), [2], [1])


def test_both_files_are_on_the_disk_before_they_have_names_and_the_index_comes_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    sync, replace = os.fsync, os.replace

    def noting_sync(descriptor: int) -> None:
        said.append("sync " + Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        sync(descriptor)

    def noting_replace(source: Path, target: Path) -> None:
        said.append(f"name {target.name}")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", noting_sync)
    monkeypatch.setattr(os, "replace", noting_replace)
    write(tmp_path / "a", [1])
    assert said == [
        "sync a.bin.unfinished",
        "sync a.idx.unfinished",
        "name a.bin",
        "name a.idx",
        f"sync {tmp_path.name}",
    ]


def test_an_error_leaves_the_pair_that_was_there(tmp_path: Path) -> None:
    write(tmp_path / "a", [1, 2])
    before = contents(tmp_path)
    with pytest.raises(ValueError, match="do not fit"), IndexedDatasetBuilder(tmp_path / "a", "<u2") as builder:
        builder.extend(np.array([3, -1]), [1, 1], [1, 2])
    assert contents(tmp_path) == before


def test_a_new_bin_never_stands_beside_an_old_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "a", [1, 2])
    replace = os.replace

    def interrupted(source: Path, target: Path) -> None:
        if target.suffix == ".idx":
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "a", [3, 4])
    assert set(contents(tmp_path)) == {"a.bin"}
    with pytest.raises(ValueError, match=r"a\.bin exists"):  # it may be somebody's
        check_output(tmp_path / "a", overwrite=False)


def test_leftovers_of_a_dead_process_are_replaced(tmp_path: Path) -> None:
    for name in ("a.bin.unfinished", "a.idx.unfinished"):
        (tmp_path / name).write_bytes(b"leftover " * 100)
    write(tmp_path / "a", [1])
    assert set(contents(tmp_path)) == {"a.bin", "a.idx"}
    assert (tmp_path / "a.bin").read_bytes() == b"\x01\x00"


def test_a_pair_that_is_being_written_cannot_be_written_by_another(tmp_path: Path) -> None:
    with IndexedDatasetBuilder(tmp_path / "a", "<u2") as first:
        first.add_document([1])
        with pytest.raises(ValueError, match=r"a\.bin\.unfinished: another process is writing it"):
            IndexedDatasetBuilder(tmp_path / "a", "<u2")
        first.add_document([2])
        first.finalize()
    assert (tmp_path / "a.bin").read_bytes() == b"\x01\x00\x02\x00"
    write(tmp_path / "a", [3])
    assert (tmp_path / "a.bin").read_bytes() == b"\x03\x00"


def test_check_output_looks_at_both_files(tmp_path: Path) -> None:
    for suffix in (".bin", ".idx"):
        path = tmp_path / f"a.b{suffix}"
        path.touch()
        with pytest.raises(ValueError, match=rf"a\.b\{suffix} exists"):
            check_output(tmp_path / "a.b", overwrite=False)
        path.unlink()
    check_output(tmp_path / "a.b", overwrite=False)
