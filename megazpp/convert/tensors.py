"""Tensors that are read when they are wanted, and which of another format's tensors make one of ours.

A model passes through a conversion one tensor at a time: shapes and types are known and checked before the first one
is read, and each is read, rearranged and written before the next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch


class Deferred(NamedTuple):
    """A tensor that `read` gives."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], torch.Tensor]


class ForeignTensors(NamedTuple):
    """Which tensors of another format make one of ours, and how.

    Attributes:
        theirs: the names of the tensors that it is there.
        join: makes ours of them, in that order.
        split: the other way round; tells the shapes too, of a tensor without data.
    """

    theirs: tuple[str, ...]
    join: Callable[[Sequence[torch.Tensor]], torch.Tensor]
    split: Callable[[torch.Tensor], Sequence[torch.Tensor]]


def same(name: str) -> ForeignTensors:
    """Ours as it is."""
    return ForeignTensors((name,), lambda parts: parts[0], lambda ours: [ours])


def transposed(name: str) -> ForeignTensors:
    """A matrix that is stored as [in, out] there."""
    return ForeignTensors((name,), lambda parts: parts[0].t(), lambda ours: [ours.t()])


def fuse_qkv(parts: Sequence[torch.Tensor], *, groups: int, head_size: int) -> torch.Tensor:
    """Rows of queries, keys and values to our fused rows [group, (queries of the group, key, value), channel]."""
    rest = parts[0].shape[1:]
    return torch.cat([part.reshape(groups, -1, head_size, *rest) for part in parts], dim=1).flatten(0, 2)


def split_qkv(fused: torch.Tensor, *, groups: int, head_size: int) -> list[torch.Tensor]:
    """What `fuse_qkv` has fused."""
    rows = fused.reshape(groups, -1, head_size, *fused.shape[1:])
    queries = rows.shape[1] - 2
    return [part.flatten(0, 2) for part in rows.split((queries, 1, 1), dim=1)]


def join_all(
    pieces: Mapping[str, ForeignTensors],
    theirs: Mapping[str, Deferred],
    shapes: Mapping[str, tuple[int, ...]],
    where: str,
) -> dict[str, Deferred]:
    """Our tensors, each made of theirs when it is read.

    Args:
        shapes: of ours.
        where: what holds `theirs`, for messages.
    Raises:
        ValueError: a tensor is missing, has another shape than the model's, or has no place in it.
    """
    expected = {
        name: tuple(part.shape)
        for ours, piece in pieces.items()
        for name, part in zip(piece.theirs, piece.split(torch.empty(shapes[ours], device="meta")), strict=True)
    }
    check_tensors({name: entry.shape for name, entry in theirs.items()}, expected, where)
    return {
        ours: Deferred(shapes[ours], _one_dtype(piece, theirs, where), _joiner(piece, theirs))
        for ours, piece in pieces.items()
    }


def split_all(pieces: Mapping[str, ForeignTensors], ours: Mapping[str, Deferred]) -> dict[str, Deferred]:
    """Their tensors, each a part of ours; one that is several parts is read as often."""
    found = {}
    for name, piece in pieces.items():
        entry = ours[name]
        parts = piece.split(torch.empty(entry.shape, device="meta"))
        for index, (their_name, part) in enumerate(zip(piece.theirs, parts, strict=True)):
            found[their_name] = Deferred(tuple(part.shape), entry.dtype, _splitter(piece, entry, index))
    return found


def check_tensors(found: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]], where: str) -> None:
    """Raises ValueError naming tensors that are missing, that nobody expects, or that have another shape."""
    problems = [
        *_listed("is missing", "are missing", [name for name in expected if name not in found]),
        *_listed("has no place in this model", "have no place in this model", [n for n in found if n not in expected]),
        *(
            f"{name} has shape {list(found[name])}, the model's is {list(shape)}"
            for name, shape in expected.items()
            if name in found and tuple(found[name]) != tuple(shape)
        ),
    ]
    if problems:
        more = f" (and {len(problems) - 3} more like that)" if len(problems) > 3 else ""
        raise ValueError(f"{where}: {'; '.join(problems[:3])}{more}")


def _listed(one: str, several: str, names: Iterable[str]) -> list[str]:
    names = list(names)
    if not names:
        return []
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return [f"{', '.join(names[:3])}{more} {one if len(names) == 1 else several}"]


def _one_dtype(piece: ForeignTensors, theirs: Mapping[str, Deferred], where: str) -> torch.dtype:
    dtypes = {theirs[name].dtype for name in piece.theirs}
    if len(dtypes) > 1:
        raise ValueError(f"{where}: {', '.join(piece.theirs)} are one tensor here, and have different types")
    return dtypes.pop()


def _joiner(piece: ForeignTensors, theirs: Mapping[str, Deferred]) -> Callable[[], torch.Tensor]:
    return lambda: piece.join([theirs[name].read() for name in piece.theirs]).contiguous()


def _splitter(piece: ForeignTensors, ours: Deferred, index: int) -> Callable[[], torch.Tensor]:
    return lambda: piece.split(ours.read())[index].contiguous()
