"""Test that the windows into which a text is cut for its score contain every token of the text once as a label."""

import itertools
from typing import Any

import pytest
import torch
from helpers.pairs import Lists

from megazpp.inference.whole_text import PADDING, WholeText, make_padded_batch

EOD = 99
DOCUMENTS = [[1, 2, 3, EOD], [EOD], [], list(range(10, 23)), [4, 5]]
LINE = [id_ for document in DOCUMENTS for id_ in document]


def whole(documents: Any, seq_length: int, eod: int | None = EOD, vocab_size: int = 100) -> WholeText:
    return WholeText(Lists(documents), seq_length=seq_length, eod=eod, vocab_size=vocab_size, name="my")


def test_whole_texts_labels_are_all_ids_in_order():
    for eod, seq_length in itertools.product((EOD, None), (1, 3, len(LINE) - 1, len(LINE), len(LINE) + 1)):
        text, labels = whole(DOCUMENTS, seq_length, eod), list[int]()
        before = LINE if eod is None else [EOD, *LINE]
        for index in range(len(text) + 2):
            batch = make_padded_batch(torch.from_numpy(text[index]).unsqueeze(0), eod=EOD)
            assert batch.tokens.shape == (1, seq_length)
            counted = batch.loss_mask[0].bool()
            inputs = batch.tokens[0][counted].tolist()
            assert inputs == before[len(labels) : len(labels) + len(inputs)]
            labels += batch.labels[0][counted].tolist()
            assert counted.any() == (index < len(text))
        assert labels == (LINE[1:] if eod is None else LINE), (eod, seq_length)
        assert text.num_tokens == len(labels)


def test_padding_has_no_loss_and_other_masks_are_kept():
    window = torch.from_numpy(whole(DOCUMENTS, 8)[0]).unsqueeze(0)
    batch = make_padded_batch(window, eod=EOD, eod_mask_loss=True)
    assert batch.loss_mask[0].tolist() == [0, 1, 1, 1, 0, 0, 1, 1]
    batch = make_padded_batch(torch.tensor([[7, 8, PADDING, PADDING]]), eod=EOD)
    assert batch.loss_mask[0].tolist() == [1, 0, 0]
    assert batch.tokens.min() >= 0


def test_unusable_ids_are_errors():
    with pytest.raises(ValueError, match="my: window 0 holds the token id 8, outside the tokenizer's vocabulary of 8"):
        whole([range(9)], 8, eod=None, vocab_size=8)[0]
    with pytest.raises(ValueError, match="no token that could be predicted"):
        whole([[5]], 8, eod=None)
