"""Muon's plan, in integers: the matrices of a model's layers, a node's blocks of them, and who orthogonalizes each."""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

from torch import nn
from torch.distributed.tensor import DTensor

from megazpp.tensor_parallel.parameters import owned_parameters
from megazpp.topology.layout import Layout
from megazpp.zero.wire import own_rows


class LayerMatrix(NamedTuple):
    """A parameter of the layers that holds one matrix or several; shape on a tensor-parallel rank, without shards."""

    name: str
    shape: tuple[int, int]
    split: int | None  # the dim that tensor-parallel ranks share out
    rows: tuple[int, ...]  # that its matrices have in turn
    transposed: bool = False  # its matrices are stored as [inputs, outputs]
    expert: bool = False  # its shards are on the axes of experts


def layer_matrices(model: nn.Module, tp_size: int, ep_size: int = 1) -> list[LayerMatrix]:
    """The trained matrices of a model's layers, plain tensors or shards, in the order of `named_parameters`."""
    found = []
    for name, module, attribute, spec in owned_parameters(model):
        parameter = getattr(module, attribute)
        if spec.matrices and parameter.requires_grad:
            shape = list(parameter.shape)
            if isinstance(parameter, DTensor) and spec.split is not None:
                shape[spec.split] //= ep_size if spec.expert else tp_size
            kind = {"transposed": spec.transposed, "expert": spec.expert}
            found.append(LayerMatrix(name, (shape[0], shape[1]), spec.split, spec.matrices, **kind))
    return found


class MatrixBlock(NamedTuple):
    """The rows that some nodes have together of one matrix, the `part`-th of a parameter's.

    Attributes:
        shape: of what is orthogonalized, on all tensor-parallel ranks.
        counts: [local rank][node] rows; each tensor-parallel rank has as many, of `columns` elements.
        owner: the rank along the node axis that orthogonalizes it.
    """

    parameter: int
    part: int
    shape: tuple[int, int]
    counts: tuple[tuple[int, ...], ...]
    columns: int
    split: int
    transposed: bool
    owner: int


@functools.cache
def rows_of_parts(num_rows: int, num_shards: int, shard: int, rows: tuple[int, ...]) -> tuple[Sequence[int], ...]:
    """The rows, as indices into one shard, of each matrix that takes turns in a parameter [num_rows, ...]."""
    count, first = own_rows(num_rows, num_shards, shard), shard * -(-num_rows // num_shards)
    if len(rows) == 1:
        return (range(count),)
    ends = list(itertools.accumulate(rows))
    parts = [bisect.bisect_right(ends, (first + index) % ends[-1]) for index in range(count)]
    return tuple([index for index, part in enumerate(parts) if part == wanted] for wanted in range(len(rows)))


def plan_blocks(parameters: Sequence[LayerMatrix], layout: Layout, nodes: Sequence[int]) -> list[list[MatrixBlock]]:
    """The blocks that `nodes` (of one copy of the model) have together, in groups of one shape and kind, by owner.

    The costliest goes first to the rank that has the least to do. A matrix of which the nodes have no row is left out.
    """
    tp, shards, found = layout.tp, layout.shard, []
    for index, parameter in enumerate(parameters):
        (num_rows, columns), split = parameter.shape, parameter.split or 0
        for part in range(len(parameter.rows)):
            counts = tuple(
                tuple(
                    len(rows_of_parts(num_rows, shards, node * layout.local + local, parameter.rows)[part])
                    for node in nodes
                )
                for local in range(layout.local)
            )
            assert parameter.split is not None or tp == 1, f"{parameter.name} is not split over {tp} ranks"
            total = sum(map(sum, counts))
            shape = (tp * total, columns) if split == 0 else (total, tp * columns)
            if total:
                found.append(MatrixBlock(index, part, shape, counts, columns, split, parameter.transposed, owner=0))
    work = [0] * (tp * layout.local)
    groups: dict[tuple[tuple[int, int], bool], list[MatrixBlock]] = {}
    for block in sorted(found, key=lambda block: -block_cost(block.shape)):
        owner = work.index(min(work))
        work[owner] += block_cost(block.shape)
        groups.setdefault((block.shape, block.transposed), []).append(block._replace(owner=owner))
    return [sorted(group, key=lambda block: block.owner) for group in groups.values()]


def products(rows: int, columns: int) -> tuple[tuple[int, int, int], ...]:
    """(m, n, k) of the three products in a Newton-Schulz iteration on a matrix."""
    low, high = sorted((rows, columns))
    return (low, low, high), (low, low, low), (low, high, low)


def block_cost(shape: tuple[int, int]) -> int:
    """Multiplications of a Newton-Schulz iteration on a matrix."""
    return sum(m * n * k for m, n, k in products(*shape))
