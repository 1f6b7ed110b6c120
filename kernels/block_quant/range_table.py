"""The places of a message's segments as integers that kernels read, and the buffers of quantization errors.

C functions read one row per segment, Triton programs one row per tile. The columns are:

    start      index of the first element in the row of data
    size       number of elements from there to the end of the segment
    payload    offset in the message of the integers or of the unquantized elements, in bytes; a multiple of 16
    scales     offset in the message of the scales, in bytes; -1 for unquantized elements

Rows of quantized segments come first, so that a segment has the same row number in the table of its errors.

Error feedback stores the errors of the last quantization and adds them back before the next one. The buffer is itself a
message, in int8 and with the block size of the sent message, of the quantized segments only. So it takes about one byte
per element; compared with fp32 it loses nothing measurable. A block that was not finite stores no error (scale 0,
payload 0), so that one bad step does not affect later ones.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache, cached_property
from typing import NamedTuple

import torch

from megazpp.kernels.formats import ALIGNMENT, ByteRange, MessageLayout, feedback_layout

COLUMNS = 4


class RangeTable:
    """The segments of a layout as integers for the kernels.

    Use `range_table` to create it, which shares one table between units of equal layout.

    Args:
        layout: layout of the messages; quantized segments come first.
        dtype: dtype of the unquantized elements.
    Attributes:
        num_ranges: number of rows in the table of segments.
        address: memory address of the table of segments, on the host.
        repeats: per key of a launch, a function that repeats it for other addresses (`_launch_of` in __init__.py).
    """

    def __init__(self, layout: MessageLayout, dtype: torch.dtype) -> None:
        self.layout, self.dtype = layout, dtype
        rows = [_row(part) for part in layout.ranges]
        is_quantized = [scales >= 0 for *_, scales in rows]
        assert is_quantized == sorted(is_quantized, reverse=True), f"quantized segments must come first: {layout}"
        assert not any(payload % ALIGNMENT for _, _, payload, _ in rows), f"a payload is not aligned: {layout}"
        self.num_ranges = len(rows)
        self._rows = (ctypes.c_int64 * (COLUMNS * len(rows)))(*(number for row in rows for number in row))
        self.address = ctypes.addressof(self._rows)
        self.repeats: dict[tuple[object, ...], Callable[..., None]] = {}
        self._tiles: dict[tuple[torch.device, int], torch.Tensor] = {}

    @cached_property
    def of_errors(self) -> RangeTable:
        """The table of the messages that store the quantization errors of this table's messages (error feedback)."""
        return range_table(feedback_layout(self.layout), torch.float32)

    def tiles(self, device: torch.device, size: int) -> torch.Tensor:
        """Return the table of tiles for Triton, [tiles, 4] int64 on `device`.

        It is created at the first call. It takes 32 bytes per tile, 0.008 bytes per element for tiles of 4096.

        Args:
            device: device of the result.
            size: elements per tile, a multiple of the block size.
        """
        found = self._tiles.get((device, size))
        if found is None:
            with torch.inference_mode(False):  # training also uses it if an evaluation creates it first
                found = self._tiles[device, size] = self._cut(size).to(device)
        return found

    def _cut(self, size: int) -> torch.Tensor:
        """Cut the segments into tiles of up to `size` elements; returns [tiles, 4] int64."""
        rows, fmt = [], self.layout.fmt
        for part in self.layout.ranges:
            start, length, payload, scales = _row(part)
            index = torch.arange(-(-length // size), dtype=torch.int64, device="cpu")
            step = size * self.dtype.itemsize
            if scales >= 0:
                assert fmt is not None
                step, scale_step = fmt.payload_bytes(size), fmt.scale_bytes(size)
                scales_of_tiles = scales + index * scale_step
            else:
                scales_of_tiles = torch.full_like(index, -1)
            first = index * size
            rows.append(torch.stack([start + first, length - first, payload + index * step, scales_of_tiles], dim=1))
        return torch.cat(rows) if rows else torch.empty(0, COLUMNS, dtype=torch.int64, device="cpu")


@cache
def range_table(layout: MessageLayout, dtype: torch.dtype) -> RangeTable:
    """Return the table of `layout`, created at the first call.

    Args:
        layout: layout of the messages.
        dtype: dtype of the unquantized elements.
    """
    return RangeTable(layout, dtype)


def _row(part: ByteRange) -> tuple[int, int, int, int]:
    """Return a segment's row of the table: start, size, payload, scales."""
    return part.start, part.stop - part.start, part.payload[0], -1 if part.scales is None else part.scales[0]


class Feedback(NamedTuple):
    """A buffer of quantization errors: messages [..., E] uint8, and the table of the segments in it."""

    messages: torch.Tensor
    table: RangeTable

    @classmethod
    def zeros(cls, lead: tuple[int, ...], table: RangeTable, device: torch.device | str = "cpu") -> Feedback:
        """Allocate a buffer without errors.

        Args:
            lead: leading dims of the messages whose errors it holds.
            table: table of these messages.
            device: device of the buffer.
        """
        kept = table.of_errors
        return cls(torch.zeros(*lead, kept.layout.message_bytes, dtype=torch.uint8, device=device), kept)

    def segments(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return views of the errors of every quantized segment.

        Each is (payload [..., bytes] uint8, scales [..., blocks] bf16).
        """
        spans = [(part.payload, part.scales) for part in self.table.layout.ranges if part.scales is not None]
        return [(span_of(self.messages, p), span_of(self.messages, s).view(torch.bfloat16)) for p, s in spans]

    @property
    def scales(self) -> torch.Tensor:
        """A view of the scales of all segments, [..., blocks] bf16."""
        spans = [part.scales for part in self.table.layout.ranges if part.scales is not None]
        return self.messages[..., spans[0][0] : sum(spans[-1])].view(torch.bfloat16)


def span_of(messages: torch.Tensor, span: tuple[int, int]) -> torch.Tensor:
    """Return a view of the bytes `span` (first byte, number of bytes) of messages [..., M]."""
    return messages[..., span[0] : span[0] + span[1]]


def rescale_(errors: Sequence[Feedback], factor: torch.Tensor | float) -> None:
    """Multiply error feedback by a finite scalar in place, in one pass over the scales; the host does not wait.

    The factor and each product are rounded to bf16.

    Args:
        errors: buffers on one device.
        factor: a number, or a scalar tensor on that device.
    """
    scales = [error.scales for error in errors]
    if scales:
        torch._foreach_mul_(scales, factor.to(torch.bfloat16) if isinstance(factor, torch.Tensor) else factor)
