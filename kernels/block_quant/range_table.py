"""Tables of integers that tell kernels of block quantization where a message holds its segments; error feedback.

C functions read one table row per segment, Triton programs one table row per tile. The columns are:

    start      index of the first element of the segment or tile in a row of data
    size       number of elements from `start` to the end of the segment
    payload    offset in the message of the integers or of the unquantized elements, in bytes; a multiple of 16
    scales     offset in the message of the scales, in bytes; -1 for unquantized elements

Table rows of quantized segments come first, so that a segment has the same row number in the table of its errors.

Error feedback stores the errors of the last quantization and adds them back before the next one. The buffer of errors
is itself a message of the quantized segments, in int8 and with the block size of the sent message. So it takes about
one byte per element. No measurement has shown a difference from training with fp32 errors. For a block with NaN or Inf
the buffer stores no error (scale 0, payload 0), so that one bad step does not affect later ones.
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
    """The segments of a message layout as tables of integers, which the kernels of block quantization read.

    Create it with `range_table`, which shares one table between sharding units of equal layout.

    Args:
        layout: layout of the messages; quantized segments come first.
        dtype: dtype in which a message holds unquantized elements.
    Attributes:
        num_ranges: number of segments, the rows of the table for C.
        address: host memory address of the table for C.
        repeats: for each key of a Triton launch (`_launch_of` in __init__.py), a function that repeats this launch for
            tensors at other addresses.
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
        """The table of segments in error feedback's buffer for the messages of this table.

        The buffer stores the quantization errors of these messages, and is itself laid out as a message.
        """
        return range_table(feedback_layout(self.layout), torch.float32)

    def tiles(self, device: torch.device, size: int) -> torch.Tensor:
        """Return the table that tells each Triton program where its tile is, [number of tiles, 4] int64 on `device`.

        Row i describes tile i; the top of this file describes the four columns. The first call for a device and size
        creates the table. A table takes 32 bytes per tile, or 0.008 bytes per element for tiles of 4096 elements.

        Args:
            device: device on which the kernels run.
            size: elements per tile, a multiple of the block size.
        """
        found = self._tiles.get((device, size))
        if found is None:
            # An evaluation in inference mode may create the table that training uses later. So create a normal
            # tensor, because torch restricts the use of inference tensors outside of inference mode.
            with torch.inference_mode(False):
                found = self._tiles[device, size] = self._cut(size).to(device)
        return found

    def _cut(self, size: int) -> torch.Tensor:
        """Cut the segments into tiles of up to `size` elements, and return the table of the tiles.

        The table is [number of tiles, 4] int64 on the CPU, with one row per tile. The columns are start, size, payload
        and scales, as described at the top of this file.
        """
        rows, fmt = [], self.layout.fmt
        for part in self.layout.ranges:
            start, length, payload, scales = _row(part)
            # The steps are the bytes from one tile to the next in the message. Unquantized segments have no scales:
            # their offset of scales is -1, and the step 0 keeps it at -1 in every tile.
            payload_step, scale_step = size * self.dtype.itemsize, 0
            if scales >= 0:
                assert fmt is not None
                payload_step, scale_step = fmt.payload_bytes(size), fmt.scale_bytes(size)
            index = torch.arange(-(-length // size), dtype=torch.int64, device="cpu")
            columns = (start + index * size, length - index * size, payload + index * payload_step)
            rows.append(torch.stack((*columns, scales + index * scale_step), dim=1))
        return torch.cat(rows) if rows else torch.empty(0, COLUMNS, dtype=torch.int64, device="cpu")


@cache
def range_table(layout: MessageLayout, dtype: torch.dtype) -> RangeTable:
    """Return the table of segments for messages of this layout; calls with equal arguments return the same table.

    Args:
        layout: layout of the messages.
        dtype: dtype in which a message holds unquantized elements.
    """
    return RangeTable(layout, dtype)


def _row(part: ByteRange) -> tuple[int, int, int, int]:
    """Return a segment's row in the table that kernels read: start, size, payload, scales (-1 if unquantized).

    The columns are described at the top of this file.
    """
    return part.start, part.stop - part.start, part.payload[0], -1 if part.scales is None else part.scales[0]


class Feedback(NamedTuple):
    """Error feedback's buffer, which stores the quantization errors of the last messages in int8.

    Attributes:
        messages: [..., E] uint8, for each message that is sent, E bytes with the errors of its quantized segments.
        table: table of the segments in these E bytes.
    """

    messages: torch.Tensor
    table: RangeTable

    @classmethod
    def zeros(cls, lead: tuple[int, ...], table: RangeTable, device: torch.device | str = "cpu") -> Feedback:
        """Allocate a buffer for error feedback in which all quantization errors are 0.

        Args:
            lead: shape of the tensor of messages [*lead, M] without its last dim, the bytes M of a message.
            table: table of the segments of these messages.
            device: device of the messages.
        """
        kept = table.of_errors
        return cls(torch.zeros(*lead, kept.layout.message_bytes, dtype=torch.uint8, device=device), kept)

    def segments(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return error feedback's stored quantization errors of each quantized segment, as views of this buffer.

        The list has one pair of views per segment: the bytes of the int8 integers, [..., bytes] uint8, and the blocks'
        scales, [..., blocks] bf16.
        """
        spans = [(part.payload, part.scales) for part in self.table.layout.ranges if part.scales is not None]
        return [(span_of(self.messages, p), span_of(self.messages, s).view(torch.bfloat16)) for p, s in spans]

    @property
    def scales(self) -> torch.Tensor:
        """A view [..., blocks] bf16 of the scales of all stored quantization errors, which are adjacent in memory."""
        spans = [part.scales for part in self.table.layout.ranges if part.scales is not None]
        return self.messages[..., spans[0][0] : sum(spans[-1])].view(torch.bfloat16)


def span_of(messages: torch.Tensor, span: tuple[int, int]) -> torch.Tensor:
    """Return a view of the bytes `span` (first byte, number of bytes) of messages [..., M] of M bytes each."""
    return messages[..., span[0] : span[0] + span[1]]


def rescale_(errors: Sequence[Feedback], factor: torch.Tensor | float) -> None:
    """Multiply the stored errors of error feedback by a finite number in place, as when the loss scale has changed.

    Only the blocks' scales change. The factor and each new scale are rounded to bf16. The host does not wait.

    Args:
        errors: buffers of error feedback, all on one device.
        factor: a number, or a scalar tensor on that device.
    """
    scales = [error.scales for error in errors]
    if scales:
        torch._foreach_mul_(scales, factor.to(torch.bfloat16) if isinstance(factor, torch.Tensor) else factor)
