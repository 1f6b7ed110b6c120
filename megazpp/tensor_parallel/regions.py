"""Entries and exits of tensor-parallel regions: collectives on activations in forward and their adjoints in backward.

Activations are [S, B, H] (sequence, batch, hidden), so that a slice of the sequence is contiguous. T is the size of the
axis tp, C the size of the axis cp.

| region                   | forward                     | backward                    |
|--------------------------|-----------------------------|-----------------------------|
| copy_to_region           | identity                    | all-reduce                  |
| reduce_from_region_      | all-reduce, in place        | identity                    |
| gather_sequence          | all-gather along S          | reduce-scatter along S      |
| reduce_scatter_sequence  | reduce-scatter along S      | all-gather along S          |
| exchange                 | all-to-all                  | all-to-all                  |
| exchange_rows            | all-to-all, unequal parts   | all-to-all, unequal parts   |
| collect_sequence         | all-gather along S          | this rank's slice           |

Without sequence parallelism a layer's region is copy_to_region ... reduce_from_region_. With sequence parallelism it is
gather_sequence ... reduce_scatter_sequence, which sends the same number of bytes.

`exchange_rows` is for expert parallelism: it sends tokens to the ranks of their experts and back (model/moe.py).

`exchange` and `collect_sequence` are for context parallelism (Ulysses, arXiv 2309.14509). Each rank holds some of the
tokens, except in attention, where it holds some of the heads for all tokens: `exchange` switches between the two. All
ranks of a cp group compute the same loss, so the backward of `collect_sequence` needs no sum.

On an axis of size 1, every function returns its argument.
"""

from __future__ import annotations

from typing import Any

import torch

from megazpp.kernels import expert_rows
from megazpp.parallel.axis import MeshAxis


def enter_region(x: torch.Tensor, tp: MeshAxis, *, sequence_parallel: bool) -> torch.Tensor:
    """Return the input [S, B, H] of a column-parallel layer from x, [S, B, H] or a slice [S/T, B, H] of the sequence.

    Args:
        x: activations outside the region.
        tp: tensor-parallel axis.
        sequence_parallel: True if x is this rank's slice of the sequence.
    """
    if tp.size == 1:
        return x
    return gather_sequence(x, tp) if sequence_parallel else copy_to_region(x, tp)


def leave_region(x: torch.Tensor, tp: MeshAxis, *, sequence_parallel: bool) -> torch.Tensor:
    """Sum the output of a row-parallel layer over tp.

    Args:
        x: [S, B, H] this rank's partial sums. They may be overwritten.
        tp: tensor-parallel axis.
        sequence_parallel: True returns only this rank's slice of the sequence.
    Returns:
        The sum, [S, B, H], or [S/T, B, H] with sequence parallelism.
    """
    if tp.size == 1:
        return x
    return reduce_scatter_sequence(x, tp) if sequence_parallel else reduce_from_region_(x, tp)


def copy_to_region(x: torch.Tensor, tp: MeshAxis) -> torch.Tensor:
    """Return x unchanged. Backward sums the gradient over tp (1 all-reduce)."""
    return _Copy.apply(x, tp)


def reduce_from_region_(x: torch.Tensor, tp: MeshAxis) -> torch.Tensor:
    """Sum x over tp in place (1 all-reduce). Backward is the identity.

    x must be contiguous and must not be an autograd leaf.
    """
    return _Reduce.apply(x, tp)


def gather_sequence(x: torch.Tensor, tp: MeshAxis) -> torch.Tensor:
    """Gather slices [S/T, ...] to [S, ...] (1 all-gather). Backward reduce-scatters the gradient (1 reduce-scatter)."""
    return _Collective.apply(x, tp, "all_gather", "reduce_scatter")


def reduce_scatter_sequence(x: torch.Tensor, tp: MeshAxis) -> torch.Tensor:
    """Sum x, [S, ...], over tp and return this rank's slice [S/T, ...] (1 reduce-scatter). Backward: 1 all-gather."""
    return _Collective.apply(x, tp, "reduce_scatter", "all_gather")


def exchange(x: torch.Tensor, cp: MeshAxis) -> torch.Tensor:
    """Send slice i of x, [C, ...], to rank i, and return [C, ...] whose slice i came from rank i (1 all-to-all).

    Backward sends the gradients back (1 all-to-all).
    """
    return _Collective.apply(x, cp, "all_to_all", "all_to_all")


def collect_sequence(x: torch.Tensor, cp: MeshAxis) -> torch.Tensor:
    """Gather slices [S/C, ...] to [S, ...] (1 all-gather).

    Backward returns this rank's slice of the gradient without a sum, because all ranks compute the same gradient.
    """
    return _Collect.apply(x, cp)


def exchange_rows(x: torch.Tensor, ep: MeshAxis, send: list[int], receive: list[int]) -> torch.Tensor:
    """[sum(send), H] -> [sum(receive), H]: send[i] rows to rank i, receive[i] from it (1 all-to-all, backward 1)."""
    return _ExchangeRows.apply(x, ep, send, receive)


def take_rows(x: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor, *, copies: int = 1) -> torch.Tensor:
    """[n, H] -> [n copies, H]: row i of the result is row order[i] // copies of x; no collective.

    Backward takes rows by the inverse permutation and adds the copies of a row up, without atomics: two runs have the
    same bits.
    """
    return _TakeRows.apply(x, order, inverse, copies)


class _Copy(torch.autograd.Function):
    """The autograd function of `copy_to_region`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, tp: MeshAxis) -> torch.Tensor:
        ctx.tp = tp
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        # The all-reduce works in place on a clone, because autograd may pass the same gradient to another branch.
        return ctx.tp.all_reduce_(grads[0].clone(memory_format=torch.contiguous_format)), None


class _Reduce(torch.autograd.Function):
    """The autograd function of `reduce_from_region_`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, tp: MeshAxis) -> torch.Tensor:
        if torch.compiler.is_compiling():
            return tp.all_reduce_(x.clone())  # the compiler removes the clone if it can
        ctx.mark_dirty(x)
        return tp.all_reduce_(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


class _Collective(torch.autograd.Function):
    """A collective of an axis, and its adjoint for the gradient; both are names of methods of `MeshAxis`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: MeshAxis, collective: str, adjoint: str) -> Any:
        ctx.axis, ctx.adjoint = axis, adjoint
        return getattr(axis, collective)(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return getattr(ctx.axis, ctx.adjoint)(grads[0]), None, None, None


class _Collect(torch.autograd.Function):
    """The autograd function of `collect_sequence`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cp: MeshAxis) -> torch.Tensor:
        ctx.cp = cp
        return cp.all_gather(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0].chunk(ctx.cp.size)[ctx.cp.rank], None


class _ExchangeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ep: MeshAxis, send: list[int], receive: list[int]) -> torch.Tensor:
        ctx.ep, ctx.send, ctx.receive = ep, send, receive
        return _exchange_rows(x, ep, send, receive)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _exchange_rows(grads[0], ctx.ep, ctx.receive, ctx.send), None, None, None


def _exchange_rows(x: torch.Tensor, ep: MeshAxis, send: list[int], receive: list[int]) -> torch.Tensor:
    width = x.shape[-1]
    parts = [rows * width for rows in send], [rows * width for rows in receive]
    found = ep.exchange(x.contiguous().view(-1), *parts, of="tokens")
    return torch.ops.aten._unsafe_view(found, (-1, width))  # the result of a unit must not be a view, see `Experts`


class _TakeRows(torch.autograd.Function):
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
