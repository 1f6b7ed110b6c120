"""A tokenizer is trained on files of every kind, written whole, and never over another unasked."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import pytest
import train_tokenizer

from megazpp.data.tokenizer import TokenizerConfig, load_tokenizer

TEXT = "Call me Ishmael. Some years ago--never mind how long precisely--having little or no money.\n" * 9


def run(capfd: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str, str]:
    code = train_tokenizer.main([str(word) for word in argv])
    return code, *capfd.readouterr()  # SentencePiece writes past sys.stderr


@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
def test_a_trained_tokenizer_gives_text_back(tmp_path: Path, capfd: pytest.CaptureFixture[str], model_type: str):
    (tmp_path / "a.txt").write_text(TEXT)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(json.dumps({"text": "Zanzibar! " * 50}).encode()))
    inputs = ["--input", tmp_path / "a.txt", tmp_path / "b.jsonl.gz"]
    code, out, err = run(
        capfd, *inputs, "--vocab-size", 292, "--model-type", model_type, "--output-prefix", tmp_path / "my"
    )
    assert (code, out) == (0, f"{tmp_path}/my.model\n")
    assert re.fullmatch(r"read 1,319 .*; training 292 pieces takes a while\na tokenizer of 292 pieces in .* s\n", err)
    tokenizer = load_tokenizer(TokenizerConfig(tokenizer_model=str(tmp_path / "my.model")))
    assert tokenizer is not None
    assert (tokenizer.vocab_size, tokenizer.eod) == (292, 1)
    for text in (TEXT, "Zanzibar", "  naïve—日本語 🐳\n\n", "<eod>"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode("Zanzibar")) < 8  # of 8 letters of which Z, z and b are only in the second file
    assert {path.name for path in tmp_path.iterdir()} == {"a.txt", "b.jsonl.gz", "my.model"}


def test_sentencepiece_says_how_far_it_is_if_it_is_asked_to(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    (tmp_path / "a.txt").write_text(TEXT)
    flags = ["--input", tmp_path / "a.txt", "--vocab-size", 292, "--output-prefix", tmp_path / "my"]
    assert "trainer_interface" in run(capfd, *flags, "--minloglevel", 0)[2]


def test_every_file_gives_an_equal_part_of_the_text(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    for name, letter in (("a", "q"), ("b", "z")):
        (tmp_path / f"{name}.jsonl").write_text((json.dumps({"body": f"{letter}{letter} " * 100}) + "\n") * 100)
    inputs = ["--input", tmp_path / "a.jsonl", tmp_path / "b.jsonl", "--max-characters", 3000, "--json-key", "body"]
    code, _, err = run(capfd, *inputs, "--vocab-size", 265, "--output-prefix", tmp_path / "my")
    assert code == 0
    assert "read 3,000 characters" in err
    tokenizer = load_tokenizer(TokenizerConfig(tokenizer_model=str(tmp_path / "my.model")))
    assert tokenizer is not None
    assert len(tokenizer.encode("qq")) == len(tokenizer.encode("zz")) < 3


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ("", "--input is missing"),
        ("--input a.txt --output-prefix none/x", "none is no directory"),
        ("--input none.txt", "none.txt cannot be read"),
        ("--input empty.txt", "holds no text"),
        ("--input junk.txt", "junk.txt, line 1: not UTF-8"),
        ("--input a.txt --vocab-size 100000", "--vocab-size 100000 does not suit this text"),
        ("--input a.txt --vocab-size 0", "--vocab-size 0 is not positive"),
        ("--input a.txt --output-prefix there", "there.model exists (--overwrite replaces it)"),
        ("--input a.txt --model-type word", "'word' is not one of bpe, unigram"),
    ],
)
def test_bad_input_gives_a_line_and_leaves_the_folder_as_it_was(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, flags: str, reason: str
):
    monkeypatch.chdir(tmp_path)
    for name, content in (
        ("a.txt", TEXT.encode()),
        ("empty.txt", b""),
        ("junk.txt", b"\xff"),
        ("there.model", b"mine"),
    ):
        (tmp_path / name).write_bytes(content)
    code, out, err = run(capfd, "--output-prefix", "x", "--vocab-size", 300, *flags.split())
    assert (code, out) == (2, "")
    assert err.splitlines()[-1].startswith("train_tokenizer.py: error: ")
    assert reason in err.splitlines()[-1]
    assert {path.name for path in tmp_path.iterdir()} == {"a.txt", "empty.txt", "junk.txt", "there.model"}
    assert (tmp_path / "there.model").read_bytes() == b"mine"
