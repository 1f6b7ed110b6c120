"""Build micro-batches, the model's inputs for one forward pass, and load them in advance in threads.

A sample is a window of S + 1 tokens. The first S are inputs, and the last S are labels. Documents inside a window end
at the tokenizer's eod token. With `--reset-attention-mask`, the ends become `document_starts`, the offsets that
variable-length attention takes. Megatron uses an [S, S] mask instead.

The number of samples that were consumed before a training step determines the samples of its micro-batches. In the
step, micro-batch m of data rank r takes `micro_batch_size` samples, from the sample with the index
`consumed + (m * data_size + r) * micro_batch_size` on. m and r count from 0, and `data_size` is the number of data
ranks. The samples that all ranks together use in a training step therefore do not depend on the number of ranks.

Threads build the micro-batches of the next training steps. numpy and torch release Python's interpreter lock for the
expensive parts. `BatchLoader.wait_seconds` shows whether the threads were fast enough.

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

from megazpp.parallel.comm_queue import threads_on

Batch = TypeVar("Batch", bound="tuple[Any, ...]")

_STEPS_AHEAD = 2  # number of training steps whose micro-batches the loader's threads build in advance
_Step = tuple[int, int]  # a training step: samples consumed before it, and its global batch size


class Dataset(Protocol):
    """A dataset whose samples are read by index, such as a `GPTDataset` or a `BlendedDataset`."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> np.ndarray:
        """Return the token ids of sample `index`: [seq_length + 1] int64."""
        ...


class BatchLoader(contextlib.AbstractContextManager["BatchLoader"]):
    """Loader of one data-parallel rank's micro-batches.

    Its threads build the micro-batches of the next two training steps in advance.

    Args:
        dataset: dataset of the samples.
        micro_batch_size: number of samples of a micro-batch.
        data_rank: index of this rank among the data-parallel ranks.
        data_size: number of data-parallel ranks.
        make_batch: function from [micro_batch_size, ...] int64 samples to a micro-batch, a named tuple whose fields are
            tensors or None. An example is `make_micro_batch` with its options bound.
        device: device of the micro-batches. To a CUDA device they are copied from pinned memory, without blocking.
        num_workers: number of threads; 0 builds the micro-batches of a training step when the step begins.
        batch_size_at: function from the number of consumed samples to the global batch size. It predicts the next
            training steps while the batch size ramps up. None expects a constant batch size.
    Attributes:
        wait_seconds: total time, in seconds, for which training steps have waited for their micro-batches.
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
        """Return this rank's micro-batches of a training step on the loader's device.

        If the loader has threads, they then build the micro-batches of the next two steps in advance.

        Args:
            consumed_samples: number of samples that all ranks have consumed before the step.
            global_batch_size: number of samples that all ranks together use in the step.
        Raises:
            ValueError: the global batch size is not a multiple of micro_batch_size * data_size.
            Exception: building a micro-batch has failed, possibly in a thread. A note on the error names the samples of
                this micro-batch.
        """
        step = consumed_samples, global_batch_size
        started = time.perf_counter()
        if self._workers is None:
            batches = list(map(self._build, self._first_samples(step)))
        else:
            batches = [future.result() for future in self._ahead.pop(step, []) or self._submit(self._workers, step)]
        self.wait_seconds += time.perf_counter() - started
        # Let the threads build the micro-batches of the next two training steps. Cancel micro-batches of other steps,
        # which an earlier call predicted, and which the run will not take.
        if self._workers is not None:
            ahead: dict[_Step, list[Future[Any]]] = {}
            for _ in range(_STEPS_AHEAD):
                consumed, size = sum(step), step[1]
                step = consumed, size if self._batch_size_at is None else self._batch_size_at(consumed)
                if sum(step) > len(self._dataset):
                    break
                ahead[step] = self._ahead.pop(step, []) or self._submit(self._workers, step)
            for future in itertools.chain.from_iterable(self._ahead.values()):
                future.cancel()
            self._ahead = ahead
        return [on_device(batch, self._device) for batch in batches]

    def close(self) -> None:
        """Stop the threads, and drop the micro-batches that they have built in advance."""
        self._ahead.clear()
        if self._workers is not None:
            self._workers.shutdown(wait=True, cancel_futures=True)

    def __exit__(self, *_: object) -> None:
        self.close()

    def _submit(self, workers: ThreadPoolExecutor, step: _Step) -> list[Future[Any]]:
        return [workers.submit(self._build, first) for first in self._first_samples(step)]

    def _first_samples(self, step: _Step) -> range:
        """Return the indices in the dataset of the first sample of each micro-batch of this rank in a training step."""
        consumed, size = step
        stride = self._micro_batch_size * self._data_size
        if size % stride:
            ranks = f"{self._micro_batch_size} x {self._data_size} data-parallel ranks"
            raise ValueError(
                f"--global-batch-size {size} is not divisible by --micro-batch-size {ranks}: change one of them"
            )
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
        # Pin the tensors here, in a thread of the loader, so that `step` can copy them to the GPU without blocking.
        return mapped(batch, torch.Tensor.pin_memory) if self._device.type == "cuda" else batch


class MicroBatch(NamedTuple):
    """The inputs and labels of one forward pass: B samples of S tokens, with D documents in all.

    Attributes:
        tokens: [B, S] int64 token ids, the inputs of the model.
        labels: [B, S] int64 token ids; each id follows the input at the same index.
        loss_mask: [B, S] fp32, 1 where the loss of a label counts and 0 elsewhere.
        position_ids: [B, S] int64 position of each input in its sample or, with --reset-position-ids, in its document.
        document_starts: [D + 1] int32 offsets of the documents in the B * S inputs, and B * S at the end. The first
            input of each sample always starts a document. None without --reset-attention-mask.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    position_ids: torch.Tensor
    document_starts: torch.Tensor | None


def mapped(batch: Batch, f: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
    """Return a copy of the named tuple `batch` with `f` applied to each tensor; None stays None."""
    kind: Any = type(batch)
    found: Batch = kind(*(None if t is None else f(t) for t in batch))
    return found


def on_device(batch: Batch, device: torch.device) -> Batch:
    """Return a micro-batch with all tensors copied to `device`. From pinned memory, copies do not block the host."""
    return mapped(batch, lambda t: t.to(device, non_blocking=True))


def make_micro_batch(
    samples: torch.Tensor,
    *,
    eod: int | None,
    reset_position_ids: bool = False,
    reset_attention_mask: bool = False,
    eod_mask_loss: bool = False,
) -> MicroBatch:
    """Split samples into inputs and labels, and build their loss mask, positions and document offsets.

    Args:
        samples: [B, S + 1] int64 token ids of B samples with S inputs each.
        eod: id of the end-of-document token; None if the tokenizer has none. None is allowed only if the three options
            below are False.
        reset_position_ids: True to count positions from the start of the document. False counts from the start of the
            sample.
        reset_attention_mask: True to set `document_starts`, so that tokens attend to their own document only.
        eod_mask_loss: True to exclude from the loss each label whose input is eod, because nothing in a document
            predicts the next document.
    Raises:
        ValueError: an option is True and `eod` is None.
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
            # The positions of document starts grow along a sample. Their running maximum at a token is therefore the
            # start of the token's document.
            positions = positions - torch.where(is_start, positions, 0).cummax(dim=1).values
        if reset_attention_mask:
            offsets = is_start.flatten().nonzero().flatten()
            starts = torch.cat([offsets, offsets.new_tensor([tokens.numel()])]).to(torch.int32)
    return MicroBatch(tokens, labels, loss_mask, positions.contiguous(), starts)


def check_eod(eod: int | None, **flags: bool) -> None:
    """Raise ValueError if a flag that requires an end-of-document token is on and the tokenizer has none.

    Args:
        eod: id of the tokenizer's end-of-document token, or None.
        **flags: values of the flags by name, with underscores.
    """
    names = ", ".join(f"--{name.replace('_', '-')}" for name, on in flags.items() if on)
    if eod is None and names:
        raise ValueError(
            f"{names} needs a tokenizer with an end-of-document token, and this one has none; "
            f"choose another tokenizer, or leave out {names}"
        )
