"""A store of packed weights: one file, written once from a checkpoint; and the ring into which layers are fetched.

    section 0 | section 1 | ... | contents: what it is of; place, size and CRC-32 of sections | length, CRC-32, mark

A store appears whole or not at all: it is written under another name and renamed. Sections begin at multiples of 4096.
They are read with pread into buffers of the caller, because the pages of a mapping would count as memory of the
process. Each is summed when it is first read; a file that is not as it was written is removed, so that the next run
writes it anew: a store holds nothing that the checkpoint does not.
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
_END = struct.Struct("<QI8s")  # bytes and CRC-32 of the contents, mark
_AT_ONCE = 1 << 30  # bytes of one pread; Linux reads at most 2 GiB


class Section(NamedTuple):
    """A run of bytes of the file."""

    name: str
    start: int
    size: int
    crc: int


class WeightStore:
    """An open store of `identity`; any thread may read.

    Raises:
        FileNotFoundError: there is none.
        DamagedError: it is not as it was written; it is removed.
        ValueError: it is of something else.
    """

    def __init__(self, path: Path, identity: Mapping[str, Any]) -> None:
        self.path = path
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115 - closed with the object
        if hasattr(os, "posix_fadvise"):  # plain reads of 48 MB were 1.4 and 3.5 times as fast (2 runs)
            os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        self.sections = self._read_contents(identity)
        self._verified: set[int] = set()

    def read(self, index: int, buffer: torch.Tensor) -> torch.Tensor:
        """Fill `buffer` [size] uint8 on the CPU with a section, which is returned; DamagedError if it has changed."""
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
        size = os.fstat(self._file.fileno()).st_size
        end = os.pread(self._file.fileno(), _END.size, max(size - _END.size, 0))
        length, crc, mark = _END.unpack(end) if len(end) == _END.size else (0, 0, b"")
        if mark != MARK or length > size:
            raise self._damaged(f"its {size} bytes do not end as a store does")
        text = os.pread(self._file.fileno(), length, size - _END.size - length)
        if zlib.crc32(text) != crc:
            raise self._damaged("its contents are not as they were written")
        contents = json.loads(text)
        if (found := contents["identity"]) != identity:
            told = "; ".join(
                f"{key}: {found.get(key)}, not {it}" for key, it in identity.items() if found.get(key) != it
            )
            raise ValueError(f"{self.path} is the store of other weights ({told}): choose another --weight-store")
        return tuple(Section(*section) for section in contents["sections"])

    def _damaged(self, problem: str) -> DamagedError:
        remove(self.path)
        return DamagedError(f"{self.path} is damaged: {problem}; it is removed, and the next run writes it anew")


def write_store(
    path: Path, identity: Mapping[str, Any], sections: Sequence[tuple[str, int, Iterable[torch.Tensor]]]
) -> None:
    """Write a store, whose lock the caller holds; raises ValueError if the disk is full, and leaves nothing then.

    `sections`: name, size in bytes (a multiple of 4096) and content [bytes] uint8 on the CPU, piece by piece.
    """
    needed = sum(size for _, size, _ in sections)
    unfinished = path.with_name(path.name + ".unfinished")  # a killed writer's is written over
    remove(unfinished)
    free = shutil.disk_usage(path.parent).free
    full = f"--weight-store: {path} needs {needed / GIGA:.2f} GB"
    if free < needed:
        raise ValueError(f"{full}, and {path.parent} has {free / GIGA:.2f} GB left")
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
    """Brings messages of `sizes` bytes, in order, into a `ring` of buffers on the device, by reads in a queue.

    Args:
        read: fills a buffer on the host with the message of a unit, or gives a page-locked tensor that holds it.
        fills: whether it fills the buffer; else there is none.
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
        """Begin to bring a unit's message; it stays until the ring is round."""
        slot, self._next = self._next, (self._next + 1) % len(self._ring)
        free = None if self._stream is None else torch.cuda.current_stream().record_event()  # after the slot's last use
        return self._queue.submit(functools.partial(self._bring, index, slot, free))

    def _bring(self, index: int, slot: int, free: torch.cuda.Event | None) -> torch.Tensor:
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
    array: Any = tensor.numpy()
    return memoryview(array)
