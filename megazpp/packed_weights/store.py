"""A store of packed weights on disk, written once from a checkpoint, and a ring of buffers into which layers are read.

    file: message 0 | message 1 | ... | CRC-32 of each message, uint32

The file belongs to one rank. Message 0 holds the weights that are not streamed, and each later message this rank's
packed weights of one layer. The sizes of the messages are known from the model, so the file has no table of contents.
`WeightStore.read` copies a message into a given buffer by preadv, because pages of a memory map would count as memory
of the process. The CRC-32 of a message is checked when the message is first read. A damaged file is removed, and the
next run writes it again from the checkpoint.
"""

from __future__ import annotations

import functools
import itertools
import os
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megazpp.base.files import DamagedError, remove, sync
from megazpp.parallel.comm_queue import CommQueue, Work

_AT_ONCE = 1 << 30  # maximum number of bytes that one preadv call reads; Linux reads at most 2 GiB per call


class WeightStore:
    """An open file with the packed weights of a model on one rank; any thread may read it.

    Args:
        path: the file, which `write_store` has written.
        sizes: number of bytes of each message in the file.
    Raises:
        DamagedError: the size of the file does not fit `sizes`. The file has been removed.
    """

    def __init__(self, path: Path, sizes: Sequence[int]) -> None:
        self.path, self.starts, self._verified = path, [0, *itertools.accumulate(sizes)], set[int]()
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115 - closed with the object
        # Announce sequential reads, so that Linux reads ahead. In two measurements this made reads of 48 MB 1.4 and 3.5
        # times as fast.
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        if (size := path.stat().st_size) != self.starts[-1] + 4 * len(sizes):
            raise self._damaged(
                f"the file has {size} bytes, but the model's layers need {self.starts[-1] + 4 * len(sizes)} bytes"
            )
        self._sums = np.fromfile(path, "<u4", offset=self.starts[-1]).tolist()

    def read(self, index: int, buffer: torch.Tensor) -> torch.Tensor:
        """Read a message of the file, for example the packed weights of one layer, into `buffer`, and return `buffer`.

        Args:
            index: index of the message in the file.
            buffer: [bytes of the message] uint8 on the CPU, which the method fills.
        Raises:
            DamagedError: at the first read of a message, its CRC-32 differs from the recorded one at the end of the
                file. The method has then removed the file.
        """
        view, done = _bytes_of(buffer), 0
        while count := os.preadv(self._file.fileno(), [view[done : done + _AT_ONCE]], self.starts[index] + done):
            done += count
        if index not in self._verified:
            if (found := zlib.crc32(view)) != self._sums[index]:
                raise self._damaged(
                    f"message {index} of the file has CRC-32 {found:08x}, but {self._sums[index]:08x} was written"
                )
            self._verified.add(index)
        return buffer

    def _damaged(self, problem: str) -> DamagedError:
        """Remove the store's file, and return a DamagedError that names the file and states `problem`, the damage."""
        remove(self.path)
        return DamagedError(f"{self.path} is damaged: {problem}; it is removed, and the next run writes it again")


def write_store(path: Path, messages: Iterable[Iterable[torch.Tensor]]) -> None:
    """Write a file of packed weights, which `WeightStore` reads.

    Args:
        path: the file to write.
        messages: for each message, its content in pieces, which are uint8 tensors on the CPU.
    """
    sums = []
    with open(path, "wb") as file:
        for pieces in messages:
            crc = 0
            for piece in map(_bytes_of, pieces):
                file.write(piece)
                crc = zlib.crc32(piece, crc)
            sums.append(crc)
        file.write(np.array(sums, "<u4").tobytes())
        sync(file)


class FetchRing:
    """Ring of buffers on the device into which streamed layers' packed weights are fetched ahead of their use.

    A unit is one streamed layer, and its message holds its packed weights. A background thread reads the messages.

    Args:
        read: function (index, buffer) that returns the message of a unit on the host. The function either fills
            `buffer`, or returns another tensor in page-locked memory.
        sizes: number of bytes of each unit's message.
        ring: number of buffers.
        queue: queue whose thread calls `read` and copies to the device.
        device: device of the buffers, on which the model computes.
        fills: True if `read` fills its buffer; with False no host buffers are allocated.
    """

    def __init__(
        self,
        read: Callable[[int, torch.Tensor], torch.Tensor],
        sizes: Sequence[int],
        *,
        ring: int,
        queue: CommQueue,
        device: torch.device,
        fills: bool = True,
    ) -> None:
        self._read, self._sizes, self._queue, self._next = read, sizes, queue, 0
        cuda, byte = device.type == "cuda", torch.uint8
        self._host = [torch.empty(max(sizes) if fills else 0, dtype=byte, pin_memory=cuda) for _ in range(ring)]
        self._ring, self._stream = self._host, None
        if cuda:
            self._ring = [torch.empty(max(sizes), dtype=byte, device=device) for _ in range(ring)]
            self._stream = torch.cuda.Stream(device)

    def fetch(self, index: int) -> Work[torch.Tensor]:
        """Start to fetch the message of the unit `index` into the ring's next buffer, and return the work.

        The work yields the message, a 1-D uint8 tensor on the device. With a ring of R buffers, the R-th later fetch
        overwrites the message.
        """
        slot, self._next = self._next, (self._next + 1) % len(self._ring)
        # The layer that used this buffer's earlier content has run, so its kernels have been launched. The event `free`
        # follows these kernels on the compute stream. The copy into the buffer waits for the event.
        free = None if self._stream is None else torch.cuda.current_stream().record_event()
        return self._queue.submit(functools.partial(self._bring, index, slot, free))

    def _bring(self, index: int, slot: int, free: torch.cuda.Event | None) -> torch.Tensor:
        """Read a unit's message, copy it into a buffer of the ring on the device, and return a view of the copy.

        This function runs in the queue's background thread.

        Args:
            index: index of the unit.
            slot: index of the buffer in the ring.
            free: event after which the buffer may be overwritten; None on a CPU, where the message is returned without
                a copy.
        """
        size = self._sizes[index]
        message = self._read(index, self._host[slot][:size])
        if self._stream is None:
            return message
        assert free is not None
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(free)
            self._ring[slot][:size].copy_(message, non_blocking=True)
        self._stream.synchronize()
        return self._ring[slot][:size]


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a uint8 tensor on the CPU as a memoryview, for reading and writing files."""
    array: Any = tensor.numpy()
    return memoryview(array)
