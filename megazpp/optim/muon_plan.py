"""Plan of Muon's work, in integers: the matrices of the layers, their rows on a node, and their owners.

Muon replaces the update of a matrix by an orthogonal matrix. The rows of a matrix are sharded over ranks. The rows that
are orthogonalized together form a block, and the block's owner is the rank that gathers and orthogonalizes it.
"""

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
    """A parameter of the layers that Muon trains: one matrix, or several whose rows alternate (queries, keys, values).

    Attributes:
        name: name of the parameter.
        shape: shape of the parameter on one tensor-parallel rank, before FSDP2 shards it.
        split: dimension that is split over tensor-parallel ranks; None if the parameter is replicated over them.
        rows: for each matrix, the number of consecutive rows that belong to it, in a pattern that repeats over the
            parameter.
        transposed: True if rows are inputs and columns outputs, as in the output matrices of experts.
        expert: True for a parameter of experts, which is split over expert-parallel instead of tensor-parallel ranks.
    """

    name: str
    shape: tuple[int, int]
    split: int | None
    rows: tuple[int, ...]
    transposed: bool = False
    expert: bool = False


def layer_matrices(model: nn.Module, tp_size: int, ep_size: int = 1) -> list[LayerMatrix]:
    """Return the parameters of the model that Muon trains, in the order of `named_parameters`.

    These are the trainable parameters whose `ParameterSpec` names matrices.

    Args:
        model: model, whose parameters FSDP2 may have sharded already.
        tp_size: number of tensor-parallel ranks.
        ep_size: number of expert-parallel ranks.
    """
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
    """The rows of one matrix that Muon orthogonalizes together: one node's rows, or in a full step all nodes' rows.

    Attributes:
        parameter: index of the parameter that holds the matrix, in the list of Muon's parameters.
        part: index of the matrix among the matrices of the parameter.
        shape: shape of the block on all tensor-parallel ranks together.
        counts: number of the block's rows by [local rank][node], equal on each tensor-parallel rank.
        columns: number of columns on one tensor-parallel rank.
        split: dimension of the block that is split over tensor-parallel ranks.
        transposed: True if rows are inputs and columns outputs, as in the output matrices of experts.
        owner: rank along the node axis that gathers and orthogonalizes the block.
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
    """Return, for each matrix of a parameter that Muon trains, which rows of one FSDP2 shard belong to the matrix.

    The rows are indices into the shard, in ascending order.

    Args:
        num_rows: number of rows of the parameter on one tensor-parallel rank.
        num_shards: number of shards into which FSDP2 splits these rows.
        shard: index of the shard.
        rows: numbers of consecutive rows of each matrix, in a pattern that repeats (`LayerMatrix.rows`).
    """
    count, first = own_rows(num_rows, num_shards, shard), shard * -(-num_rows // num_shards)
    if len(rows) == 1:
        return (range(count),)
    ends = list(itertools.accumulate(rows))
    parts = [bisect.bisect_right(ends, (first + index) % ends[-1]) for index in range(count)]
    return tuple([index for index, part in enumerate(parts) if part == wanted] for wanted in range(len(rows)))


def plan_blocks(parameters: Sequence[LayerMatrix], layout: Layout, nodes: Sequence[int]) -> list[list[MatrixBlock]]:
    """Plan which rank of a node orthogonalizes which rows of Muon's matrices.

    Owners are assigned greedily: the blocks in the order of falling cost, each to the rank that has the least work so
    far.

    Args:
        parameters: parameters that hold the matrices.
        layout: sizes of the mesh axes.
        nodes: indices of the nodes whose rows are orthogonalized together, among the nodes of one copy of the model. A
            matrix without rows on these nodes has no block.

    Returns:
        Groups of blocks with equal shape and orientation; each group is sorted by owner.
    """
    # ---- for each matrix that Muon trains, count its rows on each rank of `nodes`, and describe these rows by a
    # MatrixBlock. Its owner, the rank that orthogonalizes it, is still a placeholder (0)
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
            assert parameter.split is not None or tp == 1, f"{parameter.name} is not split over {tp} tp ranks"
            total = sum(map(sum, counts))
            shape = (tp * total, columns) if split == 0 else (total, tp * columns)
            if total:
                found.append(MatrixBlock(index, part, shape, counts, columns, split, parameter.transposed, owner=0))
    # ---- choose the owner of each block of rows, so that all ranks of a node have about equal work
    work = [0] * (tp * layout.local)
    groups: dict[tuple[tuple[int, int], bool], list[MatrixBlock]] = {}
    for block in sorted(found, key=lambda block: -block_cost(block.shape)):
        owner = work.index(min(work))
        work[owner] += block_cost(block.shape)
        groups.setdefault((block.shape, block.transposed), []).append(block._replace(owner=owner))
    return [sorted(group, key=lambda block: block.owner) for group in groups.values()]


def products(rows: int, columns: int) -> tuple[tuple[int, int, int], ...]:
    """Return the sizes (m, n, k) of the three matrix products in one Newton-Schulz iteration on a matrix of this size.

    The products multiply an m x k matrix by a k x n matrix.
    """
    low, high = sorted((rows, columns))
    return (low, low, high), (low, low, low), (low, high, low)


def block_cost(shape: tuple[int, int]) -> int:
    """Return the number of scalar multiplications in one Newton-Schulz iteration on a matrix of this shape."""
    return sum(m * n * k for m, n, k in products(*shape))
