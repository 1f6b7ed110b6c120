"""Test how flags and text files become tokenizers and datasets. Errors must name the flag and its value."""

import hashlib
import itertools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.pairs import TEXT, write_jsonl, write_pair
from helpers.refusals import not_refused

from megazpp.data.config import DataConfig, Splits, parse_split
from megazpp.data.dataset import build_datasets, build_tokenizer, check_inputs, unigram_entropy
from megazpp.data.indexed_dataset import IndexedDataset
from megazpp.data.text import (
    _IN_SENTENCEPIECE,
    _in_our_flags,
    cached_indexed_dataset,
    cached_sentencepiece,
    content_hash,
    first_characters,
    read_documents,
    resolve_text_paths,
    train_sentencepiece,
)
from megazpp.data.tokenizer import ByteTokenizer, SentencePieceTokenizer, TokenizerConfig


def write(prefix: Path, *, first_id: int = 0, documents: int = 10, length: int = 20) -> str:
    """Write a .bin/.idx pair in which document d repeats the token id first_id + d. Return the pair's prefix."""
    return str(write_pair(prefix, [[first_id + d] * length for d in range(documents)]))


def build(
    tmp_path: Path, said: list[str] | None = None, *, num_samples=(20, 5, 5), exact: bool = True, **flags: Any
) -> Splits:
    config = DataConfig(**{"data_cache_path": str(tmp_path / "cache"), "seq_length": 8, **flags})
    log = ([] if said is None else said).append
    return build_datasets(config, ByteTokenizer(), num_samples=Splits(*num_samples), seed=1, exact=exact, log=log)


def ids(dataset: Any) -> set[int]:
    return {int(token) for sample in dataset for token in sample}


def test_split_strings_are_proportions_or_are_rejected():
    for split, ends in (
        ("969, 30, 1", [0.969, 0.999, 1]),
        ("90,10", [0.9, 1, 1]),
        ("1", [1, 1, 1]),
        ("0.5/0.25/0.25", [0.5, 0.75, 1]),
        ("0,0,3", [0, 0, 1]),
    ):
        np.testing.assert_allclose(parse_split(split), [*itertools.pairwise([0, *ends])], rtol=1e-12)
    wrong = ["", "a,b,c", "90,,10", "90,-1,11", "0,0,0", "1,2,3,4", "nan,1,1", "inf,1,1", "90;10"]
    assert not not_refused([(split, f"--split '{split}' is not") for split in wrong], parse_split)


def test_split_without_share_samples_or_paths_has_no_dataset(tmp_path):
    assert None not in build(tmp_path, mock_data=True, seq_length=512)
    assert not (tmp_path / "cache").exists()  # --mock-data needs no files, not even a cache
    a, b = write(tmp_path / "a"), write(tmp_path / "b", first_id=100)
    assert [each is not None for each in build(tmp_path, data_path=(a,), split="6,4,0")] == [True, True, False]
    train, valid, test = build(tmp_path, train_data_path=(a,), valid_data_path=("1", b), num_samples=(20, 20, 20))
    # --train-data-path and --valid-data-path use each dataset completely, and there is no test dataset
    assert (ids(train), ids(valid), test) == ({*range(10)}, {*range(100, 110)}, None)
    whole = build(tmp_path, data_path=(a,), split="90,5,5")
    alone = build(tmp_path, data_path=(a,), split="90,5,5", num_samples=(20, 0, 0))
    assert (alone.valid, alone.test) == (None, None)
    # Without validation and test samples, the training split must still end where --split says.
    assert [row.tolist() for row in alone.train] == [row.tolist() for row in whole.train]
    assert (ids(whole.train), ids(whole.valid), ids(whole.test)) == ({*range(9)}, {9}, {9})


def test_source_with_too_few_documents_is_split_inside_documents(tmp_path):
    said: list[str] = []
    a = str(write_pair(tmp_path / "a", [range(100), range(100, 200)]))
    train, valid, test = build(tmp_path, said, num_samples=(19, 2, 1), data_path=(a,), split="80,12,8")
    assert ids(train) <= {*range(160)}
    assert len(ids(train)) >= 153  # 19 samples of 8 ids, and one more label, are 153 of the 160 training ids
    assert ids(valid) <= {*range(160, 184)}
    assert ids(test) <= {*range(184, 200)}
    (note,) = [line for line in said if "note:" in line]
    assert f"--split: {a} has too few documents (2)" in note


def test_datasets_without_weights_are_weighted_by_size(tmp_path):
    a = write(tmp_path / "a", documents=4, length=25)  # 100 tokens in all give (100 - 1) // 8 = 12 samples
    b = write(tmp_path / "b", first_id=100, documents=12, length=25)  # 300 tokens give (300 - 1) // 8 = 37 samples
    for wanted, of_a in ((49, 12), (490, 120)):  # also with ten epochs, the two datasets keep the proportion 12 : 37
        train = build(tmp_path, data_path=(a, b), split="1", num_samples=(wanted, 0, 0)).train
        assert sum(int(train[i][0]) < 100 for i in range(wanted)) == of_a


def test_part_of_the_shipped_corpus_trains_a_tokenizer_and_fills_splits(tmp_path):
    shipped = next(read_documents(path) for path in resolve_text_paths(["builtin:moby_dick"]))
    text, said = " ".join(shipped)[:100_000], list[str]()
    (tmp_path / "my_text.txt").write_text(text, encoding="utf-8")
    sources = {"text_path": (f"{tmp_path}/my_text.txt",), "data_cache_path": str(tmp_path)}
    config = DataConfig(**sources, seq_length=128, split="80,12,8")
    tokenizer = build_tokenizer(TokenizerConfig(vocab_size=8000), config, log=said.append)
    assert isinstance(tokenizer, SentencePieceTokenizer)
    assert tokenizer.vocab_size == 8000
    wanted = Splits(300, 128, 128)
    datasets = build_datasets(config, tokenizer, num_samples=wanted, seed=1, log=said.append)
    assert all(len(dataset) >= count for dataset, count in zip(datasets, wanted, strict=True))
    assert tokenizer.decode(datasets.train[0][:-1]) in text
    assert tokenizer.decode(datasets.valid[0][:-1]) in text[80_000:]
    assert 4.0 < unigram_entropy(datasets.valid, tokenizer.vocab_size) < np.log(8000)


def test_unigram_entropy_weights_counts_by_the_blends_proportions(tmp_path):
    even, constant = write(tmp_path / "even", documents=8), write(tmp_path / "constant", documents=1)
    for paths, shares in (
        ((even,), np.full(8, 1 / 8)),
        (("1", even, "3", constant), np.array([0.75 + 0.25 / 8, *[0.25 / 8] * 7])),
    ):
        valid = build(tmp_path, data_path=paths, split="0,1,0", num_samples=(0, 40, 0)).valid
        assert unigram_entropy(valid, 257) == pytest.approx(-(shares * np.log(shares)).sum())


def test_contradictory_flags_and_unsuitable_tokens_are_rejected(tmp_path):
    a, b = write(tmp_path / "a"), write(tmp_path / "b", first_id=300)
    rows = [
        ({"mock_data": True, "text_path": ("x",)}, "--text-path and --mock-data are given"),
        ({"data_path": ("a",), "valid_data_path": ("b",)}, "--data-path and --train-data-path"),
        ({"mock_data": True, "split": "x"}, "--split 'x'"),
        ({"valid_data_path": ("0", "a")}, "--valid-data-path 0 a: weights must be positive"),
        ({"data_path": (a,), "split": "1", "seq_length": 200}, "too few for one sample of --seq-length 200"),
        ({"data_path": (a,), "split": "97,2,1"}, "a (valid) has 4 tokens, too few for one sample"),
        ({"data_path": (b,), "split": "1"}, "outside the tokenizer's vocabulary of 257"),
    ]
    assert not not_refused(rows, lambda flags: build(tmp_path, **flags))


def test_unusable_files_are_rejected_before_anything_is_built(tmp_path):
    good, cache = write(tmp_path / "good"), str(tmp_path / "cache")
    (tmp_path / "junk.idx").write_bytes(b"junk")
    (tmp_path / "junk.bin").write_bytes(b"junk")
    byte_level = TokenizerConfig(tokenizer_type="NullTokenizer")
    check_inputs(DataConfig(data_path=(good,), data_cache_path=cache), byte_level)
    rows = [
        ({"text_path": (str(tmp_path / "absent.txt"),)}, TokenizerConfig(), "absent.txt does not exist"),
        ({"data_path": (str(tmp_path / "absent"),)}, byte_level, f"--data-path {tmp_path}/absent"),
        ({"valid_data_path": (str(tmp_path / "junk"),)}, byte_level, f"--valid-data-path {tmp_path}/junk"),
        ({}, byte_level, "none is given"),
        (
            {"mock_data": True},
            TokenizerConfig(vocab_size=64),
            "--vocab-size 64 is below 256, the number of byte values",
        ),
        ({"data_path": (good,)}, TokenizerConfig(), "--tokenizer-model is missing"),
        ({"data_path": (good,)}, TokenizerConfig(tokenizer_model="absent.model"), "--tokenizer-model absent.model"),
    ]
    assert not not_refused(rows, lambda flags, by: check_inputs(DataConfig(**flags, data_cache_path=cache), by))
    assert not Path(cache).exists()


# ---- text files that are tokenized at the start of a run ----


def test_document_flags_on_data_without_eod_give_one_warning(tmp_path):
    eod = ByteTokenizer().eod
    ends = str(write_pair(tmp_path / "ends", [[1] * 20 + [eod]] * 10))
    bare, late = write(tmp_path / "bare"), str(write_pair(tmp_path / "late", [[1] * 20] * 64 + [[eod]] * 10))
    inside = str(write_pair(tmp_path / "inside", [[1] * 3000 + [eod] + [1] * 3000]))
    flags = ["reset_attention_mask", "reset_position_ids", "eod_mask_loss"]

    def warnings(*paths: str, on: list[str] = flags, **other: Any) -> list[str]:
        said: list[str] = []
        build(tmp_path, said, data_path=paths, split="1", **dict.fromkeys(on, True), **other)
        return [line for line in said if line.startswith("WARNING")]

    for flag in flags:
        (warning,) = warnings(bare, on=[flag])
        assert f"sequences of {bare} have no end-of-document token ({eod})" in warning
        assert f"--{flag.replace('_', '-')} has no effect" in warning
    (warning,) = warnings(bare, ends, late)
    assert f"sequences of {bare}, {late} have" in warning
    assert "--reset-position-ids, --reset-attention-mask, --eod-mask-loss has no effect" in warning
    assert warnings(ends) == warnings(inside) == warnings(bare, on=[]) == []
    said: list[str] = []
    build(tmp_path, said, train_data_path=(ends,), valid_data_path=(bare,), eod_mask_loss=True)
    assert sum(line.startswith("WARNING") for line in said) == 1
    build(tmp_path, said, mock_data=True, eod_mask_loss=True)
    (tmp_path / "text.txt").write_text(TEXT)
    build(tmp_path, said, text_path=(str(tmp_path / "text.txt"),), eod_mask_loss=True, num_samples=(1, 0, 0))
    assert sum(line.startswith("WARNING") for line in said) == 1


def test_shipped_corpus_has_one_document_per_chapter():
    (path,) = resolve_text_paths(["builtin:moby_dick"])
    documents = list(read_documents(path))
    assert len(documents) == 138
    assert documents[2].startswith("CHAPTER 1. Loomings.\n\nCall me Ishmael.")
    assert documents[-1].rstrip().endswith("only found another orphan.")


def test_equal_content_is_tokenized_once_and_edited_content_again(tmp_path):
    said: list[str] = []

    def tokenize(path: Path) -> Path:
        return cached_indexed_dataset([path], ByteTokenizer(), cache_dir=tmp_path / "cache", log=said.append)

    first = tokenize(write_jsonl(tmp_path / "a.jsonl", "one"))
    assert tokenize(write_jsonl(tmp_path / "renamed.jsonl", "one")) == first
    assert said == ["tokenizing a.jsonl"]
    second = tokenize(write_jsonl(tmp_path / "a.jsonl", "two"))
    assert [bytes(IndexedDataset(pair).get(0)[:3].tolist()) for pair in (first, second)] == [b"one", b"two"]
    # Under the suffix .txt, the same bytes would be plain text. The tokenizer refuses them, because they look like JSON
    # lines.
    with pytest.raises(ValueError, match="begins as JSON does, but is not named"):
        tokenize((tmp_path / "a.jsonl").rename(tmp_path / "a.txt"))


def test_tokenizer_is_trained_once_per_text_and_size(tmp_path):
    # a line of 55,000 characters without a space, from which training must still learn pieces
    path, said = write_jsonl(tmp_path / "a.jsonl", "abracadabra" * 5000), []

    def train(size: int, *, exact: bool = True, source: Path = path) -> SentencePieceTokenizer:
        return cached_sentencepiece([source], size, exact=exact, cache_dir=tmp_path / "cache", log=said.append)

    assert train(280).identity == train(280).identity != train(281).identity
    assert len(said) == 2
    assert len(train(281).encode("abracadabra" * 10)) < 50
    # training is deterministic, so nodes that train it separately get the same tokenizer
    assert train_sentencepiece(iter([TEXT]), 300) == train_sentencepiece([TEXT], 300)
    # With `exact=False` (the user has not typed --vocab-size), an unsuitable size is changed, and a note in the log
    # says so. The note also appears if the trained tokenizer comes from the cache.
    many = write_jsonl(tmp_path / "many.jsonl", "".join(chr(0x4E00 + number % 700) for number in range(70_000)))
    for size, source, limit in ((2048, path, "<= "), (2048, path, "<= "), (300, many, "300 vs ")):
        with pytest.raises(ValueError, match=f"--vocab-size {size} does not suit this text: .* {limit}") as refused:
            train(size, source=source)
        fitting = int(re.search(rf"{limit}(\d+)", str(refused.value))[1])
        assert train(size, exact=False, source=source).vocab_size == fitting
        assert said[-1] == f"note: the tokenizer has {fitting} pieces, because {size} do not suit this text"


@pytest.mark.parametrize(
    ("folder", "name"), [("tokenizers", "*.model"), ("text", "*/text.idx"), ("text", "*/text.bin")]
)
def test_damaged_cache_entry_is_named_with_what_to_do(folder, name, tmp_path):
    def use() -> None:
        cached_sentencepiece([path], 280, exact=True, cache_dir=tmp_path, log=str)
        cached_indexed_dataset([path], ByteTokenizer(), cache_dir=tmp_path, log=str)

    path = write_jsonl(tmp_path / "a.jsonl", "abracadabra" * 500)
    use()
    (entry,) = (tmp_path / folder).glob(name)
    entry.write_bytes(bytes(100))
    with pytest.raises(
        ValueError, match=f"^--data-cache-path: {tmp_path / folder}/.* is damaged: .*; delete it to rebui"
    ):
        use()


def test_split_that_was_not_typed_may_leave_evaluations_without_data(tmp_path):
    said: list[str] = []
    a, flags = write(tmp_path / "a"), {"seq_length": 64, "split": "90,5,5"}
    train, valid, test = build(tmp_path, said, data_path=(a,), exact=False, **flags)
    assert (train is None, valid, test) == (False, None, None)
    assert sum("so there is no" in line for line in said) == 2
    with pytest.raises(ValueError, match=r"\(valid\) has 10 tokens, too few"):
        build(tmp_path, said, data_path=(a,), **flags)
    short = write(tmp_path / "short", documents=1)
    for use in ("valid", "test"):  # data that a flag names for a use may not be left out
        with pytest.raises(ValueError, match=rf"short \({use}\) has \d+ tokens, too few"):
            build(tmp_path, train_data_path=(a,), exact=False, **{f"{use}_data_path": (short,)}, **flags)


def test_more_samples_than_memory_can_index_are_rejected_with_their_flag(tmp_path):
    a, b, huge = write(tmp_path / "a"), write(tmp_path / "b"), 10**14
    rows = [
        (
            {"mock_data": True},
            (huge, 0, 0),
            "--train-iters or --train-samples: the index of 100,000,000,000,000 train",
        ),
        ({"data_path": (a,)}, (huge, 0, 0), "--train-iters or --train-samples"),
        ({"data_path": (a, b)}, (huge, 0, 0), "--train-iters or --train-samples"),
        ({"train_data_path": (a,), "valid_data_path": (b,)}, (5, huge, 0), "--eval-iters"),
    ]
    assert not not_refused(rows, lambda flags, wanted: build(tmp_path, num_samples=wanted, **flags))


def test_unsuitable_vocabulary_size_is_rejected_without_sentencepieces_log():
    # messages of SentencePiece's internal errors begin with "Internal:" in version 0.2.1, with "INTERNAL:" in 0.2.3
    for internal in ("Internal", "INTERNAL"):
        assert _IN_SENTENCEPIECE.sub("", f"{internal}: src/trainer_interface.cc(664) [(a()) == (b())] high") == " high"
    for text, size, reason in (
        (TEXT, 100_000, "Vocabulary size too high (100000). Please set it to a value <= "),
        (TEXT, 10, "Vocabulary size is smaller than required_chars. 10 vs "),
        ("\n\n", 300, "it is blank"),
    ):
        message = re.escape(f"--vocab-size {size} does not suit this text: {reason}")
        with pytest.raises(ValueError, match=f"^{message}") as raised:
            train_sentencepiece(iter([text]), size)
        assert "trainer_interface" not in str(raised.value)
        # the advice must not name SentencePiece's --character_coverage, because this program has no such flag
        assert "--character" not in str(raised.value)


def test_sentencepieces_advice_names_flags_of_the_program():
    for options, advice in (
        ({}, "Increase --vocab-size."),
        ({"character_coverage": None}, "Increase --vocab-size or decrease --character-"),
    ):
        with pytest.raises(ValueError, match=rf"10 vs \d+\. {advice}"):
            train_sentencepiece(iter([TEXT]), 10, **options)
    kept = _in_our_flags("Too many of them. Use --input_sentence_size=9. Good night.", has_coverage=True)
    assert kept == "Too many of them. Good night."


def test_first_characters_may_end_inside_a_text():
    wanted = {1: ["a"], 2: ["ab"], 3: ["ab", "", "c"], 5: ["ab", "", "cde"], 9: ["ab", "", "cde", "f"]}
    for limit, cut in wanted.items():
        texts = iter(["ab", "", "cde", "f"])
        assert list(first_characters(texts, limit)) == cut
        # after reaching the limit, the function takes no further text from the iterator
        assert (next(texts, None) is None) == (limit == 9)


def test_unreadable_text_is_rejected_by_name(tmp_path):
    path, empty = tmp_path / "a.jsonl", [write_jsonl(tmp_path / "empty.jsonl")]
    path.write_bytes(b'{"text": "a"}\n{"text": ""}\n{"text": \n')
    documents, cache = read_documents(path), {"cache_dir": tmp_path, "log": print}
    sized = cache | {"exact": False}
    assert next(documents) == "a"
    rows = [
        (lambda: next(documents), f"--text-path {path}, line 3: not JSON"),
        (lambda: resolve_text_paths([f"{tmp_path}/none"]), "none does not exist"),
        (
            lambda: resolve_text_paths([f"{tmp_path}"]),
            f"--text-path {tmp_path} is a folder: give its files, {tmp_path}/*",
        ),
        (lambda: resolve_text_paths([f"{tmp_path}/*.txt"]), "*.txt matches no file"),
        (lambda: resolve_text_paths(["builtin:hamlet"]), "there is no such corpus; there are builtin:moby_dick"),
        (
            lambda: cached_indexed_dataset(empty, ByteTokenizer(), **cache),
            "--text-path empty.jsonl contains only empty documents",
        ),
        (lambda: cached_sentencepiece(empty, 300, **sized), "--text-path empty.jsonl contains only empty documents"),
    ]
    assert not not_refused(rows, lambda ask: ask())
    # the error names the bad line, although SentencePiece's training reads it, and not --vocab-size
    with pytest.raises(ValueError, match=f"^--text-path {path}, line 3"):
        train_sentencepiece(read_documents(path), 300)


def test_a_text_is_hashed_once_until_it_changes(tmp_path, monkeypatch):
    reads, path, digest = [], tmp_path / "a.txt", hashlib.file_digest
    monkeypatch.setattr(hashlib, "file_digest", lambda file, name: reads.append(name) or digest(file, name))
    path.write_text("Call me Ishmael.")
    first = content_hash([path])
    assert content_hash([path]) == first
    assert len(reads) == 1
    path.write_text("Call me Ahab.")
    assert content_hash([path]) != first
    assert len(reads) == 2
