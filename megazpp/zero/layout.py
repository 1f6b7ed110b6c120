"""The layout of a message, which is the bytes of one shard on the wire: pure integers, planned once per unit.

FSDP2 lays a unit's shards out flat: for each parameter its rows on this rank, padded to the same count on every rank
(zeros), one parameter after the other. Each parameter is a segment. On the wire a shard is one message of bytes:

    | payloads of the quantized segments | their scales | segments that travel exact | to a multiple of 16 bytes

No quantization block spans two parameters (a block half norm gains, half weights loses 25 dB of the weights), and 1-D
parameters travel exact, as do those so small that a block would be no shorter. Any shape and any number of ranks is
padding here, so nothing downstream has a special case.

    Example: W = 4 ranks, norm [6], weight [6, 100], 8 bits, blocks of 128, exact part bf16
        segments    norm: 2 elements (6 rows -> 8, 2 each), weight: 200 elements (2 rows of 100)
        message     payload 2 blocks = 256 B | 2 scales = 4 B, to 272 | norm exact 4 B | to 288 B
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kernels.formats import BlockFormat, ByteRange, MessageLayout, align, place_quantized


@dataclass(frozen=True, kw_only=True)
class Segment:
    """One parameter's part of a flat shard."""

    name: str
    start: int  # element in the shard
    size: int  # elements, padding included; the same on every rank
    exact: bool  # never quantized

    @property
    def stop(self) -> int:
        return self.start + self.size


def plan_segments(parameters: Sequence[tuple[str, tuple[int, ...]]], num_ranks: int) -> tuple[Segment, ...]:
    """The segments of a flat shard, of names and shapes (on this tensor-parallel rank) in FSDP2's flat order."""
    segments, start = [], 0
    for name, shape in parameters:
        rows = shape[0] if shape else 1
        size = -(-rows // num_ranks) * math.prod(shape[1:])
        segments.append(Segment(name=name, start=start, size=size, exact=len(shape) <= 1))
        start += size
    return tuple(segments)


def own_rows(rows: int, num_ranks: int, rank: int) -> int:
    """Rows of a parameter that a rank has, without padding: from rank x c to (rank + 1) x c, c the most of any."""
    most = -(-rows // num_ranks)
    return max(min(most, rows - rank * most), 0)


def plan_message(segments: Sequence[Segment], fmt: BlockFormat | None, *, exact_itemsize: int) -> MessageLayout:
    """Lay a shard's segments out in a message; without `fmt` all travel exact, `exact_itemsize` bytes an element."""
    quantized: list[Segment] = []
    exact: list[Segment] = []
    for segment in segments:
        size = segment.size
        pays = fmt is not None and fmt.payload_bytes(size) + fmt.scale_bytes(size) < size * exact_itemsize
        (quantized if pays and not segment.exact else exact).append(segment)

    ranges, offset = ([], 0) if fmt is None else place_quantized([(s.start, s.stop) for s in quantized], fmt)
    for start, stop in _runs(exact):
        offset = align(offset)
        length = (stop - start) * exact_itemsize
        ranges.append(ByteRange(start=start, stop=stop, payload=(offset, length), scales=None))
        offset += length
    size = segments[-1].stop if segments else 0
    return MessageLayout(size=size, message_bytes=align(offset), ranges=tuple(ranges), fmt=fmt)


def _runs(segments: Sequence[Segment]) -> list[tuple[int, int]]:
    """Neighbouring segments joined, empty ones left out."""
    runs: list[tuple[int, int]] = []
    for segment in segments:
        if segment.size == 0:
            continue
        if runs and runs[-1][1] == segment.start:
            runs[-1] = (runs[-1][0], segment.stop)
        else:
            runs.append((segment.start, segment.stop))
    return runs
