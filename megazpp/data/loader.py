"""This rank's micro-batches of a step, made ready while the step before it computes.

Which samples a micro-batch holds follows from the samples consumed so far and nothing else: micro-batch m of data
rank r takes `consumed + (m * data_size + r) * micro_batch_size` and the next ones. A step of all ranks together is
thus the same set of samples whatever the number of ranks. Threads build the next steps (numpy and torch release the
interpreter lock where it matters); `wait_seconds` says whether they were fast enough.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from megazpp.data.dataset import Dataset
from megazpp.parallel.worker import threads_on

_STEPS_AHEAD = 2
_Step = tuple[int, int]  # consumed samples, global batch size


class BatchLoader(contextlib.AbstractContextManager["BatchLoader"]):
    """Micro-batches of one data rank.

    Args:
        dataset: with as many samples as will be asked for.
        micro_batch_size: samples of a micro-batch.
        data_rank, data_size: this rank's place among those that share the global batch.
        make_batch: [B, ...] int64 samples to a micro-batch (`make_micro_batch` with its options bound).
        device: where the micro-batches go; for CUDA through pinned memory, without waiting for the copy.
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
            batches = [self._build(first) for first in self._first_samples(step)]
        else:
            batches = [future.result() for future in self._ahead.pop(step, []) or self._submit(self._workers, step)]
        self.wait_seconds += time.perf_counter() - started
        if self._workers is not None:
            self._look_ahead(self._workers, step)
        return [batch.to(self._device, non_blocking=True) for batch in batches]

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
        return batch.pin_memory() if self._device.type == "cuda" else batch
