"""Merged pairs hold the documents of all, one after the other, and nothing is lost on the way."""

from __future__ import annotations

from pathlib import Path

import pytest
from merge_datasets import MergeConfig, main, merge_datasets

from megazpp.data.indexed_dataset import IndexedDataset, IndexedDatasetBuilder

A, B, C = [[[1, 2], [3]], [[4]]], [[], [[5, 6, 7]]], [[[8]]]  # documents of sentences of ids


def write(prefix: Path, documents: list[list[list[int]]], dtype: str = "<u2") -> str:
    with IndexedDatasetBuilder(prefix, dtype) as builder:
        for sentences in documents:
            builder.add_document(*sentences)
        builder.finalize()
    return str(prefix)


def pair(prefix: Path | str) -> tuple[bytes, bytes]:
    return Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()


def merge(output: Path, *inputs: object, overwrite: bool = False) -> Path:
    config = MergeConfig(input=tuple(map(str, inputs)), output_prefix=str(output), overwrite=overwrite)
    return merge_datasets(config, lambda _: None)


def test_a_merged_pair_is_the_one_written_in_one_go(tmp_path: Path) -> None:
    parts = [write(tmp_path / f"part.{i}", documents) for i, documents in enumerate((A, B, C))]
    assert merge(tmp_path / "all", *parts) == tmp_path / "all"
    assert pair(tmp_path / "all") == pair(write(tmp_path / "expected", [*A, *B, *C]))
    assert merge(tmp_path / "other", parts[2], parts[0])
    assert pair(tmp_path / "other") == pair(write(tmp_path / "expected", [*C, *A]))
    dataset = IndexedDataset(tmp_path / "all")
    assert dataset.document_lengths.tolist() == [3, 1, 0, 3, 1]
    assert dataset.tokens.tolist() == list(range(1, 9))


def test_a_folder_stands_for_its_pairs_in_the_order_of_their_names(tmp_path: Path) -> None:
    folder = tmp_path / "parts"
    folder.mkdir()
    for name, documents in (("b", B), ("a.1", A), ("c", C)):
        write(folder / name, documents)
    (folder / "notes.txt").touch()
    (folder / "d.bin.unfinished").touch()
    merge(tmp_path / "all", folder)
    assert pair(tmp_path / "all") == pair(write(tmp_path / "expected", [*A, *B, *C]))


def test_what_cannot_be_merged_is_refused_and_nothing_is_written_or_lost(tmp_path: Path) -> None:
    a, wide = write(tmp_path / "a", A), write(tmp_path / "wide", A, "<i4")
    sparse, modes = write(tmp_path / "sparse", B[1:]), write(tmp_path / "modes", C)
    (tmp_path / "empty").mkdir()
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "x.bin").write_bytes(b"1")
    index = bytearray(Path(f"{sparse}.idx").read_bytes())
    index[38] = 2  # its only sequence begins at the second id
    index[34] = 2
    Path(f"{sparse}.idx").write_bytes(index)
    with open(f"{modes}.idx", "ab") as file:
        file.write(b"\x00")
    before = {path: path.read_bytes() for path in tmp_path.glob("*.*")}
    for inputs, reason in (
        ((), "--input is missing"),
        ((a, wide), "a holds uint16 ids, .*wide int32"),
        ((a, tmp_path / "none"), r"--input .*none\.idx does not exist"),
        ((tmp_path / "empty",), "there are no .bin and .idx files in it"),
        ((tmp_path / "half",), r"half/x\.idx does not exist"),
        ((sparse,), "do not lie back to back"),
        ((modes,), "multimodal"),
    ):
        with pytest.raises(ValueError, match=reason):
            merge(tmp_path / "all", *inputs)
    with pytest.raises(ValueError, match="a is one of the inputs"):
        merge(tmp_path / "a", a, overwrite=True)
    with pytest.raises(ValueError, match=r"wide\.bin exists"):
        merge(tmp_path / "wide", a)
    with pytest.raises(ValueError, match="--output-prefix is missing"):
        merge_datasets(MergeConfig(input=(a,)), lambda _: None)
    assert {path: path.read_bytes() for path in tmp_path.glob("*.*")} == before
    merge(tmp_path / "wide", a, overwrite=True)
    assert pair(tmp_path / "wide") == pair(a)


def test_the_program_merges_a_folder_and_refuses_to_do_it_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "parts").mkdir()
    for name, ids in (("b", [3]), ("a", [1, 2])):
        with IndexedDatasetBuilder(tmp_path / "parts" / name, "<u2") as builder:
            builder.add_document(ids)
            builder.finalize()
    argv = ["--input", str(tmp_path / "parts"), "--output-prefix", str(tmp_path / "all")]
    assert main(argv) == 0
    out, err = capsys.readouterr()
    assert out == f"{tmp_path}/all\n"
    assert err.splitlines()[1] == f"2 of 2: {tmp_path}/parts/b, 1 tokens"
    assert IndexedDataset(tmp_path / "all").tokens.tolist() == [1, 2, 3]
    assert main(argv) == 2
    assert "all.bin exists" in capsys.readouterr().err


def test_a_missing_pair_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["--input", str(tmp_path / "none"), "--output-prefix", str(tmp_path / "all")]) == 2
    err = capsys.readouterr().err
    assert err == f"merge_datasets.py: error: --input {tmp_path}/none: {tmp_path}/none.idx does not exist\n"
    assert list(tmp_path.iterdir()) == []
