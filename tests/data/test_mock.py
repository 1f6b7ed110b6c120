"""Made-up documents behave like written ones."""

from __future__ import annotations

from megazpp.data.gpt_dataset import GPTDataset
from megazpp.data.mock import MockSequences


def test_parts_of_a_document_are_parts_of_the_whole() -> None:
    sequences = MockSequences(vocab_size=300, eod=299)
    whole = sequences.get(5).tolist()
    assert len(whole) == sequences.lengths[5]
    assert whole[:3] == [1, 2, 3]
    assert whole[-1] == 299
    n = len(whole)
    for offset, length in ((0, n), (0, n - 1), (3, 4), (n - 1, 1), (n, 0), (2, None)):
        stop = n if length is None else offset + length
        assert sequences.get(5, offset, length).tolist() == whole[offset:stop]


def test_without_eod_the_counting_goes_on() -> None:
    sequences = MockSequences(vocab_size=300, eod=None)
    n = int(sequences.lengths[0])
    assert sequences.get(0).tolist()[-1] == n % 300


def test_samples_stay_in_the_vocabulary() -> None:
    sequences = MockSequences(vocab_size=50, eod=49)
    dataset = GPTDataset(sequences, (0, 20), num_samples=50, seq_length=64, seed=0, name="mock", vocab_size=50)
    assert all(len(dataset[i]) == 65 for i in range(50))
