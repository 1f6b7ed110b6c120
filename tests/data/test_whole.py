"""Every id is predicted once, in order, from the one before it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.pairs import write_pair

from megazpp.data.indexed_dataset import IndexedDataset
from megazpp.data.whole import PADDING, WholeText, make_padded_batch

EOD = 99
DOCUMENTS = [[1, 2, 3, EOD], [EOD], [], list(range(10, 23)), [4, 5]]
LINE = [id_ for document in DOCUMENTS for id_ in document]


@pytest.fixture
def sequences(tmp_path: Path) -> IndexedDataset:
    return IndexedDataset(write_pair(tmp_path / "my", DOCUMENTS))


def whole(sequences: IndexedDataset, seq_length: int, eod: int | None = EOD, vocab_size: int = 100) -> WholeText:
    return WholeText(sequences, seq_length=seq_length, eod=eod, vocab_size=vocab_size, name="my")


@pytest.mark.parametrize("eod", [EOD, None])
@pytest.mark.parametrize("seq_length", [1, 3, len(LINE) - 1, len(LINE), len(LINE) + 1])
def test_labels_in_order_are_all_ids(sequences: IndexedDataset, seq_length: int, eod: int | None):
    text = whole(sequences, seq_length, eod)
    labels: list[int] = []
    before = LINE if eod is None else [EOD, *LINE]
    for index in range(len(text) + 2):
        batch = make_padded_batch(torch.from_numpy(text[index]).unsqueeze(0), eod=EOD)
        assert batch.tokens.shape == (1, seq_length)
        counted = batch.loss_mask[0].bool()
        inputs = batch.tokens[0][counted].tolist()
        assert inputs == before[len(labels) : len(labels) + len(inputs)]
        labels += batch.labels[0][counted].tolist()
        assert counted.any() == (index < len(text))
    assert labels == (LINE[1:] if eod is None else LINE)
    assert text.num_tokens == len(labels)


def test_padding_has_no_loss_and_other_masks_stay(sequences: IndexedDataset):
    text = whole(sequences, 8)
    batch = make_padded_batch(torch.from_numpy(text[0]).unsqueeze(0), eod=EOD, eod_mask_loss=True)
    assert batch.loss_mask[0].tolist() == [0, 1, 1, 1, 0, 0, 1, 1]
    batch = make_padded_batch(torch.tensor([[7, 8, PADDING, PADDING]]), eod=EOD)
    assert batch.loss_mask[0].tolist() == [1, 0, 0]
    assert batch.tokens.min() >= 0


def test_ids_are_counted(sequences: IndexedDataset):
    assert whole(sequences, 3).token_counts(100).tolist() == np.bincount(LINE, minlength=100).tolist()


def test_foreign_ids_and_nothing_to_predict_are_refused(sequences: IndexedDataset, tmp_path: Path):
    with pytest.raises(ValueError, match="my holds ids from 1 to 99, outside the tokenizer's vocabulary of 50"):
        whole(sequences, 8, eod=None, vocab_size=50)[0]
    with pytest.raises(ValueError, match="no token that could be predicted"):
        whole(IndexedDataset(write_pair(tmp_path / "one", [[5]])), 8, eod=None)
