"""Test .bin/.idx files: they equal Megatron's byte for byte, are written atomically, and are rejected if damaged."""

import os
import struct
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from helpers.disks import small_disk
from helpers.pairs import contents, write_pair
from helpers.refusals import not_refused
from hypothesis import given, settings
from hypothesis import strategies as st

from megazpp.data import indexed_builder
from megazpp.data.indexed_builder import IndexedDatasetBuilder, check_output, optimal_dtype
from megazpp.data.indexed_dataset import IndexedDataset

DOCUMENTS = [[1, 2, 3], [], [65499, 7]]
BINARY = b"\x01\x00\x02\x00\x03\x00\xdb\xff\x07\x00"
INDEX = (  # the expected .idx file of DOCUMENTS, written by hand from the description of Megatron's format
    b"MMIDIDX\x00\x00"
    b"\x01\x00\x00\x00\x00\x00\x00\x00"  # format version 1
    b"\x08"  # dtype code of uint16
    b"\x03\x00\x00\x00\x00\x00\x00\x00"  # number of sequences: 3
    b"\x04\x00\x00\x00\x00\x00\x00\x00"  # number of document indices: 3 documents + 1
    b"\x03\x00\x00\x00" + b"\x00\x00\x00\x00" + b"\x02\x00\x00\x00"  # length of each sequence in tokens
    + struct.pack("<qqq", 0, 6, 6)  # byte offset of each sequence in the .bin file
    + struct.pack("<qqqq", 0, 1, 2, 3)  # index of the first sequence of each document, and the end
)  # fmt: skip


def test_pair_has_the_bytes_of_the_format_and_is_read_back(tmp_path):
    prefix = write_pair(tmp_path / "a.b_text_document", DOCUMENTS)
    assert len(INDEX) == 102
    assert contents(tmp_path) == {"a.b_text_document.bin": BINARY, "a.b_text_document.idx": INDEX}
    # Megatron's multimodal datasets append one mode byte per sequence, which a text dataset ignores
    for index in (INDEX, INDEX + bytes(len(DOCUMENTS))):
        (tmp_path / "a.b_text_document.idx").write_bytes(index)
        dataset = IndexedDataset(prefix)
        assert [dataset.get(i).tolist() for i in range(len(dataset))] == DOCUMENTS
        assert dataset.document_indices.tolist() == [0, 1, 2, 3]
        assert dataset.dtype == optimal_dtype(65499) == np.uint16
    assert optimal_dtype(65500) == np.int32


@settings(max_examples=50)
@given(
    documents=st.lists(st.lists(st.integers(0, 127), max_size=9), min_size=1, max_size=9).filter(any),
    dtype=st.sampled_from(["u1", "i1", "<i2", "<i4", "<i8", "<u2"]),
)
def test_any_documents_round_trip(tmp_path_factory, documents, dtype):
    dataset = IndexedDataset(write_pair(tmp_path_factory.mktemp("round_trip") / "a", documents, dtype))
    assert [dataset.get(i).tolist() for i in range(len(dataset))] == documents
    for i, document in enumerate(documents):
        assert dataset.get(i, 1, 2).tolist()[: len(document[1:3])] == document[1:3]
        assert dataset.get(i, 2).tolist() == document[2:]


DAMAGES = [
    (0, b"TNTIDX\x00\x00", "old TNTIDX format"),
    (0, b"GARBAGE\x00\x00", "not a Megatron index"),
    (9, b"\x02", "version 2"),
    (17, b"\x63", "dtype code 99"),
    (17, b"\x04", "not of int32: its sequences do not lie back to back"),
    (18, b"\x00", "no sequences"),
    (18, b"\x04", "damaged: 102 bytes where 4 sequences"),
    (26, b"\xff" * 8, "damaged: 102 bytes"),
    (34, b"\xff\xff\xff\xff", "length -1"),
    (42, b"\x09", "truncated, or not of uint16"),
    (46, b"\xfe" + b"\xff" * 7, "do not lie back to back"),
    # the byte offsets of the second and third sequence are swapped
    (46, b"\x06" + b"\x00" * 7 + b"\x00" * 8, "do not lie back to back"),
    (70, b"\x01", "do not rise from 0 to its 3 sequences"),
    (94, b"\x02", "do not rise"),
]


def test_damaged_pair_is_rejected_with_file_and_reason(tmp_path):
    def read(name: str, content: bytes) -> None:
        (tmp_path / "a.bin").write_bytes(BINARY)
        (tmp_path / "a.idx").write_bytes(INDEX)
        (tmp_path / name).write_bytes(content)
        IndexedDataset(tmp_path / "a")

    rows = [("a.idx", INDEX[:at] + data + INDEX[at + len(data) :], reason) for at, data, reason in DAMAGES]
    assert not not_refused(rows, read)
    rows = [("a.idx", INDEX[:size], "a.idx") for size in (0, 5, 8, 33, 34, 60, 101)]
    rows += [("a.bin", (BINARY + bytes(2))[: len(BINARY) + change], "a.bin") for change in (-10, -2, -1, 1, 2)]
    assert not not_refused(rows, read)
    assert not not_refused([(*row[:2], f"{tmp_path}/a.") for row in rows], read)


def test_missing_files_and_directories_are_rejected_by_name(tmp_path):
    (tmp_path / "a.idx").write_bytes(INDEX)
    (tmp_path / "b.idx").write_bytes(INDEX)
    (tmp_path / "b.bin").mkdir()
    rows = [("none", "none.idx does not exist"), ("a", "a.bin does not exist"), ("b", "b.bin is a directory")]
    assert not not_refused(rows, lambda name: IndexedDataset(tmp_path / name))


# ---- writing .bin/.idx pairs ------------------------------------------------------------------------------------


@pytest.mark.parametrize("piece", [1, 1 << 24])
def test_extend_writes_the_same_bytes_as_single_documents(tmp_path, monkeypatch, piece):
    monkeypatch.setattr(indexed_builder, "_PIECE", piece)
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
    with (
        pytest.raises(ValueError, match="65536 do not fit the dtype uint16"),
        IndexedDatasetBuilder(tmp_path / "c", "<u2") as c,
    ):
        c.extend(np.array([1, 65536]), [2], [1])


def test_files_are_synced_before_renaming_and_the_index_comes_last(tmp_path, monkeypatch):
    said, replace = list[str](), os.replace
    monkeypatch.setattr(os, "fsync", lambda file: said.append(f"sync {Path(f'/proc/self/fd/{file}').readlink().name}"))
    monkeypatch.setattr(os, "replace", lambda old, new: (said.append(f"name {new.name}"), replace(old, new)))
    write_pair(tmp_path / "a", [[1]])
    synced = ["sync a.bin.unfinished", "sync a.idx.unfinished"]
    assert said == [*synced, "name a.bin", "name a.idx", f"sync {tmp_path.name}"]


def test_failed_write_keeps_the_old_pair(tmp_path):
    with pytest.raises(ValueError, match="70000 do not fit the dtype uint16"):
        write_pair(tmp_path / "a", [[1, 70000]])
    assert contents(tmp_path) == {}
    write_pair(tmp_path / "a", [[1, 2]])
    before = contents(tmp_path)
    with pytest.raises(ValueError, match="do not fit"), IndexedDatasetBuilder(tmp_path / "a", "<u2") as builder:
        builder.extend(np.array([3, -1]), [1, 1], [1, 2])
    assert contents(tmp_path) == before


def test_new_bin_is_never_next_to_an_old_index(tmp_path):
    write_pair(tmp_path / "a", [[1, 2]])
    interrupted = mock.patch.object(os, "replace", wraps=os.replace, side_effect=[mock.DEFAULT, KeyboardInterrupt])
    with interrupted, pytest.raises(KeyboardInterrupt):
        write_pair(tmp_path / "a", [[3, 4]])
    assert contents(tmp_path) == {"a.bin": b"\x03\x00\x04\x00"}
    # a .bin without .idx may be left from an interrupted run, but may also be another program's file
    with pytest.raises(ValueError, match=r"a\.bin exists"):
        check_output(tmp_path / "a", overwrite=False)
    (tmp_path / "a.bin").rename(tmp_path / "a.idx")
    with pytest.raises(ValueError, match=r"a\.idx exists"):
        check_output(tmp_path / "a", overwrite=False)


def test_pair_is_locked_while_written_and_leftovers_are_replaced(tmp_path):
    for name in ("a.bin.unfinished", "a.idx.unfinished"):
        (tmp_path / name).write_bytes(b"leftover " * 100)
    with IndexedDatasetBuilder(tmp_path / "a", "<u2") as first:
        first.add_document([1])
        with pytest.raises(ValueError, match=r"a\.bin\.unfinished: another process is writing this file"):
            IndexedDatasetBuilder(tmp_path / "a", "<u2")
        first.add_document([2])
        first.finalize()
    assert contents(tmp_path).keys() == {"a.bin", "a.idx"}
    assert contents(tmp_path)["a.bin"] == b"\x01\x00\x02\x00"
    write_pair(tmp_path / "a", [[3]])
    assert contents(tmp_path)["a.bin"] == b"\x03\x00"


def test_pair_that_another_process_completes_before_the_lock_is_kept(tmp_path):
    unfinished, lock = tmp_path / "b.bin.unfinished", indexed_builder.try_lock
    unfinished.write_bytes(b"complete")

    def lock_late(file):  # the other process renames its file between `open` and the lock
        if unfinished.read_bytes():
            unfinished.rename(tmp_path / "a.bin")
        return lock(file)

    with mock.patch.object(indexed_builder, "try_lock", lock_late):
        write_pair(tmp_path / "b", [[3]])
    assert contents(tmp_path).keys() == {"a.bin", "b.bin", "b.idx"}
    assert (contents(tmp_path)["a.bin"], contents(tmp_path)["b.bin"]) == (b"complete", b"\x03\x00")


@pytest.mark.parametrize(("length", "name"), [(100_000, "a.bin"), (32_000, "a.idx")])
def test_full_disk_is_reported_with_the_file_and_nothing_is_left(tmp_path, length, name):
    def build(prefix: Path) -> None:
        with IndexedDatasetBuilder(prefix, "<u2") as builder:
            builder.extend(np.zeros(length, dtype="<u2"), [1] * (length // 10), [])
            builder.finalize()

    with small_disk(tmp_path / "disk", "64k") as disk:
        with pytest.raises(OSError, match=f"No space left on device: '{disk}/{name}"):
            build(disk / "a")
        assert list(disk.iterdir()) == []
