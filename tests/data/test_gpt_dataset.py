"""Compare the vectorized sample indices with a plain loop, and the plain loop with Megatron-Core's indices."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from helpers.pairs import Lists
from helpers.refusals import not_refused
from hypothesis import given
from hypothesis import strategies as st

from megazpp.data.gpt_dataset import GPTDataset, Indices, build_indices


def naive_indices(lengths: Sequence[int], num_samples: int, seq_length: int, seed: int) -> Indices:
    """Build the document, sample and shuffle indices by Megatron's rules, in a plain loop over all token ids."""
    generator = np.random.RandomState(seed)
    per_epoch, epochs = sum(lengths), 1
    while epochs * per_epoch < num_samples * seq_length + 1:
        epochs += 1
    before_last, total = ((count * per_epoch - 1) // seq_length for count in (epochs - 1, epochs))
    separate = epochs > 1 and num_samples - before_last < int(0.8 * ((per_epoch - 1) // seq_length))
    documents = [np.tile(np.arange(len(lengths)), count) for count in ((epochs - 1, 1) if separate else (epochs,))]
    windows = [np.arange(before_last), np.arange(before_last, total)] if separate else [np.arange(total)]
    for array in (*documents, *windows):
        generator.shuffle(array)
    order = np.concatenate(documents)
    line = [(place, offset) for place, document in enumerate(order) for offset in range(lengths[document])]
    return Indices(order, np.array(line[: total * seq_length + 1 : seq_length]), np.concatenate(windows))


@given(
    lengths=st.lists(st.integers(0, 20), min_size=1, max_size=12),
    num_samples=st.integers(1, 60),
    seq_length=st.integers(1, 9),
    seed=st.integers(0, 5),
)
def test_indices_match_the_plain_loop(lengths, num_samples, seq_length, seed):
    if sum(lengths) < seq_length + 1:
        lengths = [*lengths, seq_length + 1]
    how = {"num_samples": num_samples, "seq_length": seq_length, "seed": seed}
    fast = build_indices(np.array(lengths, dtype=np.int32), first=0, **how)
    for ours, theirs, name in zip(fast, naive_indices(lengths, **how), Indices._fields, strict=True):
        np.testing.assert_array_equal(ours, theirs, err_msg=name)


# Number of samples, then the result of Megatron-Core 0.16.1 for five documents: document indices, sample indices,
# shuffle indices, and tokens of some samples.
GOLDEN = [
    (
        9,  # number of samples: 9 need only 3 of the second epoch's 6 samples, so that epoch is shuffled separately
        [0, 3, 2, 1, 4, 2, 1, 0, 4, 3],
        "00 04 22 26 31 42 46 53 57 62 73 82 86",
        [4, 5, 3, 2, 1, 0, 7, 8, 9, 11, 10, 6],
        [[11, 12, 40, 41], [42, 43, 44, 45], [26, 27, 28, 10]],
    ),
    (
        12,  # number of samples: 12 need the whole second epoch, so both epochs are shuffled together
        [3, 0, 0, 2, 1, 4, 2, 3, 1, 4],
        "00 13 22 31 35 40 51 55 62 66 80 91 95",
        [1, 3, 2, 5, 9, 0, 4, 6, 7, 8, 11, 10],
        [[3, 4, 0, 1], [21, 22, 23, 24], [2, 3, 4, 20]],
    ),
]


def test_indices_match_megatron_core_0_16_1():
    sequences = Lists([range(10 * d, 10 * d + length) for d, length in enumerate([5, 3, 9, 1, 7])])
    for num_samples, documents, samples, shuffle, tokens in GOLDEN:
        dataset = GPTDataset(sequences, (0, 5), num_samples=num_samples, seq_length=4, seed=7, name="golden")
        assert dataset.indices.documents.tolist() == documents
        assert dataset.indices.samples.tolist() == [[int(digit) for digit in pair] for pair in samples.split()]
        assert dataset.indices.shuffle.tolist() == shuffle
        assert [dataset[i][:-1].tolist() for i in range(3)] == tokens


def make(lengths: Sequence[int], num_samples: int | None, first: int = 0, **options: Any) -> GPTDataset:
    """Make a dataset whose token ids show their document and position: document d is 100 d, 100 d + 1, ..."""
    how = {"seq_length": 4, "seed": 3, "name": "x"} | options
    documents = [range(100 * d, 100 * d + length) for d, length in enumerate(lengths)]
    return GPTDataset(Lists(documents), (first, len(lengths)), num_samples=num_samples, **how)


def test_samples_are_shuffled_windows_of_the_documents():
    lengths = [9, 5, 0, 3, 9, 1, 7]
    dataset = make(lengths, 17, first=1)
    order = dataset.indices.documents.tolist()
    assert {*order} == {*range(1, 7)}
    line = list(itertools.chain.from_iterable(range(100 * d, 100 * d + lengths[d]) for d in order))
    for i in range(len(dataset)):
        start = 4 * int(dataset.indices.shuffle[i])
        assert dataset[i].tolist() == line[start : start + 5]
        assert dataset[i].dtype == np.int64
    assert dataset.token_counts(700).tolist() == [int(number in line) for number in range(700)]


def test_epoch_serves_every_token_once_with_the_last_epoch_separate():
    for num_samples, total in ((None, 15), (18, (2 * 128 - 1) // 8)):
        dataset = make([30, 41, 57], num_samples, seq_length=8)
        assert len(dataset) == total
        inputs = np.concatenate([dataset[i][:-1] for i in range(15)])
        assert len(set(inputs.tolist())) == len(inputs) == 120


def test_cached_indices_give_the_same_samples(tmp_path):
    plain, built, read = (make([50, 60], 40, cache_path=folder) for folder in (None, tmp_path / "i", tmp_path / "i"))
    for i in range(len(plain)):
        assert plain[i].tolist() == built[i].tolist() == read[i].tolist()


def test_too_few_tokens_and_foreign_ids_are_rejected():
    make([5, 4], 1, seq_length=8)
    foreign = make([9], 1, seq_length=8, vocab_size=8)
    rows = [
        (lambda: make([5, 3], 1, seq_length=8), "x has 8 tokens, too few for one sample of --seq-length 8 + 1"),
        (lambda: foreign[0], "x: sample 0 holds the token id 8, outside the tokenizer's vocabulary of 8"),
        (lambda: foreign.token_counts(8), "token id 8"),
    ]
    assert not not_refused(rows, lambda ask: ask())
    for index in (-1, 2):
        with pytest.raises(IndexError, match=f"sample {index} of x is not one of its 2 samples"):
            make([9], 1)[index]
