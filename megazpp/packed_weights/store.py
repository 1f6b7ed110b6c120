"""A store of packed weights on disk, written once from a checkpoint, and a ring of buffers into which layers are read.

    section 0 | section 1 | ... | contents: identity; position, size and CRC-32 of each section | length, CRC-32, mark

A store is written under another name and renamed when it is complete. Sections start at multiples of 4096 bytes. They
are read by pread into the caller's buffers, because pages of a memory map would count as memory of the process. The
CRC-32 of a section is checked at its first read. A damaged file is removed, and the next run writes it again from the
checkpoint.
"""

from __future__ import annotations

import errno
import functools
import json
import os
import shutil
import struct
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megazpp.base.files import DamagedError, remove, renamed_when_done, sync
from megazpp.base.program import GIGA
from megazpp.parallel.comm_queue import CommQueue, Work

MARK = b"MegaZ++w"
_END = struct.Struct("<QI8s")  # length and CRC-32 of the table of sections, and the mark
_AT_ONCE = 1 << 30  # largest number of bytes of one pread; Linux reads at most 2 GiB per call


class Section(NamedTuple):
    """A section of the file: `size` bytes from byte `start` on, with their CRC-32."""

    name: str
    start: int
    size: int
    crc: int


class WeightStore:
    """An open store of packed weights; any thread may read it.

    Args:
        path: the file.
        identity: description of the weights, which must equal the one in the file.
    Raises:
        FileNotFoundError: the file does not exist.
        DamagedError: the file is damaged; it has been removed.
        ValueError: the file holds other weights.
    """

    def __init__(self, path: Path, identity: Mapping[str, Any]) -> None:
        self.path = path
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115 - closed with the object
        if hasattr(os, "posix_fadvise"):  # read-ahead made reads of 48 MB 1.4 and 3.5 times as fast in two measurements
            os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        self.sections = self._read_contents(identity)
        self._verified: set[int] = set()

    def read(self, index: int, buffer: torch.Tensor) -> torch.Tensor:
        """Read a section into `buffer`, and return the buffer.

        Args:
            index: index of the section.
            buffer: [size] uint8 on the CPU.
        Raises:
            DamagedError: the section ends early or its checksum differs.
        """
        section = self.sections[index]
        assert buffer.numel() == section.size, (section, buffer.shape)
        view, done = _bytes_of(buffer), 0
        while done < section.size:
            count = os.preadv(self._file.fileno(), [view[done : done + _AT_ONCE]], section.start + done)
            if count == 0:
                raise self._damaged(f"it ends inside {section.name}")
            done += count
        if index not in self._verified:
            if zlib.crc32(view) != section.crc:
                raise self._damaged(f"the checksum of {section.name} is {zlib.crc32(view):08x}, not {section.crc:08x}")
            self._verified.add(index)
        return buffer

    def _read_contents(self, identity: Mapping[str, Any]) -> tuple[Section, ...]:
        """Read and check the table of sections at the end of the file."""
        size = os.fstat(self._file.fileno()).st_size
        end = os.pread(self._file.fileno(), _END.size, max(size - _END.size, 0))
        length, crc, mark = _END.unpack(end) if len(end) == _END.size else (0, 0, b"")
        if mark != MARK or length > size:
            raise self._damaged(f"its {size} bytes do not end with the mark of a store")
        text = os.pread(self._file.fileno(), length, size - _END.size - length)
        if zlib.crc32(text) != crc:
            raise self._damaged("the checksum of its table of sections differs")
        contents = json.loads(text)
        if (found := contents["identity"]) != identity:
            told = "; ".join(
                f"{key}: {found.get(key)}, not {it}" for key, it in identity.items() if found.get(key) != it
            )
            raise ValueError(f"{self.path} is the store of other weights ({told}): choose another --weight-store")
        return tuple(Section(*section) for section in contents["sections"])

    def _damaged(self, problem: str) -> DamagedError:
        """Remove the file, and return an error that describes the damage."""
        remove(self.path)
        return DamagedError(f"{self.path} is damaged: {problem}; it is removed, and the next run writes it again")


def write_store(
    path: Path, identity: Mapping[str, Any], sections: Sequence[tuple[str, int, Iterable[torch.Tensor]]]
) -> None:
    """Write a store; the caller holds its lock.

    Args:
        path: the file.
        identity: description of the weights.
        sections: name, size in bytes (a multiple of 4096) and content of each section. The content is uint8 on the CPU,
            in pieces.
    Raises:
        ValueError: the disk is full; nothing is left of the file.
    """
    # check the free space
    needed = sum(size for _, size, _ in sections)
    unfinished = path.with_name(path.name + ".unfinished")  # a file left by a killed writer is overwritten
    remove(unfinished)
    free = shutil.disk_usage(path.parent).free
    full = f"--weight-store: {path} needs {needed / GIGA:.2f} GB"
    if free < needed:
        raise ValueError(f"{full}, and {path.parent} has {free / GIGA:.2f} GB left")
    # write the sections, then the table of sections
    written: list[Section] = []
    try:
        with renamed_when_done(unfinished, path), open(unfinished, "wb", buffering=0) as file:
            for name, size, content in sections:
                start, crc = file.tell(), 0
                for piece in content:
                    view = _bytes_of(piece)
                    crc = zlib.crc32(view, crc)
                    while view:
                        view = view[file.write(view) :]
                assert file.tell() == start + size, (name, start, size, file.tell())
                written.append(Section(name, start, size, crc))
            text = json.dumps({"identity": dict(identity), "sections": written}).encode()
            file.write(text + _END.pack(len(text), zlib.crc32(text), MARK))
            sync(file)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise ValueError(f"{full}: {error.strerror}; nothing of it was kept") from error
        raise


class FetchRing:
    """Fetches messages, in order, into a ring of buffers on the device; a queue's thread reads them.

    Args:
        read: function (index, buffer) that returns the message of a unit on the host. It fills the buffer, or returns
            its own page-locked tensor.
        sizes: bytes of each message.
        ring: number of buffers.
        queue: queue whose thread reads.
        device: device of the buffers.
        fills: whether `read` fills the buffer. Otherwise no host buffers are allocated.
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
        """Start to fetch a unit's message; it stays valid until the ring returns to its buffer."""
        slot, self._next = self._next, (self._next + 1) % len(self._ring)
        # The event follows the last use of this buffer, so the copy may overwrite it after the event.
        free = None if self._stream is None else torch.cuda.current_stream().record_event()
        return self._queue.submit(functools.partial(self._bring, index, slot, free))

    def _bring(self, index: int, slot: int, free: torch.cuda.Event | None) -> torch.Tensor:
        """Read a message, copy it to its buffer on the device after `free`, and return it."""
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
    """Return the memory of a uint8 tensor on the CPU."""
    array: Any = tensor.numpy()
    return memoryview(array)
