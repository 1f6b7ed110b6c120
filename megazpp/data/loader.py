"""Micro-batches: what one forward pass of the model is given, and this rank's of a step, made while another computes.

A sample is a window of S + 1 tokens; inputs are the first S, labels the last S. The documents inside a window
end at the tokenizer's eod token. `--reset-attention-mask` turns those ends into `document_starts`, offsets as
variable-length attention takes them, where Megatron builds an [S, S] mask (model/backends.py).

The samples consumed so far say which samples a micro-batch holds: micro-batch m of data rank r takes
`consumed + (m * data_size + r) * micro_batch_size` and the next ones. A step of all ranks together is thus the same set
of samples whatever the number of ranks. Threads build the next steps (numpy and torch release the interpreter lock
where it matters); `wait_seconds` says whether they were fast enough.

Legend: B samples of a micro-batch, S tokens of a sample, D documents of a micro-batch.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch

from megazpp.data.gpt_dataset import PADDING
from megazpp.parallel.worker import threads_on

Batch = TypeVar("Batch", bound="tuple[Any, ...]")

_STEPS_AHEAD = 2
_Step = tuple[int, int]  # consumed samples, global batch size


class Dataset(Protocol):
    """Samples by number: a `GPTDataset` or a `BlendedDataset`."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> np.ndarray:
        """Sample `index`: [seq_length + 1] int64."""
        ...


class BatchLoader(contextlib.AbstractContextManager["BatchLoader"]):
    """Micro-batches of one data rank.

    Args:
        make_batch: function from [B, ...] int64 samples to a micro-batch, which is a named tuple of tensors and None
            (`make_micro_batch` with its options bound).
        device: device of the micro-batches. For CUDA they are copied from pinned memory without waiting.
        num_workers: threads; 0 builds each step when it is asked for.
        batch_size_at: the global batch size once so many samples are consumed, to look ahead during a ramp-up; None
            expects it to stay.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        micro_batch_size: int,
        data_rank: int,
        data_size: int,
        make_batch: Callable[[torch.Tensor], Any],
        device: torch.device,
        num_workers: int = 2,
        batch_size_at: Callable[[int], int] | None = None,
    ) -> None:
        self._dataset, self._make_batch, self._device = dataset, make_batch, device
        self._micro_batch_size, self._data_rank, self._data_size = micro_batch_size, data_rank, data_size
        self._batch_size_at = batch_size_at
        self._workers = threads_on(device, num_workers, "batch") if num_workers > 0 else None
        self._ahead: dict[_Step, list[Future[Any]]] = {}
        self.wait_seconds = 0.0

    def step(self, consumed_samples: int, global_batch_size: int) -> list[Any]:
        """The micro-batches of the step that begins at `consumed_samples`, on the device.

        Raises:
            ValueError: the global batch does not divide into the ranks' micro-batches.
            Exception: a worker's, with a note that names the samples.
        """
        step = consumed_samples, global_batch_size
        started = time.perf_counter()
        if self._workers is None:
            batches = list(map(self._build, self._first_samples(step)))
        else:
            batches = [future.result() for future in self._ahead.pop(step, []) or self._submit(self._workers, step)]
        self.wait_seconds += time.perf_counter() - started
        if self._workers is not None:
            self._look_ahead(self._workers, step)
        return [mapped(batch, lambda t: t.to(self._device, non_blocking=True)) for batch in batches]

    def close(self) -> None:
        """End the threads; what they were preparing is dropped."""
        self._ahead.clear()
        if self._workers is not None:
            self._workers.shutdown(wait=True, cancel_futures=True)

    def __exit__(self, *_: object) -> None:
        self.close()

    def _look_ahead(self, workers: ThreadPoolExecutor, step: _Step) -> None:
        """Have the next steps built, and forget the ones foreseen that did not come."""
        ahead: dict[_Step, list[Future[Any]]] = {}
        for _ in range(_STEPS_AHEAD):
            consumed, size = sum(step), step[1]
            step = consumed, size if self._batch_size_at is None else self._batch_size_at(consumed)
            if sum(step) > len(self._dataset):
                break
            ahead[step] = self._ahead.pop(step, []) or self._submit(workers, step)
        for future in itertools.chain.from_iterable(self._ahead.values()):
            future.cancel()
        self._ahead = ahead

    def _submit(self, workers: ThreadPoolExecutor, step: _Step) -> list[Future[Any]]:
        return [workers.submit(self._build, first) for first in self._first_samples(step)]

    def _first_samples(self, step: _Step) -> range:
        """The first sample of each of this rank's micro-batches."""
        consumed, size = step
        stride = self._micro_batch_size * self._data_size
        if size % stride:
            ranks = f"{self._micro_batch_size} x {self._data_size} data-parallel ranks"
            raise ValueError(f"--global-batch-size {size} is not divisible by --micro-batch-size {ranks}")
        start = consumed + self._data_rank * self._micro_batch_size
        return range(start, start + size, stride)

    def _build(self, first: int) -> Any:
        stop = first + self._micro_batch_size
        try:
            samples = np.stack([self._dataset[index] for index in range(first, stop)])
            batch = self._make_batch(torch.from_numpy(samples))
        except Exception as error:
            error.add_note(f"while loading samples {first} to {stop - 1} on data rank {self._data_rank}")
            raise
        # copies to a GPU do not block if they come from page-locked memory; batches of any kind are named tuples
        return mapped(batch, torch.Tensor.pin_memory) if self._device.type == "cuda" else batch


class MicroBatch(NamedTuple):
    """One forward pass's worth of samples.

    `document_starts` are offsets into the B * S tokens, from 0 to B * S; None without --reset-attention-mask. A sample
    always starts a document.
    """

    tokens: torch.Tensor  # [B, S] int64
    labels: torch.Tensor  # [B, S] int64, the token after each of `tokens`
    loss_mask: torch.Tensor  # [B, S] fp32, 1 where the loss counts
    position_ids: torch.Tensor  # [B, S] int64
    document_starts: torch.Tensor | None  # [D + 1] int32

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> MicroBatch:
        return mapped(self, lambda t: t.to(device, non_blocking=non_blocking))


def mapped(batch: Batch, f: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
    """Apply `f` to each tensor of the named tuple `batch`; None stays None."""
    kind: Any = type(batch)
    found: Batch = kind(*(None if t is None else f(t) for t in batch))
    return found


def make_micro_batch(
    samples: torch.Tensor,
    *,
    eod: int | None,
    reset_position_ids: bool = False,
    reset_attention_mask: bool = False,
    eod_mask_loss: bool = False,
) -> MicroBatch:
    """Inputs, labels, masks and positions of a stack of samples.

    Args:
        samples: [B, S + 1] int64.
        eod: the id that ends a document; the token after it starts the next one. Each of the three flags needs it.
        reset_position_ids: positions count from the start of the document, not of the sample.
        reset_attention_mask: give `document_starts`.
        eod_mask_loss: no loss where the input is eod (the next document's first token cannot be predicted).
    """
    resets = {"reset_position_ids": reset_position_ids, "reset_attention_mask": reset_attention_mask}
    check_eod(eod, **resets, eod_mask_loss=eod_mask_loss)
    tokens, labels = samples[:, :-1].contiguous(), samples[:, 1:].contiguous()
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    loss_mask = torch.ones_like(tokens, dtype=torch.float32)
    if eod_mask_loss:
        loss_mask[tokens == eod] = 0.0

    starts = None
    if reset_position_ids or reset_attention_mask:
        is_start = torch.zeros_like(tokens, dtype=torch.bool)
        is_start[:, 0] = True
        is_start[:, 1:] = tokens[:, :-1] == eod
        if reset_position_ids:
            # starts grow along a row, so a running maximum finds the latest one at or before each token
            positions = positions - torch.where(is_start, positions, 0).cummax(dim=1).values
        if reset_attention_mask:
            offsets = is_start.flatten().nonzero().flatten()
            starts = torch.cat([offsets, offsets.new_tensor([tokens.numel()])]).to(torch.int32)
    return MicroBatch(tokens, labels, loss_mask, positions.contiguous(), starts)


def make_padded_batch(samples: torch.Tensor, **options: Any) -> MicroBatch:
    """`make_micro_batch` of samples that may hold `PADDING`, which is never predicted."""
    batch = make_micro_batch(samples.clamp(min=0), **options)
    return batch._replace(loss_mask=batch.loss_mask * (samples[:, 1:] != PADDING))


def check_eod(eod: int | None, **flags: bool) -> None:
    """Raises ValueError naming the flags that need to know where documents end, if the tokenizer has no such token."""
    names = ", ".join(f"--{name.replace('_', '-')}" for name, on in flags.items() if on)
    if eod is None and names:
        raise ValueError(f"{names} needs a tokenizer with an end-of-document token, and this one has none")
