"""Flags become tokenizers and datasets, and what cannot be is said with flag and value."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megazpp.data.dataset import (
    DataConfig,
    Splits,
    build_datasets,
    build_tokenizer,
    check_inputs,
    parse_split,
    unigram_entropy,
)
from megazpp.data.indexed_dataset import IndexedDatasetBuilder
from megazpp.data.text import read_documents, resolve_text_paths
from megazpp.data.tokenizer import ByteTokenizer, SentencePieceTokenizer, TokenizerConfig


def write(prefix: Path, *, first_id: int, documents: int = 10, length: int = 20) -> str:
    """Documents of ids first_id, first_id + 1, ...: document d is d times over the same id."""
    with IndexedDatasetBuilder(prefix, np.uint16) as builder:
        for d in range(documents):
            builder.add_document(np.full(length, first_id + d))
        builder.finalize()
    return str(prefix)


def build(tmp_path: Path, *, num_samples: tuple[int, int, int] = (20, 5, 5), **flags: Any) -> Splits:
    config = DataConfig(**{"data_cache_path": str(tmp_path / "cache"), "seq_length": 8, **flags})
    return build_datasets(config, ByteTokenizer(), num_samples=Splits(*num_samples), seed=1, log=lambda _: None)


def ids(dataset: Any) -> set[int]:
    return {int(token) for i in range(len(dataset)) for token in dataset[i]}


def test_split_cuts_the_documents_in_file_order(tmp_path: Path) -> None:
    a = write(tmp_path / "a", first_id=0)
    train, valid, test = build(tmp_path, data_path=(a,), split="6,3,1")
    assert ids(train) == set(range(6))
    assert ids(valid) == {6, 7, 8}
    assert ids(test) == {9}


@pytest.mark.parametrize(
    ("split", "bounds"),
    [
        ("969, 30, 1", [0, 0.969, 0.999, 1]),
        ("90,10", [0, 0.9, 1, 1]),
        ("1", [0, 1, 1, 1]),
        ("0.5/0.25/0.25", [0, 0.5, 0.75, 1]),
        ("0,0,3", [0, 0, 0, 1]),
    ],
)
def test_split_strings_are_proportions(split: str, bounds: list[float]) -> None:
    parsed = parse_split(split)
    np.testing.assert_allclose([parsed.train[0], *(edges[1] for edges in parsed)], bounds, rtol=1e-12)
    assert parsed.train[1] == parsed.valid[0]
    assert parsed.valid[1] == parsed.test[0]


@pytest.mark.parametrize(
    "split", ["", "a,b,c", "90,,10", "90,-1,11", "0,0,0", "1,2,3,4", "nan,1,1", "inf,1,1", "90;10"]
)
def test_bad_split_strings_are_refused(split: str) -> None:
    with pytest.raises(ValueError, match=f"--split '{split}' is not"):
        parse_split(split)


def test_a_use_without_share_or_samples_has_no_dataset(tmp_path: Path) -> None:
    a = write(tmp_path / "a", first_id=0)
    train, valid, test = build(tmp_path, data_path=(a,), split="6,4,0")
    assert train is not None
    assert valid is not None
    assert test is None
    train, valid, test = build(tmp_path, data_path=(a,), split="6,3,1", num_samples=(3, 0, 0))
    assert (valid, test) == (None, None)


def test_a_source_with_too_few_documents_for_its_split_is_split_inside_documents(tmp_path: Path) -> None:
    with IndexedDatasetBuilder(tmp_path / "a", np.uint16) as builder:  # two documents, of the ids 0 to 99, 100 to 199
        for d in range(2):
            builder.add_document(np.arange(100 * d, 100 * d + 100))
        builder.finalize()
    said: list[str] = []
    config = DataConfig(
        data_path=(str(tmp_path / "a"),), split="80,12,8", seq_length=8, data_cache_path=str(tmp_path / "cache")
    )
    train, valid, test = build_datasets(config, ByteTokenizer(), num_samples=Splits(19, 2, 1), seed=1, log=said.append)
    assert ids(train) <= set(range(160))
    assert len(ids(train)) >= 153  # windows of 8 + 1 ids of the two parts
    assert ids(valid) <= set(range(160, 184))
    assert ids(test) <= set(range(184, 200))
    notes = [line for line in said if "note:" in line]
    assert notes == [
        f"note: --split: {tmp_path / 'a'} has too few documents (2) to give each use whole ones; it is split inside"
        " documents, by tokens"
    ]


def test_where_a_split_is_cut_does_not_depend_on_what_a_run_uses_of_it(tmp_path: Path) -> None:
    a = write(tmp_path / "a", first_id=0)
    all_of_it = build(tmp_path, data_path=(a,), split="90,5,5")
    training_alone = build(tmp_path, data_path=(a,), split="90,5,5", num_samples=(20, 0, 0))
    assert training_alone.test is None
    assert ids(training_alone.train) == ids(all_of_it.train) == set(range(9))
    assert ids(all_of_it.valid) == ids(all_of_it.test) == {9}
    assert [row.tolist() for row in training_alone.train] == [row.tolist() for row in all_of_it.train]


def test_a_split_by_tokens_with_too_few_of_them_is_refused(tmp_path: Path) -> None:
    a = write(tmp_path / "a", first_id=0, documents=1, length=100)
    with pytest.raises(ValueError, match=r"a \(valid\) has 3 tokens, too few for one sample of --seq-length 8 \+ 1"):
        build(tmp_path, data_path=(a,), split="96,3,1")


@pytest.mark.parametrize("split", ["900,100,0", "80,12,8"])
def test_one_text_of_100_kilobytes_is_enough_for_a_tokenizer_and_every_use(tmp_path: Path, split: str) -> None:
    shipped = next(read_documents(path) for path in resolve_text_paths(["builtin:moby_dick"]))
    text = " ".join(shipped)[:100_000]
    file = tmp_path / "my_text.txt"
    file.write_text(text, encoding="utf-8")
    config = DataConfig(text_path=(str(file),), data_cache_path=str(tmp_path), seq_length=128, split=split)
    tokenizer = build_tokenizer(TokenizerConfig(vocab_size=8000), config, log=lambda _: None)
    wanted = Splits(300, 128, 128)
    datasets = build_datasets(config, tokenizer, num_samples=wanted, seed=1, log=lambda _: None)
    for dataset, count in zip(datasets, wanted, strict=True):
        assert dataset is None or len(dataset) >= count
    assert datasets.valid is not None
    assert tokenizer.decode(datasets.train[0][:-1]) in text
    assert tokenizer.decode(datasets.valid[0][:-1]) in text[80_000:]


def test_weights_are_proportions_of_samples_whatever_the_sizes(tmp_path: Path) -> None:
    a = write(tmp_path / "a", first_id=0, documents=2)
    b = write(tmp_path / "b", first_id=100, documents=50)
    train = build(tmp_path, data_path=("3", a, "1", b), split="1", num_samples=(400, 0, 0)).train
    assert len(train) == 400
    assert sum(int(train[i][0]) < 100 for i in range(400)) == 300


def test_without_weights_every_dataset_counts_by_its_size(tmp_path: Path) -> None:
    a = write(tmp_path / "a", first_id=0, documents=4, length=25)  # (100 - 1) // 8 = 12 samples
    b = write(tmp_path / "b", first_id=100, documents=12, length=25)  # 37
    train = build(tmp_path, data_path=(a, b), split="1", num_samples=(49, 0, 0)).train
    assert sum(int(train[i][0]) < 100 for i in range(49)) == 12
    # more than one epoch of both goes on in the same proportions
    train = build(tmp_path, data_path=(a, b), split="1", num_samples=(490, 0, 0)).train
    assert sum(int(train[i][0]) < 100 for i in range(490)) == 120


def test_paths_per_split_use_all_of_each(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a", first_id=0), write(tmp_path / "b", first_id=100)
    train, valid, test = build(tmp_path, train_data_path=(a,), valid_data_path=("1", b), num_samples=(20, 20, 20))
    assert ids(train) == set(range(10))
    assert ids(valid) == set(range(100, 110))
    assert test is None


def test_rewritten_data_get_new_indices(tmp_path: Path) -> None:
    write(tmp_path / "a", first_id=0, documents=10)
    assert len(ids(build(tmp_path, data_path=(str(tmp_path / "a"),), split="1").train)) == 10
    write(tmp_path / "a", first_id=0, documents=5)
    assert len(ids(build(tmp_path, data_path=(str(tmp_path / "a"),), split="1").train)) == 5


def test_mock_data_need_no_files(tmp_path: Path) -> None:
    train, valid, test = build(tmp_path, mock_data=True, seq_length=512)
    assert train is not None
    assert valid is not None
    assert test is not None
    assert not (tmp_path / "cache").exists()


def test_the_shipped_corpus_trains_a_tokenizer_and_gives_text_back(tmp_path: Path) -> None:
    config = DataConfig(text_path=("builtin:moby_dick",), data_cache_path=str(tmp_path), seq_length=64, split="90,10,0")
    said: list[str] = []
    tokenizer = build_tokenizer(TokenizerConfig(vocab_size=1000), config, log=said.append)
    assert isinstance(tokenizer, SentencePieceTokenizer)
    assert tokenizer.vocab_size == 1000
    datasets = build_datasets(config, tokenizer, num_samples=Splits(100, 50, 10), seed=1, log=said.append)
    assert datasets.test is None
    assert any("124 documents" in line for line in said)
    assert tokenizer.decode(datasets.train[0]).isprintable() or "\n" in tokenizer.decode(datasets.train[0])
    assert 4.0 < unigram_entropy(datasets.valid, tokenizer.vocab_size) < np.log(1000)


def test_unigram_entropy_is_that_of_the_counts(tmp_path: Path) -> None:
    even = write(tmp_path / "even", first_id=3, documents=8)
    valid = build(tmp_path, data_path=(even,), split="0,1,0").valid
    assert unigram_entropy(valid, 257) == pytest.approx(np.log(8))
    constant = write(tmp_path / "constant", first_id=3, documents=1)
    blend = build(tmp_path, data_path=("1", even, "3", constant), split="0,1,0", num_samples=(0, 40, 0)).valid
    shares = np.array([0.75 + 0.25 / 8, *[0.25 / 8] * 7])
    assert unigram_entropy(blend, 257) == pytest.approx(-(shares * np.log(shares)).sum())


def test_a_tokenizer_that_does_not_fit_the_data_is_refused_before_training(tmp_path: Path) -> None:
    a = write(tmp_path / "a", first_id=300)
    with pytest.raises(ValueError, match=r"a .train.: sample 0 holds the token id .* vocabulary of 257"):
        build(tmp_path, data_path=(a,), split="1")


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ({"mock_data": True, "text_path": ("x",)}, "--text-path and --mock-data are given"),
        ({"data_path": ("a",), "valid_data_path": ("b",)}, "--data-path and --train-data-path.* are given"),
        ({"mock_data": True, "seq_length": 0}, "--seq-length 0"),
        ({"mock_data": True, "split": "x"}, "--split 'x'"),
        ({"mock_data": True, "num_workers": -1}, "--num-workers -1"),
        ({"data_path": ("1", "a", "b")}, "--data-path 1 a b: give a weight before every"),
        ({"valid_data_path": ("0", "a")}, "--valid-data-path 0 a: weights must be positive"),
    ],
)
def test_contradictory_flags_are_refused_without_opening_a_file(flags: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        DataConfig(**{"seq_length": 8, **flags})


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ({}, "exactly one source of data is needed.*none is given"),
        ({"data_path": ("{tmp}/none",)}, r"--data-path {tmp}/none: .*none\.idx does not exist"),
        ({"test_data_path": ("{tmp}/none",)}, "--test-data-path {tmp}/none: "),
        ({"text_path": ("{tmp}/none",)}, "--text-path {tmp}/none does not exist"),
        ({"data_path": ("{tmp}/a",), "split": "1", "seq_length": 200}, "too few for one sample of --seq-length 200"),
    ],
)
def test_unusable_sources_are_refused_with_flag_and_value(tmp_path: Path, flags: dict[str, Any], reason: str) -> None:
    write(tmp_path / "a", first_id=0)
    filled = {
        name: tuple(part.format(tmp=tmp_path) for part in value) if isinstance(value, tuple) else value
        for name, value in flags.items()
    }
    with pytest.raises(ValueError, match=reason.format(tmp=tmp_path)):
        build(tmp_path, **filled)


def test_unusable_files_are_found_before_anything_is_built(tmp_path: Path) -> None:
    good = write(tmp_path / "good", first_id=1)
    cache = str(tmp_path / "cache")
    (tmp_path / "junk.idx").write_bytes(b"junk")
    (tmp_path / "junk.bin").write_bytes(b"junk")
    byte_level = TokenizerConfig(tokenizer_type="NullTokenizer")
    check_inputs(DataConfig(data_path=(good,), data_cache_path=cache), byte_level)
    for flags, tokenizer, reason in (
        ({"text_path": (str(tmp_path / "absent.txt"),)}, TokenizerConfig(), "--text-path .*absent.txt does not exist"),
        ({"data_path": (str(tmp_path / "absent"),)}, byte_level, "--data-path .*absent"),
        ({"valid_data_path": (str(tmp_path / "junk"),)}, byte_level, "--valid-data-path .*junk"),
        ({"data_path": (good,)}, TokenizerConfig(), "--tokenizer-model is missing"),
        ({"data_path": (good,)}, TokenizerConfig(tokenizer_model="absent.model"), "--tokenizer-model absent.model"),
    ):
        with pytest.raises(ValueError, match=reason):
            check_inputs(DataConfig(**flags, data_cache_path=cache), tokenizer)
    assert not Path(cache).exists()


def test_document_flags_need_a_tokenizer_that_ends_documents(tmp_path: Path) -> None:
    tokenizer = ByteTokenizer()
    tokenizer.eod = None
    config = DataConfig(mock_data=True, seq_length=8, reset_position_ids=True)
    with pytest.raises(ValueError, match="--reset-position-ids needs a tokenizer with an end-of-document token"):
        build_datasets(config, tokenizer, num_samples=Splits(1, 0, 0), seed=1, log=lambda _: None)


def test_written_data_need_a_tokenizer(tmp_path: Path) -> None:
    config = DataConfig(data_path=("a",), seq_length=8)
    with pytest.raises(ValueError, match="--tokenizer-model is missing"):
        build_tokenizer(TokenizerConfig(), config, log=lambda _: None)


RANK = """
import sys
from megazpp.data import text
from megazpp.data.dataset import *
train = text.train_sentencepiece
def counted(*args):
    with open(sys.argv[1] + "/trained", "a") as file:
        file.write("once\\n")
    return train(*args)
text.train_sentencepiece = counted
config = DataConfig(text_path=("builtin:moby_dick",), data_cache_path=sys.argv[1], seq_length=64, split="90,10,0")
tokenizer = build_tokenizer(TokenizerConfig(vocab_size=600), config, log=print)
data = build_datasets(config, tokenizer, num_samples=Splits(900, 9, 0), seed=1, log=lambda _: None)
print(tokenizer.identity, [int(sum(data.train[i])) for i in range(0, 900, 100)])
"""


@pytest.mark.slow
def test_ranks_that_start_together_agree_and_one_of_them_trains_the_tokenizer(tmp_path: Path) -> None:
    command = [sys.executable, "-c", RANK, str(tmp_path)]
    ranks = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    lines = [rank.communicate(timeout=100)[0].splitlines() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0, 0]
    assert len({rank_lines[-1] for rank_lines in lines}) == 1
    assert (tmp_path / "trained").read_text() == "once\n"
