"""Test datasets and batches of post-training. A sample depends only on its index, and padding has no loss."""

from typing import Any

import numpy as np
import pytest
import torch
from helpers.tensor_parallel import build_gpt, losses_of
from helpers.training import LLAMA_STYLE
from hypothesis import given
from hypothesis import strategies as st

from megazpp.post_training.data import (
    EpochOrder,
    PreferenceDataset,
    PromptDataset,
    SupervisedDataset,
    make_pair_batch,
    make_supervised_batch,
    pack,
)
from megazpp.post_training.formatting import Examples, Prompt

PAD = 99


def examples(*lengths: int) -> Examples:
    """Make tokenized examples of the given lengths.

    Example i is i * 10, i * 10 + 1, ..., and all its tokens but the first have a loss.
    """
    rows = [np.arange(length, dtype=np.int32) + 10 * number for number, length in enumerate(lengths)]
    masks = [np.arange(length) > 0 for length in lengths]
    starts = np.cumsum([0, *lengths], dtype=np.int64)
    return Examples(np.concatenate(rows), np.concatenate(masks).astype(np.uint8), starts, np.zeros(7, dtype=np.int64))


def supervised(*lengths: int, samples: int, max_length: int, packing: bool = False) -> SupervisedDataset:
    options: dict[str, Any] = {"num_samples": samples, "max_length": max_length, "packing": packing}
    return SupervisedDataset(examples(*lengths), seed=None, pad=PAD, **options)


def stacked(dataset: SupervisedDataset | PreferenceDataset) -> torch.Tensor:
    """Return all samples of a dataset, stacked into one tensor."""
    return torch.from_numpy(np.stack([dataset[index] for index in range(len(dataset))]))


@given(size=st.integers(1, 20), seed=st.integers(0, 2**32 - 1))
def test_every_epoch_is_another_permutation(size, seed):
    order = EpochOrder(size, num_samples=3 * size + 1, seed=seed)
    drawn = [order.place(index) for index in range(3 * size)]
    epochs = [drawn[start : start + size] for start in range(0, 3 * size, size)]
    assert all(sorted(epoch) == [*range(size)] for epoch in epochs)
    again = EpochOrder(size, num_samples=3 * size + 1, seed=seed)
    assert [again.place(index) for index in reversed(range(3 * size))] == drawn[::-1]
    if size > 9:
        assert epochs[0] != epochs[1] != epochs[2]
    with pytest.raises(IndexError, match=f"sample {3 * size + 1} of {3 * size + 1}"):
        order.place(3 * size + 1)


def test_example_order_is_identified_by_all_its_inputs():
    def sft(*lengths: int, seed: int = 1, samples: int = 6, **options: Any) -> str:
        options = {"max_length": 8, "packing": False, **options}
        return SupervisedDataset(examples(*lengths), num_samples=samples, seed=seed, pad=PAD, **options).order()

    def dpo(*lengths: int, seed: int = 1, samples: int = 6) -> str:
        return PreferenceDataset(examples(*lengths), num_samples=samples, seed=seed, max_length=8, pad=PAD).order()

    def draw(text: str = "ab", seed: int = 1, samples: int = 6, number: int = 1) -> str:
        prompts = [Prompt([*text.encode()], text, {"number": number}, "p.jsonl, line 1")]
        return PromptDataset(prompts, num_samples=samples, seed=seed).order()

    assert sft(3, 5) == sft(3, 5, samples=99)
    assert dpo(3, 5) == dpo(3, 5, samples=99)
    assert draw() == draw(samples=99)
    others = [sft(3, 5), sft(5, 3), sft(3, 5, seed=2), sft(3, 5, packing=True), sft(3, 5, max_length=9)]
    others += [dpo(3, 5), dpo(5, 3), dpo(3, 5, seed=2), draw(), draw("ba"), draw(seed=2), draw(number=2)]
    assert len({*others}) == len(others)


@given(lengths=st.lists(st.integers(1, 12), min_size=1, max_size=60))
def test_packing_loses_no_example_and_fits_like_best_fit_decreasing(lengths):
    rows = pack(np.array(lengths), 12)
    assert sorted(number for row in rows for number in row) == [*range(len(lengths))]
    assert all(sum(lengths[number] for number in row) <= 12 for row in rows)
    reference: list[int] = []  # number of free tokens in each row that plain best-fit decreasing fills
    for length in sorted(lengths, reverse=True):
        fitting = [(left, row) for row, left in enumerate(reference) if left >= length]
        if fitting:
            reference[min(fitting)[1]] -= length
        else:
            reference.append(12 - length)
    assert len(rows) == len(reference)


def test_sample_is_padded_on_the_right_without_loss():
    batch = make_supervised_batch(stacked(supervised(3, 5, samples=2, max_length=5)))
    assert batch.tokens.tolist() == [[0, 1, 2, PAD, PAD], [10, 11, 12, 13, 14]]
    assert batch.labels.tolist() == [[1, 2, PAD, PAD, PAD], [11, 12, 13, 14, PAD]]
    assert batch.loss_mask.tolist() == [[1, 1, 0, 0, 0], [1, 1, 1, 1, 0]]
    assert batch.loss_mask.dtype == torch.float32
    assert batch.document_starts is None


@torch.no_grad()
def test_batch_is_cut_to_its_longest_row_without_changing_losses():
    model = build_gpt(LLAMA_STYLE)
    for lengths, multiple, size in (((3, 8), 8, 8), ((9, 3), 4, 12), ((2, 1), 1, 2), ((9, 15), 7, 15)):
        rows = stacked(supervised(*lengths, samples=2, max_length=15))
        pairs = PreferenceDataset(examples(*lengths), num_samples=1, seed=None, max_length=15, pad=PAD)
        for make, samples in ((make_supervised_batch, rows), (make_pair_batch, stacked(pairs))):
            whole, short = make(samples, multiple=15), make(samples, multiple=multiple)
            assert [x.shape for x in (*whole[:4], *short[:4])] == [(2, 15)] * 4 + [(2, size)] * 4
            expected, found = (losses_of(model, batch) * batch.loss_mask for batch in (whole, short))
            assert expected.count_nonzero() == found.count_nonzero() == sum(lengths) - 2
            torch.testing.assert_close(found.sum(dim=1), expected.sum(dim=1), atol=1e-6, rtol=1e-6)


def test_packed_examples_have_separate_positions_and_documents():
    dataset = supervised(3, 4, 2, samples=4, max_length=7, packing=True)
    assert (len(dataset), dataset.sources()[0].epoch) == (4, 2)
    batch = make_supervised_batch(stacked(dataset)[:2], packing=True)
    assert batch.tokens.tolist() == [[10, 11, 12, 13, 0, 1, 2], [20, 21, PAD, PAD, PAD, PAD, PAD]]
    assert batch.loss_mask.tolist() == [[1, 1, 1, 0, 1, 1, 0], [1, 0, 0, 0, 0, 0, 0]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 0, 1, 2], [0, 1, 0, 1, 2, 3, 4]]
    assert batch.document_starts.tolist() == [0, 4, 7, 9, 14]
    assert batch.document_starts.dtype == torch.int32


def test_packed_examples_have_the_losses_of_unpacked_ones():
    """Compare the loss of every label with and without packing several examples into a row.

    The losses may differ only by rounding, because attention masks the other examples of a row.
    """
    model, lengths = build_gpt(LLAMA_STYLE), (5, 8, 3, 7, 4, 2)
    found = []
    for packing, rows in ((False, 6), (True, 3)):
        batch = make_supervised_batch(
            stacked(supervised(*lengths, samples=rows, max_length=12, packing=packing)), packing=packing
        )
        losses = losses_of(model, batch) * batch.loss_mask
        of_label = torch.zeros(101).index_put((batch.labels,), losses, accumulate=True)
        # every label has a loss once; all labels are different tokens, so `of_label` counts them
        assert of_label.count_nonzero() == sum(lengths) - len(lengths)
        found.append(of_label)
    torch.testing.assert_close(*found, atol=1e-5, rtol=0)


def test_pairs_are_in_two_halves_of_a_batch_with_reference_logps():
    dataset = PreferenceDataset(examples(3, 4, 2, 2), num_samples=5, seed=3, max_length=4, pad=PAD)
    assert (len(dataset), dataset.num_pairs) == (5, 2)
    samples = torch.from_numpy(np.stack([dataset.pair(1), dataset.pair(0)]))
    batch = make_pair_batch(samples, ref_logps=torch.tensor([[-1.0, -2.0], [-3.0, -4.0]]))
    assert batch.tokens.tolist() == [[20, 21, PAD, PAD], [0, 1, 2, PAD], [30, 31, PAD, PAD], [10, 11, 12, 13]]
    assert batch.loss_mask.tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 1, 0]]
    assert batch.ref_logps.tolist() == [-3, -1, -4, -2]
    assert make_pair_batch(samples).ref_logps is None


def test_margins_of_pairs_reach_their_batch_and_identity():
    margins = np.array([0.25, -3.5], dtype=np.float32)
    plain, given = examples(3, 4, 2, 2), examples(3, 4, 2, 2)._replace(margins=margins)
    options: dict[str, Any] = {"num_samples": 2, "seed": None, "max_length": 4, "pad": PAD}
    dataset = PreferenceDataset(given, **options)
    batch = make_pair_batch(torch.from_numpy(np.stack([dataset.pair(1), dataset.pair(0)])))
    assert batch.margins is not None
    assert batch.margins.tolist() == [-3.5, 0.25]
    zero = plain._replace(margins=0 * margins)
    digests = [PreferenceDataset(each, **options).digest() for each in (plain, zero, given)]
    assert digests[0] == digests[1] != digests[2]


def test_prompts_come_in_the_order_of_the_epoch():
    prompts = [Prompt([number], "?", {}, f"line {number}") for number in range(5)]
    dataset = PromptDataset(prompts, num_samples=7, seed=1)
    order = EpochOrder(5, num_samples=7, seed=1)
    assert [dataset[index].tokens for index in range(len(dataset))] == [[order.place(index)] for index in range(7)]
