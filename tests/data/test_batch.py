"""Masks, positions and document starts are those of Megatron's loop over end-of-document tokens."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megazpp.data.loader import MicroBatch, make_micro_batch

EOD = 0


def naive(
    samples: torch.Tensor, *, reset_position_ids: bool, reset_attention_mask: bool, eod_mask_loss: bool
) -> MicroBatch:
    """One token at a time."""
    tokens, labels = samples[:, :-1], samples[:, 1:]
    loss_mask = [[float(not (eod_mask_loss and token == EOD)) for token in row] for row in tokens.tolist()]
    positions, starts = [], []
    for b, row in enumerate(tokens.tolist()):
        position = 0
        positions.append([])
        for i in range(len(row)):
            if i == 0 or row[i - 1] == EOD:
                starts.append(b * len(row) + i)
                position = 0 if reset_position_ids else position
            positions[-1].append(position)
            position += 1
    starts.append(tokens.numel())
    return MicroBatch(
        tokens,
        labels,
        torch.tensor(loss_mask),
        torch.tensor(positions),
        torch.tensor(starts, dtype=torch.int32) if reset_attention_mask else None,
    )


@settings(max_examples=200)
@given(data=st.data(), batch=st.integers(1, 4), length=st.integers(1, 9))
def test_micro_batches_equal_the_naive_ones(data: st.DataObject, batch: int, length: int) -> None:
    rows = st.lists(st.integers(0, 2), min_size=length + 1, max_size=length + 1)
    samples = torch.tensor(data.draw(st.lists(rows, min_size=batch, max_size=batch)))
    flags = {name: data.draw(st.booleans()) for name in ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")}
    fast, slow = make_micro_batch(samples, eod=EOD, **flags), naive(samples, **flags)
    for name in MicroBatch._fields:
        left, right = getattr(fast, name), getattr(slow, name)
        assert (left is None) == (right is None), name
        if left is not None:
            torch.testing.assert_close(left, right, rtol=0, atol=0, msg=name)
            assert left.is_contiguous()


def test_document_starts_give_megatrons_attention_mask() -> None:
    samples = torch.randint(0, 4, (3, 18), generator=torch.Generator().manual_seed(0))
    batch = make_micro_batch(samples, eod=EOD, reset_attention_mask=True)
    assert batch.document_starts is not None
    places = torch.arange(3 * 17)
    documents = torch.searchsorted(batch.document_starts, places, right=True)
    allowed = (documents[:, None] == documents[None, :]) & (places[:, None] >= places[None, :])
    for b in range(3):
        mask = torch.tril(torch.ones(17, 17))
        for i in (batch.tokens[b] == EOD).nonzero().flatten().tolist():
            mask[i + 1 :, : i + 1] = 0
        rows = slice(17 * b, 17 * (b + 1))
        assert torch.equal(allowed[rows, rows], mask.bool())
        assert allowed[rows].sum() == mask.sum()  # and nothing of the other samples


def test_the_last_start_is_no_empty_document_when_a_sample_ends_with_eod() -> None:
    samples = torch.tensor([[1, EOD, 2], [EOD, EOD, EOD]])
    batch = make_micro_batch(samples, eod=EOD, reset_attention_mask=True, reset_position_ids=True)
    assert batch.document_starts is not None
    assert batch.document_starts.tolist() == [0, 2, 3, 4]
    assert batch.position_ids.tolist() == [[0, 1], [0, 0]]


@pytest.mark.parametrize("flag", ["reset_position_ids", "reset_attention_mask", "eod_mask_loss"])
def test_flags_about_documents_need_an_end_of_document_token(flag: str) -> None:
    with pytest.raises(ValueError, match=f"--{flag.replace('_', '-')} needs a tokenizer with an end-of-document"):
        make_micro_batch(torch.ones(1, 3, dtype=torch.int64), eod=None, **{flag: True})
    make_micro_batch(torch.ones(1, 3, dtype=torch.int64), eod=None)


@pytest.mark.gpu
def test_pinned_batches_arrive_on_the_gpu_unchanged() -> None:
    samples = torch.randint(0, 4, (3, 18))
    batch = make_micro_batch(samples, eod=EOD, reset_attention_mask=True)
    there = batch.pin_memory().to("cuda", non_blocking=True)
    torch.cuda.synchronize()
    for here, moved in zip(batch, there, strict=True):
        assert here is not None
        assert moved is not None
        assert moved.is_cuda
        assert torch.equal(here, moved.cpu())
