"""The program merges what --input names and says what is wrong in one line; test_merge.py has the rest."""

from __future__ import annotations

from pathlib import Path

import merge_datasets
import pytest

from megazpp.data.indexed_dataset import IndexedDataset, IndexedDatasetBuilder


def test_a_folder_is_merged(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "parts").mkdir()
    for name, ids in (("b", [3]), ("a", [1, 2])):
        with IndexedDatasetBuilder(tmp_path / "parts" / name, "<u2") as builder:
            builder.add_document(ids)
            builder.finalize()
    argv = ["--input", str(tmp_path / "parts"), "--output-prefix", str(tmp_path / "all")]
    assert merge_datasets.main(argv) == 0
    out, err = capsys.readouterr()
    assert out == f"{tmp_path}/all\n"
    assert err.splitlines()[1] == f"2 of 2: {tmp_path}/parts/b, 1 tokens"
    assert IndexedDataset(tmp_path / "all").tokens.tolist() == [1, 2, 3]
    assert merge_datasets.main(argv) == 2
    assert "all.bin exists" in capsys.readouterr().err


def test_a_missing_pair_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert merge_datasets.main(["--input", str(tmp_path / "none"), "--output-prefix", str(tmp_path / "all")]) == 2
    err = capsys.readouterr().err
    assert err == f"merge_datasets.py: error: --input {tmp_path}/none: {tmp_path}/none.idx does not exist\n"
    assert list(tmp_path.iterdir()) == []
