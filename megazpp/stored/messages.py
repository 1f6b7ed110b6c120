"""The messages of stored weights: which rows of which weights one rank has, where they lie, and how they are packed.

    weight 0: this rank's rows (packed.py) | to 16 bytes | weight 1: its rows | ... | to a multiple of `align`

Dim 0 of a weight is spread over the parts of a message, each with ceil(rows / parts) rows, of which the last may be
padding. The same layout serves frozen units, whose parts are gathered and unpacked, and layers that stream.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch

from megazpp.stored.packed import Bits, RowFormat, plan_rows

LoadRows = Callable[[str, slice], torch.Tensor]


class Placed(NamedTuple):
    """A weight in a message.

    Attributes:
        rows: format of its rows; None for one that is whole in every part, in fp32.
        part_rows: rows of each rank's part; those of the last may be padding.
        start: its first byte.
    """

    name: str
    shape: tuple[int, ...]
    rows: RowFormat | None
    part_rows: int
    start: int

    @property
    def num_bytes(self) -> int:
        return self.part_rows * self.rows.row_bytes if self.rows is not None else 4 * math.prod(self.shape)

    @property
    def stop(self) -> int:
        return self.start + self.num_bytes

    def rows_in(self, messages: torch.Tensor) -> torch.Tensor:
        """[L, M] messages -> [L, part_rows, row_bytes], a view."""
        return messages[:, self.start : self.stop].unflatten(1, (self.part_rows, -1))

    def loaded(self, load: LoadRows, part: int, num_elements: int) -> Iterator[torch.Tensor]:
        """The rows of a part, without padding, a piece of about `num_elements` at a time.

        Raises:
            ValueError: `load` gave another shape.
        """
        begin, at_once = part * self.part_rows, max(num_elements // max(math.prod(self.shape[1:]), 1), 1)
        end = min(begin + self.part_rows, self.shape[0])
        for start in range(begin, end, at_once):
            rows = slice(start, min(start + at_once, end))
            loaded, expected = load(self.name, rows), (rows.stop - start, *self.shape[1:])
            if tuple(loaded.shape) != expected:
                raise ValueError(f"{self.name}: rows of shape {tuple(loaded.shape)} were loaded, not {expected}")
            yield loaded


class MessagePlan(NamedTuple):
    """Weights that come together, over how many ranks they are spread, and the bytes of one rank's part of them."""

    name: str
    weights: tuple[Placed, ...]
    num_parts: int
    num_bytes: int


def plan_message(
    name: str,
    shapes: Mapping[str, tuple[int, ...]],
    num_parts: int,
    bits: Bits,
    dtype: torch.dtype,
    *,
    vectors: torch.dtype | None,
    align: int,
) -> MessagePlan:
    """Lay weights out in a message.

    Args:
        shapes: of this tensor-parallel rank's part of each weight.
        num_parts: ranks that share them.
        bits, dtype: of an element of a matrix, and the dtype of 32 or 16 bits.
        vectors: dtype in which all but matrices are spread over the parts too; None: they, and matrices of one row,
            are whole in every part.
    """
    placed, start = [], 0
    for each, shape in shapes.items():
        rows = None
        if len(shape) == 2 and (vectors is not None or shape[0] > 1):
            rows = plan_rows(shape[1], bits, dtype)
        elif vectors is not None:
            rows = RowFormat(columns=math.prod(shape[1:]), dtype=vectors, fmt=None)
        weight = Placed(each, shape, rows, -(-shape[0] // num_parts), start)
        placed.append(weight)
        start = -(-weight.stop // 16) * 16
    return MessagePlan(name, tuple(placed), num_parts, -(-start // align) * align)


def pack_message(message: MessagePlan, load: LoadRows, part: int, *, num_elements: int) -> Iterator[torch.Tensor]:
    """A rank's message, piece by piece from its first byte to its last: uint8 on the CPU.

    Args:
        load: (name, rows) -> these rows of dim 0, of any dtype.
        part: the rank of the unit's axis; where there is one part, any.
        num_elements: how many are loaded at once.
    """
    done, part = 0, part % message.num_parts
    for weight in message.weights:
        yield torch.zeros(weight.start - done, dtype=torch.uint8)
        done = weight.start
        for loaded in weight.loaded(load, part, num_elements):
            packed = loaded.float() if weight.rows is None else weight.rows.pack(loaded.reshape(len(loaded), -1))
            yield packed.flatten().view(torch.uint8)
            done += packed.nbytes
        yield torch.zeros(weight.stop - done, dtype=torch.uint8)
        done = weight.stop
    yield torch.zeros(message.num_bytes - done, dtype=torch.uint8)


def whole_message(packed: torch.Tensor, pieces: Iterator[torch.Tensor]) -> torch.Tensor:
    """Fill `packed` [M] uint8 with the pieces of a message; it is returned."""
    done = 0
    for piece in pieces:
        packed[done : done + len(piece)] = piece
        done += len(piece)
    return packed
