"""The .bin/.idx files are Megatron's, byte for byte, and damaged ones are refused with a reason."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megazpp.data.indexed_dataset import IndexedDataset, IndexedDatasetBuilder, optimal_dtype

DOCUMENTS = [[1, 2, 3], [], [65499, 7]]


def write(prefix: Path, documents: list[list[int]], dtype: str = "<u2") -> Path:
    with IndexedDatasetBuilder(prefix, dtype) as builder:
        for document in documents:
            builder.add_document(document)
        builder.finalize()
    return prefix


def damage_idx(prefix: Path, offset: int, data: bytes) -> None:
    path = prefix.with_name(prefix.name + ".idx")
    content = bytearray(path.read_bytes())
    content[offset : offset + len(data)] = data
    path.write_bytes(content)


def by_hand() -> tuple[bytes, bytes]:
    """The pair for DOCUMENTS in uint16, put together from the table of the format."""
    idx = b"MMIDIDX\x00\x00"
    idx += b"\x01\x00\x00\x00\x00\x00\x00\x00"  # version 1
    idx += b"\x08"  # uint16
    idx += b"\x03\x00\x00\x00\x00\x00\x00\x00"  # 3 sequences
    idx += b"\x04\x00\x00\x00\x00\x00\x00\x00"  # 3 documents + 1
    idx += b"\x03\x00\x00\x00" + b"\x00\x00\x00\x00" + b"\x02\x00\x00\x00"  # lengths
    idx += struct.pack("<qqq", 0, 6, 6)  # pointers in bytes
    idx += struct.pack("<qqqq", 0, 1, 2, 3)  # document indices
    return b"\x01\x00\x02\x00\x03\x00\xdb\xff\x07\x00", idx


def test_three_documents_give_the_bytes_laid_out_by_hand(tmp_path: Path) -> None:
    write(tmp_path / "a.b_text_document", DOCUMENTS)
    binary, index = by_hand()
    assert len(index) == 102
    assert (tmp_path / "a.b_text_document.idx").read_bytes() == index
    assert (tmp_path / "a.b_text_document.bin").read_bytes() == binary


def test_a_pair_written_by_hand_is_read(tmp_path: Path) -> None:
    for suffix, content in zip((".bin", ".idx"), by_hand(), strict=True):
        (tmp_path / f"a{suffix}").write_bytes(content)
    dataset = IndexedDataset(tmp_path / "a")
    assert [dataset.get(i).tolist() for i in range(len(dataset))] == DOCUMENTS
    assert dataset.document_indices.tolist() == [0, 1, 2, 3]
    assert dataset.dtype == np.uint16


def test_a_document_may_be_several_sequences(tmp_path: Path) -> None:
    with IndexedDatasetBuilder(tmp_path / "a", np.int32) as builder:
        builder.add_document([1, 2], [3])
        builder.add_document([4])
        builder.finalize()
    dataset = IndexedDataset(tmp_path / "a")
    assert dataset.lengths.tolist() == [2, 1, 1]
    assert dataset.document_indices.tolist() == [0, 2, 3]


def test_an_index_with_modes_of_a_multimodal_dataset_is_read(tmp_path: Path) -> None:
    write(tmp_path / "a", DOCUMENTS)
    with open(tmp_path / "a.idx", "ab") as file:
        file.write(bytes(len(DOCUMENTS)))
    assert IndexedDataset(tmp_path / "a").get(2).tolist() == DOCUMENTS[2]


@settings(max_examples=50)
@given(
    documents=st.lists(st.lists(st.integers(0, 127), max_size=9), min_size=1, max_size=9).filter(any),
    dtype=st.sampled_from(["u1", "i1", "<i2", "<i4", "<i8", "<u2"]),
)
def test_any_documents_come_back(tmp_path_factory: pytest.TempPathFactory, documents: list, dtype: str) -> None:
    dataset = IndexedDataset(write(tmp_path_factory.mktemp("round_trip") / "a", documents, dtype))
    assert [dataset.get(i).tolist() for i in range(len(dataset))] == documents
    for i, document in enumerate(documents):
        assert dataset.get(i, 1, 2).tolist()[: len(document[1:3])] == document[1:3]
        assert dataset.get(i, 2).tolist() == document[2:]


def test_the_dtype_is_megatrons_choice() -> None:
    assert optimal_dtype(65499) == np.uint16
    assert optimal_dtype(65500) == np.int32


def test_ids_that_do_not_fit_the_dtype_are_refused_and_leave_no_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="70000 do not fit uint16"), IndexedDatasetBuilder(tmp_path / "a", "<u2") as b:
        b.add_document([1, 70000])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("offset", "data", "reason"),
    [
        (0, b"TNTIDX\x00\x00", "old TNTIDX format"),
        (0, b"GARBAGE\x00\x00", "not a Megatron index"),
        (9, b"\x02", "version 2"),
        (17, b"\x06", "dtype code 6"),
        (17, b"\x63", "dtype code 99"),
        (17, b"\x04", "not of int32: its sequences do not lie back to back"),
        (17, b"\x01", "not of uint8: "),
        (18, b"\x00", "no sequences"),
        (18, b"\x04", "damaged: 102 bytes where 4 sequences"),
        (26, b"\xff" * 8, "damaged: 102 bytes"),
        (34, b"\xff\xff\xff\xff", "length -1"),
        (42, b"\x09", "truncated, or not of uint16"),
        (46, b"\xfe" + b"\xff" * 7, "do not lie back to back"),
        (46, b"\x06" + b"\x00" * 7 + b"\x00" * 8, "do not lie back to back"),  # two pointers swapped
        (70, b"\x01", "do not rise from 0 to its 3 sequences"),
        (78, b"\x03", "do not rise"),
        (94, b"\x02", "do not rise"),
    ],
)
def test_a_damaged_index_is_refused_with_file_and_reason(tmp_path: Path, offset: int, data: bytes, reason: str) -> None:
    prefix = write(tmp_path / "a", DOCUMENTS)
    damage_idx(prefix, offset, data)
    with pytest.raises(ValueError, match=reason) as raised:
        IndexedDataset(prefix)
    assert str(tmp_path / "a.") in str(raised.value)


@pytest.mark.parametrize("size", [0, 5, 8, 33, 34, 60, 101])
def test_every_truncated_index_is_refused(tmp_path: Path, size: int) -> None:
    prefix = write(tmp_path / "a", DOCUMENTS)
    content = (tmp_path / "a.idx").read_bytes()
    (tmp_path / "a.idx").write_bytes(content[:size])
    with pytest.raises(ValueError, match=r"a\.idx"):
        IndexedDataset(prefix)


@pytest.mark.parametrize("change", [-10, -2, -1, 1, 2])
def test_a_bin_file_of_another_size_is_refused(tmp_path: Path, change: int) -> None:
    prefix = write(tmp_path / "a", DOCUMENTS)
    content = (tmp_path / "a.bin").read_bytes()
    (tmp_path / "a.bin").write_bytes((content + b"\x00\x00")[: len(content) + change])
    with pytest.raises(ValueError, match=r"a\.bin"):
        IndexedDataset(prefix)


def test_missing_files_and_directories_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"a\.idx does not exist"):
        IndexedDataset(tmp_path / "a")
    write(tmp_path / "a", DOCUMENTS)
    (tmp_path / "a.bin").unlink()
    with pytest.raises(ValueError, match=r"a\.bin does not exist"):
        IndexedDataset(tmp_path / "a")
    (tmp_path / "a.bin").mkdir()
    with pytest.raises(ValueError, match=r"a\.bin is a directory"):
        IndexedDataset(tmp_path / "a")
