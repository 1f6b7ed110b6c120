"""Test the loading of batches.

Masks and positions are Megatron's, each data rank gets its samples of a step, and threads load later steps ahead.
"""

import itertools
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from helpers.refusals import not_refused
from hypothesis import given
from hypothesis import strategies as st

from megazpp.data.loader import BatchLoader, MicroBatch, make_micro_batch
from megazpp.parallel.comm_queue import threads_on
from megazpp.post_training.data import PairBatch, RolloutBatch

EOD = 0
MAKE = partial(make_micro_batch, eod=None)


# ---- make_micro_batch: masks and positions ----------------------------------------------------------------------


def naive(samples: torch.Tensor, *, reset_position_ids: bool, reset_attention_mask: bool, eod_mask_loss: bool) -> Any:
    """Make a micro-batch by Megatron's rules, token by token, as a reference for `make_micro_batch`."""
    tokens, labels = samples[:, :-1], samples[:, 1:]
    loss_mask = torch.tensor([[float(not eod_mask_loss or t != EOD) for t in row] for row in tokens.tolist()])
    positions, starts = torch.zeros_like(tokens), []
    for b, i in np.ndindex(*tokens.shape):
        first = i == 0 or tokens[b, i - 1] == EOD
        starts += [b * tokens.shape[1] + i] if first else []
        positions[b, i] = 0 if i == 0 or (first and reset_position_ids) else positions[b, i - 1] + 1
    document_starts = torch.tensor([*starts, tokens.numel()], dtype=torch.int32) if reset_attention_mask else None
    return MicroBatch(tokens, labels, loss_mask, positions, document_starts)


@given(data=st.data(), size=st.integers(1, 4), length=st.integers(1, 9))
def test_micro_batches_match_the_plain_loop(data, size, length):
    rows = st.lists(st.integers(0, 2), min_size=length + 1, max_size=length + 1)
    samples = torch.tensor(data.draw(st.lists(rows, min_size=size, max_size=size)))
    flags = {name: data.draw(st.booleans()) for name in ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")}
    batch = make_micro_batch(samples, eod=EOD, **flags)
    torch.testing.assert_close(batch, naive(samples, **flags), rtol=0, atol=0)
    assert all(part is None or part.is_contiguous() for part in batch)


def test_document_flags_without_an_eod_token_are_rejected():
    flags = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")
    rows = [(flag, f"--{flag.replace('_', '-')} needs a tokenizer with an end-of-document") for flag in flags]
    assert not not_refused(rows, lambda flag: MAKE(torch.ones(1, 3, dtype=torch.int64), **{flag: True}))


# ---- BatchLoader: samples of each rank, and loading ahead -------------------------------------------------------


class Counting:
    """A dataset whose sample i is the token id i, five times.

    `read` lists the indices of the samples that were read, and `hook` runs before each read.
    """

    def __init__(self, length: int = 1000, hook: Callable[[int], object] = int) -> None:
        self.length, self.hook, self.read = length, hook, list[int]()

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> np.ndarray:
        self.hook(index)
        self.read.append(index)
        return np.full(5, index, dtype=np.int64)


def loader(dataset: Counting, *, rank: int = 0, size: int = 1, **options: Any) -> BatchLoader:
    """Make a loader for one of `size` data ranks.

    By default, its micro-batches have two samples and stay on the CPU.
    """
    options = {"micro_batch_size": 2, "make_batch": MAKE, "device": torch.device("cpu")} | options
    return BatchLoader(dataset, data_rank=rank, data_size=size, **options)


def samples(batches: list) -> list[list[int]]:
    return [batch.tokens[:, 0].tolist() for batch in batches]


@pytest.mark.parametrize("num_workers", [0, 3])
def test_step_is_cut_into_micro_batches_rank_by_rank(num_workers):
    for rank, expected in enumerate([[[24, 25], [30, 31]], [[26, 27], [32, 33]], [[28, 29], [34, 35]]]):
        with loader(Counting(), rank=rank, size=3, num_workers=num_workers) as batches:
            step = batches.step(24, 12)
            assert samples(step) == expected
            assert step[0].tokens.shape == (2, 4)


def test_next_steps_are_loaded_before_they_are_requested():
    dataset = Counting(hook=lambda index: time.sleep(0.1 if index < 8 else 0.0))
    with loader(dataset, num_workers=2) as batches:
        batches.step(0, 8)
        deadline = time.monotonic() + 20
        # waits until the threads have read 24 samples: 8 of this step, and 16 of the next two
        while len(dataset.read) < 24 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert sorted(dataset.read) == list(range(24))
        assert batches.wait_seconds > 0.02
        assert samples(batches.step(8, 8)) == [[8, 9], [10, 11], [12, 13], [14, 15]]
        # the second step has read none of its samples, because they were already loaded
        assert sorted(dataset.read)[:24] == list(range(24))


def test_unexpected_step_is_still_loaded_correctly():
    with loader(Counting(), num_workers=2) as batches:
        for consumed, size in ((0, 4), (4, 8), (100, 4), (12, 4), (12, 4)):
            assert [*itertools.chain(*samples(batches.step(consumed, size)))] == [*range(consumed, consumed + size)]


def test_ramp_up_is_loaded_ahead_and_nothing_beyond_the_end():
    dataset = Counting(length=24)
    with loader(dataset, num_workers=1, batch_size_at=lambda consumed: 4 if consumed < 8 else 8) as batches:
        for consumed, size in ((0, 4), (4, 4), (8, 8), (16, 8)):
            assert len(batches.step(consumed, size)) == size // 2
        time.sleep(0.05)
    # the loader reads each of 24 samples once: it loads no step ahead with a wrong batch size, or after the last step
    assert sorted(dataset.read) == list(range(24))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_error_in_a_loading_thread_is_raised_with_its_samples(num_workers):
    def fail(index: int) -> None:
        if index == 7:
            raise ValueError("the disk is gone")

    with loader(Counting(hook=fail), rank=1, size=2, num_workers=num_workers) as batches:
        batches.step(0, 4)
        with pytest.raises(ValueError, match="the disk is gone") as raised:
            batches.step(4, 4)
        assert raised.value.__notes__ == ["while loading samples 6 to 7 on data rank 1"]
        with pytest.raises(ValueError, match="--global-batch-size 6 is not divisible by --micro-batch-size 2 x 2"):
            batches.step(0, 6)


def test_close_ends_the_threads():
    before = {*threading.enumerate()}
    batches = loader(Counting(hook=lambda index: time.sleep(0.01)), num_workers=3)
    batches.step(0, 8)
    assert {*threading.enumerate()} - before
    batches.close()
    batches.close()
    assert {*threading.enumerate()} <= before


@pytest.mark.parametrize("kind", [MicroBatch, PairBatch, RolloutBatch])
def test_every_tensor_of_any_batch_type_is_pinned_for_a_gpu(monkeypatch, kind):
    pinned = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned.append(tensor) or tensor)
    fields = [torch.full((2, 3), float(place)) for place in range(len(kind._fields))]
    # a field of a batch may be None, such as the document starts, and is not pinned
    for batch in (kind(*fields), kind(*fields[:-1], None)):
        batches = loader(Counting(), device=torch.device("cuda", 0), num_workers=0, make_batch=lambda _, b=batch: b)
        batches._build(0)
        assert [id(tensor) for tensor in pinned] == [id(field) for field in batch if field is not None]
        pinned.clear()


@pytest.mark.gpu
def test_batches_arrive_on_the_gpu():
    with loader(Counting(), device=torch.device("cuda", 0)) as batches:
        for consumed in range(0, 400, 8):
            step = batches.step(consumed, 8)
            assert all(part is None or part.is_cuda for batch in step for part in batch)
            assert [*itertools.chain(*samples(step))] == [*range(consumed, consumed + 8)]


def test_threads_use_the_device_of_their_rank(monkeypatch):
    """Each loading thread sets CUDA's current device, which every thread has on its own.

    On the CPU no device is set.
    """
    chosen: list[tuple[str, torch.device]] = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda d: chosen.append((threading.current_thread().name, d)))
    for device in (torch.device("cuda", 3), torch.device("cpu")):
        with threads_on(device, 1, "batch") as threads:
            threads.submit(int).result()
    assert chosen == [("batch_0", torch.device("cuda", 3))]
