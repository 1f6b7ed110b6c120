"""What is said of a dataset is what is in it; a wrong tokenizer is noticed."""

from __future__ import annotations

from pathlib import Path

import inspect_dataset
import pytest

from megazpp.data.indexed_dataset import IndexedDatasetBuilder

NULL = ["--tokenizer-type", "NullTokenizer"]
DOCUMENTS = [[b"Hello, ", b"world"], [], [b"x" * 1000], [b"end"]]


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    with IndexedDatasetBuilder(tmp_path / "my", "<u2") as builder:
        for i, sentences in enumerate(DOCUMENTS):
            ids = [list(sentence) for sentence in sentences]
            if i == 0:
                ids[-1].append(256)
            builder.add_document(*ids)
        builder.finalize()
    return tmp_path / "my"


def run(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str, str]:
    code = inspect_dataset.main([str(word) for word in argv])
    return code, *capsys.readouterr()


def test_sizes_lengths_and_ends_are_counted_and_a_document_is_decoded(prefix: Path, capsys: pytest.CaptureFixture[str]):
    code, out, _ = run(capsys, "--input", prefix, *NULL)
    assert code == 0
    assert "2,032 bytes in .bin, 122 in .idx" in out
    assert "1,016 of uint16" in out
    assert "4, 1 of them empty, in 4 sequences" in out
    assert "0 to 1,000 tokens, mean 254.0" in out
    assert "half below 8," in out
    assert "at most 256; a vocabulary of 257" in out
    assert "of the first 3 documents that have text 1 end with eod (256)" in out
    assert out.endswith("\ndocument 0, 13 of its 13 tokens:\nHello, world\n")
    _, out, _ = run(capsys, "--input", prefix, *NULL, "--document", 2, "--tokens", 5)
    assert out.endswith("document 2, 5 of its 1,000 tokens:\nxxxxx\n")


def test_without_a_tokenizer_ids_are_shown(prefix: Path, capsys: pytest.CaptureFixture[str]):
    code, out, _ = run(capsys, "--input", prefix, "--document", 3)
    assert code == 0
    assert out.endswith("document 3, 3 of its 3 tokens:\n101 110 100\n")
    assert "eod" not in out


def test_documents_are_counted_by_their_length(prefix: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    _, out, _ = run(capsys, "--input", prefix)
    bars = [line.split() for line in out.splitlines() if " tokens " in line and " to " in line and "mean" not in line]
    assert sum(int(bar[4]) for bar in bars) == 3  # one has no tokens
    assert bars[0][0] == "3"
    assert bars[-1][-1].startswith("#")
    with IndexedDatasetBuilder(tmp_path / "one", "<u2") as builder:
        builder.add_document([1])
        builder.finalize()
    code, out, _ = run(capsys, "--input", tmp_path / "one")
    assert code == 0
    assert "1 to 1 tokens" in out


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ("", "--input is missing"),
        ("--input nothing", "nothing.idx does not exist"),
        ("--input junk", "not a Megatron index"),
        ("--input my --document 4", "--document 4: there are documents 0 to 3"),
        ("--input my --tokens -1", "--tokens -1 is negative"),
        ("--input wide --tokenizer-type NullTokenizer", "has the id 300: the tokenizer has only 257"),
    ],
)
def test_a_mistake_is_one_line(
    prefix: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, flags: str, reason: str
):
    monkeypatch.chdir(prefix.parent)
    for suffix in (".bin", ".idx"):
        Path(f"junk{suffix}").write_bytes(b"junk junk")
    with IndexedDatasetBuilder("wide", "<u2") as builder:
        builder.add_document([300])
        builder.finalize()
    code, _, err = run(capsys, *flags.split())
    assert code == 2
    assert err.startswith("inspect_dataset.py: error: ")
    assert reason in err
    assert err.count("\n") == 1
