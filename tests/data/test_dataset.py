"""Flags become tokenizers and datasets, and what cannot be is said with flag and value."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.pairs import write_pair
from helpers.refusals import not_refused

from megazpp.data.dataset import (
    DataConfig,
    Splits,
    build_datasets,
    build_tokenizer,
    check_inputs,
    parse_split,
    unigram_entropy,
)
from megazpp.data.text import read_documents, resolve_text_paths
from megazpp.data.tokenizer import ByteTokenizer, SentencePieceTokenizer, TokenizerConfig


def write(prefix: Path, *, first_id: int = 0, documents: int = 10, length: int = 20) -> str:
    """Documents of ids first_id, first_id + 1, ...: document d is d times over the same id."""
    return str(write_pair(prefix, [[first_id + d] * length for d in range(documents)]))


def build(tmp_path: Path, said: list[str] | None = None, *, num_samples=(20, 5, 5), **flags: Any) -> Splits:
    config = DataConfig(**{"data_cache_path": str(tmp_path / "cache"), "seq_length": 8, **flags})
    log = ([] if said is None else said).append
    return build_datasets(config, ByteTokenizer(), num_samples=Splits(*num_samples), seed=1, log=log)


def ids(dataset: Any) -> set[int]:
    return {int(token) for sample in dataset for token in sample}


def test_split_strings_are_proportions_and_others_are_refused():
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


def test_a_use_without_share_samples_or_paths_has_no_dataset(tmp_path):
    assert None not in build(tmp_path, mock_data=True, seq_length=512)
    assert not (tmp_path / "cache").exists()  # mock data need no files
    a, b = write(tmp_path / "a"), write(tmp_path / "b", first_id=100)
    assert [each is not None for each in build(tmp_path, data_path=(a,), split="6,4,0")] == [True, True, False]
    train, valid, test = build(tmp_path, train_data_path=(a,), valid_data_path=("1", b), num_samples=(20, 20, 20))
    assert (ids(train), ids(valid), test) == ({*range(10)}, {*range(100, 110)}, None)  # all of each
    whole = build(tmp_path, data_path=(a,), split="90,5,5")
    alone = build(tmp_path, data_path=(a,), split="90,5,5", num_samples=(20, 0, 0))
    assert (alone.valid, alone.test) == (None, None)
    assert [row.tolist() for row in alone.train] == [row.tolist() for row in whole.train]  # it is cut in the same place
    assert (ids(whole.train), ids(whole.valid), ids(whole.test)) == ({*range(9)}, {9}, {9})


def test_a_source_with_too_few_documents_for_its_split_is_split_inside_documents(tmp_path):
    said: list[str] = []
    a = str(write_pair(tmp_path / "a", [range(100), range(100, 200)]))
    train, valid, test = build(tmp_path, said, num_samples=(19, 2, 1), data_path=(a,), split="80,12,8")
    assert ids(train) <= {*range(160)}
    assert len(ids(train)) >= 153  # windows of 8 + 1 ids of the two parts
    assert ids(valid) <= {*range(160, 184)}
    assert ids(test) <= {*range(184, 200)}
    (note,) = [line for line in said if "note:" in line]
    assert f"--split: {a} has too few documents (2)" in note


def test_without_weights_every_dataset_counts_by_its_size(tmp_path):
    a = write(tmp_path / "a", documents=4, length=25)  # (100 - 1) // 8 = 12 samples
    b = write(tmp_path / "b", first_id=100, documents=12, length=25)  # 37
    for wanted, of_a in ((49, 12), (490, 120)):  # more than one epoch of both goes on in the same proportions
        train = build(tmp_path, data_path=(a, b), split="1", num_samples=(wanted, 0, 0)).train
        assert sum(int(train[i][0]) < 100 for i in range(wanted)) == of_a


def test_a_part_of_the_shipped_corpus_trains_a_tokenizer_and_is_enough_for_every_use(tmp_path):
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


def test_unigram_entropy_is_that_of_the_counts_in_the_proportions_of_a_blend(tmp_path):
    even, constant = write(tmp_path / "even", documents=8), write(tmp_path / "constant", documents=1)
    for paths, shares in (
        ((even,), np.full(8, 1 / 8)),
        (("1", even, "3", constant), np.array([0.75 + 0.25 / 8, *[0.25 / 8] * 7])),
    ):
        valid = build(tmp_path, data_path=paths, split="0,1,0", num_samples=(0, 40, 0)).valid
        assert unigram_entropy(valid, 257) == pytest.approx(-(shares * np.log(shares)).sum())


def test_flags_that_contradict_each_other_and_too_few_or_foreign_tokens_are_refused(tmp_path):
    a, b = write(tmp_path / "a"), write(tmp_path / "b", first_id=300)
    rows = [
        ({"mock_data": True, "text_path": ("x",)}, "--text-path and --mock-data are given"),
        ({"data_path": ("a",), "valid_data_path": ("b",)}, "--data-path and --train-data-path"),
        ({"mock_data": True, "split": "x"}, "--split 'x'"),
        ({"data_path": ("1", "a", "b")}, "--data-path 1 a b: give a weight before every"),
        ({"valid_data_path": ("0", "a")}, "--valid-data-path 0 a: weights must be positive"),
        ({"data_path": (a,), "split": "1", "seq_length": 200}, "too few for one sample of --seq-length 200"),
        ({"data_path": (a,), "split": "97,2,1"}, "a (valid) has 4 tokens, too few for one sample"),
        ({"data_path": (b,), "split": "1"}, "outside the tokenizer's vocabulary of 257"),
    ]
    assert not not_refused(rows, lambda flags: build(tmp_path, **flags))


def test_unusable_files_are_found_before_anything_is_built(tmp_path):
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
        ({"data_path": (good,)}, TokenizerConfig(), "--tokenizer-model is missing"),
        ({"data_path": (good,)}, TokenizerConfig(tokenizer_model="absent.model"), "--tokenizer-model absent.model"),
    ]
    assert not not_refused(rows, lambda flags, by: check_inputs(DataConfig(**flags, data_cache_path=cache), by))
    assert not Path(cache).exists()


def test_data_without_their_tokenizer_or_without_an_end_of_documents_are_refused():
    with pytest.raises(ValueError, match="--tokenizer-model is missing"):
        build_tokenizer(TokenizerConfig(), DataConfig(data_path=("a",), seq_length=8), log=print)
    tokenizer, config = ByteTokenizer(), DataConfig(mock_data=True, seq_length=8, reset_position_ids=True)
    tokenizer.eod = None
    with pytest.raises(ValueError, match="--reset-position-ids needs a tokenizer with an end-of-document token"):
        build_datasets(config, tokenizer, num_samples=Splits(1, 0, 0), seed=1, log=print)
