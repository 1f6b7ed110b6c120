"""Collectives on activations, differentiable: the entries and exits of tensor, context and expert parallelism.

Each function runs a collective in forward and its adjoint in backward. Activations are [S, B, H] (sequence, batch,
hidden), so that a slice of the sequence is contiguous. T is the size of the axis tp, C the size of the axis cp.

| region                   | forward                     | backward                    |
|--------------------------|-----------------------------|-----------------------------|
| copy_to_region           | identity                    | all-reduce                  |
| reduce_from_region_      | all-reduce, in place        | identity                    |
| gather_sequence          | all-gather along S          | reduce-scatter along S      |
| reduce_scatter_sequence  | reduce-scatter along S      | all-gather along S          |
| exchange                 | all-to-all                  | all-to-all                  |
| exchange_rows            | all-to-all, unequal sizes   | all-to-all, unequal sizes   |
| collect_sequence         | all-gather along S          | this rank's slice           |

A tensor-parallel region of a layer begins with `copy_to_region` and ends with `reduce_from_region_`. With sequence
parallelism it begins with `gather_sequence` and ends with `reduce_scatter_sequence`. Both pairs send the same number of
bytes in forward, and also in backward.

`exchange_rows` is for expert parallelism: it sends tokens to the ranks of their experts and back (model/moe.py).

`exchange` and `collect_sequence` are for context parallelism (Ulysses, arXiv 2309.14509). Each rank holds some of the
tokens, except in attention, where it holds some of the heads for all tokens. `exchange` converts one of these divisions
into the other. All ranks of a cp group compute the same loss, so the backward of `collect_sequence` needs no sum.

On an axis of size 1, each collective returns its argument.
"""

from __future__ import annotations

from typing import Any

import torch

from megazpp.kernels import expert_rows
from megazpp.parallel.axis import MeshAxis


def enter_region(x: torch.Tensor, tp: MeshAxis, *, sequence_parallel: bool) -> torch.Tensor:
    """Enter a tensor-parallel region: return the input [S, B, H] of a column-parallel layer.

    Args:
        x: activations outside the region, [S, B, H], or this rank's slice [S/T, B, H] with sequence parallelism.
        tp: tensor-parallel axis.
        sequence_parallel: True if x is this rank's slice of the sequence.
    """
    if tp.size == 1:
        return x
    return gather_sequence(x, tp) if sequence_parallel else copy_to_region(x, tp)


def leave_region(x: torch.Tensor, tp: MeshAxis, *, sequence_parallel: bool) -> torch.Tensor:
    """Leave a tensor-parallel region: sum the output of a row-parallel layer over tensor-parallel ranks.

    Args:
        x: [S, B, H] partial output of this rank, which may be overwritten.
        tp: tensor-parallel axis.
        sequence_parallel: True returns only this rank's slice of the sequence.
    Returns:
        The sum, [S, B, H], or [S/T, B, H] with sequence parallelism.
    """
    if tp.size == 1:
        return x
    return reduce_scatter_sequence(x, tp) if sequence_parallel else reduce_from_region_(x, tp)


def copy_to_region(x: torch.Tensor, tp: MeshAxis) -> torch.Tensor:
    """Return x unchanged, the input of a tensor-parallel region. Backward sums its gradient over tp (1 all-reduce)."""
    return _Copy.apply(x, tp)


def reduce_from_region_(x: torch.Tensor, tp: MeshAxis) -> torch.Tensor:
    """Sum x over tensor-parallel ranks in place, and return it (1 all-reduce). Backward is the identity.

    x must be contiguous and must not be an autograd leaf.
    """
    return _Reduce.apply(x, tp)


def gather_sequence(x: torch.Tensor, tp: MeshAxis) -> torch.Tensor:
    """Gather the slices x [S/T, ...] of T tensor-parallel ranks to the whole sequence [S, ...] (1 all-gather).

    Backward sums the gradient over tp, and returns this rank's slice of the sum (1 reduce-scatter).
    """
    return _Collective.apply(x, tp, "all_gather", "reduce_scatter")


def reduce_scatter_sequence(x: torch.Tensor, tp: MeshAxis) -> torch.Tensor:
    """Sum x [S, ...] over T tensor-parallel ranks, and return this rank's slice of the sequence, [S/T, ...].

    Forward is 1 reduce-scatter. Backward gathers the slices of the gradient (1 all-gather).
    """
    return _Collective.apply(x, tp, "reduce_scatter", "all_gather")


def exchange(x: torch.Tensor, cp: MeshAxis) -> torch.Tensor:
    """Send x[i] to rank i of the context-parallel axis, and return y with y[i] from rank i (1 all-to-all).

    x and y are [C, ...] for C ranks. Backward sends the gradients of y back (1 all-to-all).
    """
    return _Collective.apply(x, cp, "all_to_all", "all_to_all")


def collect_sequence(x: torch.Tensor, cp: MeshAxis) -> torch.Tensor:
    """Gather the slices x [S/C, ...] of C context-parallel ranks to the whole sequence [S, ...] (1 all-gather).

    Backward returns this rank's slice of the gradient without a sum, because all ranks compute the same gradient.
    """
    return _Collective.apply(x, cp, "all_gather", "own_slice")


def exchange_rows(x: torch.Tensor, ep: MeshAxis, send: list[int], receive: list[int]) -> torch.Tensor:
    """Send rows of x to other expert-parallel ranks, and return the rows that they have sent (1 all-to-all).

    Backward sends the gradients of the returned rows back (1 all-to-all).

    Args:
        x: [sum(send), H] rows, such as tokens, in the order of the ranks to which they go.
        ep: expert-parallel axis.
        send: number of rows to send to each rank.
        receive: number of rows to receive from each rank.
    Returns:
        The received rows [sum(receive), H], in the order of the ranks from which they come.
    """
    return _ExchangeRows.apply(x, ep, send, receive)


def take_rows(x: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor, *, copies: int = 1) -> torch.Tensor:
    """Repeat each row of x `copies` times, and permute the repeated rows; no rank communicates.

    Backward permutes the rows of the gradient back, and sums the copies of each row. It uses no atomic additions, so
    that two runs are bit-identical.

    Args:
        x: [n, H] rows, such as tokens.
        order: [n copies] permutation: row i of the result is row order[i] // copies of x.
        inverse: [n copies] inverse permutation of `order`.
        copies: number of copies of each row.
    Returns:
        The rows [n copies, H].
    """
    return _TakeRows.apply(x, order, inverse, copies)


class _Copy(torch.autograd.Function):
    """The autograd function of `copy_to_region`: the identity in forward, an all-reduce over tp in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, tp: MeshAxis) -> torch.Tensor:
        ctx.tp = tp
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        # The all-reduce overwrites its argument, so it gets a clone: other autograd functions may get the same tensor.
        return ctx.tp.all_reduce_(grads[0].clone(memory_format=torch.contiguous_format)), None


class _Reduce(torch.autograd.Function):
    """The autograd function of `reduce_from_region_`: an all-reduce in place in forward, the identity in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, tp: MeshAxis) -> torch.Tensor:
        if torch.compiler.is_compiling():
            return tp.all_reduce_(x.clone())  # torch.compile removes the clone if it can reuse the memory of x
        ctx.mark_dirty(x)
        return tp.all_reduce_(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


class _Collective(torch.autograd.Function):
    """The autograd function that runs a collective of an axis in forward, and its adjoint in backward.

    `collective` and `adjoint` are names of methods of `MeshAxis`.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: MeshAxis, collective: str, adjoint: str) -> Any:
        ctx.axis, ctx.adjoint = axis, adjoint
        return getattr(axis, collective)(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return getattr(ctx.axis, ctx.adjoint)(grads[0]), None, None, None


class _ExchangeRows(torch.autograd.Function):
    """The autograd function of `exchange_rows`: backward exchanges the gradients of rows in the opposite direction."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ep: MeshAxis, send: list[int], receive: list[int]) -> torch.Tensor:
        ctx.ep, ctx.send, ctx.receive = ep, send, receive
        return _exchange_rows(x, ep, send, receive)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _exchange_rows(grads[0], ctx.ep, ctx.receive, ctx.send), None, None, None


def _exchange_rows(x: torch.Tensor, ep: MeshAxis, send: list[int], receive: list[int]) -> torch.Tensor:
    """Run the all-to-all of `exchange_rows` without autograd; the arguments are the same."""
    width = x.shape[-1]
    parts = [rows * width for rows in send], [rows * width for rows in receive]
    found = ep.exchange(x.contiguous().view(-1), *parts, of="tokens")
    # `Experts` returns this tensor. FSDP2 attaches a backward hook to a module's results, so they must not be views of
    # another tensor. `_unsafe_view` changes the shape without marking the result as a view.
    return torch.ops.aten._unsafe_view(found, (-1, width))


class _TakeRows(torch.autograd.Function):
    """The autograd function of `take_rows`: backward permutes rows back, and sums the copies of each row."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor, copies: int) -> torch.Tensor:
        ctx.save_for_backward(inverse)
        ctx.copies = copies
        return expert_rows.take(x, order, copies)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (inverse,), copies = ctx.saved_tensors, ctx.copies
        if copies == 1:
            return expert_rows.take(grads[0], inverse), None, None, None
        return expert_rows.combine(grads[0], inverse, copies=copies), None, None, None
