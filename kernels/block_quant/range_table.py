"""The places of a message's segments, as integers in memory that a kernel reads, and the errors that messages leave.

A row per segment tells the C functions, and a row per tile the Triton programs:

    start      first element in the row of data
    size       elements from there to the end of the segment
    payload    first byte in the message, of the integers or of the elements as they are; a multiple of 16
    scales     first byte of the scales; -1 for elements that travel as they are

Rows of quantized segments come first, so a row of them and of their errors have the same number.

Error feedback: what the last quantization lost is kept as int8 and added back before the next one. The buffer is itself
a message (int8, the same block size as the message that was sent, of the quantized segments alone), so it costs about
one byte per element; against an fp32 buffer that loses nothing measurable. A block that was not finite leaves no error
behind (scale 0, payload 0), so one bad step cannot poison the steps after it.
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
    """The segments of a layout; make it with `range_table`, which makes one for all units of equal layout.

    Attributes:
        dtype: of the elements that are not quantized.
        num_ranges: rows of the table of segments.
        address: its first byte, on the host.
        repeats: what launches a kernel once more for this table, by what it was checked and compiled for.
    """

    def __init__(self, layout: MessageLayout, dtype: torch.dtype) -> None:
        self.layout, self.dtype = layout, dtype
        rows = [_row(part) for part in layout.ranges]
        is_quantized = [scales >= 0 for *_, scales in rows]
        assert is_quantized == sorted(is_quantized, reverse=True), f"quantized segments come first: {layout}"
        assert not any(payload % ALIGNMENT for _, _, payload, _ in rows), f"payloads start anywhere: {layout}"
        self.num_ranges = len(rows)
        self._rows = (ctypes.c_int64 * (COLUMNS * len(rows)))(*(number for row in rows for number in row))
        self.address = ctypes.addressof(self._rows)
        self.repeats: dict[tuple[object, ...], Callable[..., None]] = {}
        self._tiles: dict[tuple[torch.device, int], torch.Tensor] = {}

    @cached_property
    def of_errors(self) -> RangeTable:
        """The table of the errors that messages of this one leave behind."""
        return range_table(feedback_layout(self.layout), torch.float32)

    def tiles(self, device: torch.device, size: int) -> torch.Tensor:
        """The table of tiles of up to `size` elements, a multiple of the block size: [tiles, 4] int64 on `device`.

        It is made at the first call and costs 32 bytes per tile, 0.008 bytes per element with tiles of 4096.
        """
        found = self._tiles.get((device, size))
        if found is None:
            with torch.inference_mode(False):  # it outlives the mode
                found = self._tiles[device, size] = self._cut(size).to(device)
        return found

    def _cut(self, size: int) -> torch.Tensor:
        rows, fmt = [], self.layout.fmt
        for part in self.layout.ranges:
            start, length, payload, scales = _row(part)
            index = torch.arange(-(-length // size), dtype=torch.int64)
            step = size * self.dtype.itemsize
            if scales >= 0:
                assert fmt is not None
                step, scale_step = fmt.payload_bytes(size), fmt.scale_bytes(size)
                scales_of_tiles = scales + index * scale_step
            else:
                scales_of_tiles = torch.full_like(index, -1)
            first = index * size
            rows.append(torch.stack([start + first, length - first, payload + index * step, scales_of_tiles], dim=1))
        return torch.cat(rows) if rows else torch.empty(0, COLUMNS, dtype=torch.int64)


@cache
def range_table(layout: MessageLayout, dtype: torch.dtype) -> RangeTable:
    """The table of `layout`, whose elements that are not quantized have `dtype`."""
    return RangeTable(layout, dtype)


def _row(part: ByteRange) -> tuple[int, int, int, int]:
    return part.start, part.stop - part.start, part.payload[0], -1 if part.scales is None else part.scales[0]


class Feedback(NamedTuple):
    """The errors of messages of which something is quantized: [..., E] uint8, and where their segments lie."""

    messages: torch.Tensor
    table: RangeTable

    @classmethod
    def zeros(cls, lead: tuple[int, ...], table: RangeTable, device: torch.device | str = "cpu") -> Feedback:
        """A buffer without error for messages [*lead, M] of `table`."""
        kept = table.of_errors
        return cls(torch.zeros(*lead, kept.layout.message_bytes, dtype=torch.uint8, device=device), kept)

    def segments(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Views of every quantized segment's error: payload [..., bytes] uint8 and scales [..., blocks] bf16."""
        spans = [(part.payload, part.scales) for part in self.table.layout.ranges if part.scales is not None]
        return [(span_of(self.messages, p), span_of(self.messages, s).view(torch.bfloat16)) for p, s in spans]

    @property
    def scales(self) -> torch.Tensor:
        """A view of the scales of all segments, [..., blocks] bf16."""
        spans = [part.scales for part in self.table.layout.ranges if part.scales is not None]
        return self.messages[..., spans[0][0] : sum(spans[-1])].view(torch.bfloat16)


def span_of(messages: torch.Tensor, span: tuple[int, int]) -> torch.Tensor:
    """A view of some bytes of messages [..., M]: the first of them and their number."""
    return messages[..., span[0] : span[0] + span[1]]


def rescale_(errors: Sequence[Feedback], factor: torch.Tensor | float) -> None:
    """Multiply errors on one device by a finite scalar on it, in one pass over their scales that waits for nothing.

    The factor and each product are rounded to bf16.
    """
    scales = [error.scales for error in errors]
    if scales:
        torch._foreach_mul_(scales, factor.to(torch.bfloat16) if isinstance(factor, torch.Tensor) else factor)
