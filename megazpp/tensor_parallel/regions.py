"""The entries and exits of a tensor-parallel region for activations; forward and backward stand side by side.

Activations are [S, B, H] (sequence, batch, hidden), so that a slice of the sequence is contiguous.

| region                   | forward                     | backward                    |
|--------------------------|-----------------------------|-----------------------------|
| copy_to_region           | identity                    | all-reduce                  |
| reduce_from_region_      | all-reduce, in place        | identity                    |
| gather_sequence          | all-gather along S          | reduce-scatter along S      |
| reduce_scatter_sequence  | reduce-scatter along S      | all-gather along S          |
| exchange                 | all-to-all                  | all-to-all                  |
| collect_sequence         | all-gather along S          | this rank's slice           |

The last two are context parallelism's, on cp: ranks hold tokens of the whole model, but for attention, where they hold
heads of all tokens (Ulysses, arXiv 2309.14509); and all of them compute the same loss. Without sequence parallelism a
layer is copy ... reduce; with it, gather ... reduce_scatter: the same bytes. On an axis of size 1 every region returns
its argument.
"""

from __future__ import annotations

from typing import Any

import torch

from megazpp.parallel.axis import MeshAxis


def enter_region(x: torch.Tensor, tp: MeshAxis, *, sequence_parallel: bool) -> torch.Tensor:
    """[S, B, H] (or [S/T, B, H] with sequence parallelism) -> [S, B, H], the input of a column-parallel layer."""
    if tp.size == 1:
        return x
    return gather_sequence(x, tp) if sequence_parallel else copy_to_region(x, tp)


def leave_region(x: torch.Tensor, tp: MeshAxis, *, sequence_parallel: bool) -> torch.Tensor:
    """Partial sums [S, B, H], which it may overwrite -> sum [S, B, H] ([S/T, B, H] with sequence parallelism)."""
    if tp.size == 1:
        return x
    return reduce_scatter_sequence(x, tp) if sequence_parallel else reduce_from_region_(x, tp)


def copy_to_region(x: torch.Tensor, tp: MeshAxis) -> torch.Tensor:
    """Identity forward; backward sums the gradient over tp (1 all-reduce)."""
    return _Copy.apply(x, tp)


def reduce_from_region_(x: torch.Tensor, tp: MeshAxis) -> torch.Tensor:
    """Sum over tp forward (1 all-reduce), in place: `x` is contiguous and no leaf; identity backward."""
    return _Reduce.apply(x, tp)


def gather_sequence(x: torch.Tensor, tp: MeshAxis) -> torch.Tensor:
    """[S/T, ...] -> [S, ...]; backward sums and scatters (1 all-gather, 1 reduce-scatter)."""
    return _Gather.apply(x, tp)


def reduce_scatter_sequence(x: torch.Tensor, tp: MeshAxis) -> torch.Tensor:
    """Partial [S, ...] -> this rank's slice of the sum [S/T, ...]; backward gathers."""
    return _ReduceScatter.apply(x, tp)


def exchange(x: torch.Tensor, cp: MeshAxis) -> torch.Tensor:
    """[C, ...] -> [C, ...]: slice i goes to rank i, slice i of the result is rank i's (1 all-to-all, backward 1)."""
    return _Exchange.apply(x, cp)


def collect_sequence(x: torch.Tensor, cp: MeshAxis) -> torch.Tensor:
    """[S/C, ...] -> [S, ...]; backward is without a sum, as each rank has the same gradient (1 all-gather)."""
    return _Collect.apply(x, cp)


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, tp: MeshAxis) -> torch.Tensor:
        ctx.tp = tp
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        # a clone, because autograd may hand the same gradient to another branch
        return ctx.tp.all_reduce_(grads[0].clone(memory_format=torch.contiguous_format)), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, tp: MeshAxis) -> torch.Tensor:
        if torch.compiler.is_compiling():
            return tp.all_reduce_(x.clone())  # whether the clone can go, the compiler sees
        ctx.mark_dirty(x)
        return tp.all_reduce_(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, tp: MeshAxis) -> torch.Tensor:
        ctx.tp = tp
        return tp.all_gather(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.tp.reduce_scatter(grads[0]), None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, tp: MeshAxis) -> torch.Tensor:
        ctx.tp = tp
        return tp.reduce_scatter(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.tp.all_gather(grads[0]), None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cp: MeshAxis) -> torch.Tensor:
        ctx.cp = cp
        return cp.all_to_all(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.cp.all_to_all(grads[0]), None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cp: MeshAxis) -> torch.Tensor:
        ctx.cp = cp
        return cp.all_gather(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0].chunk(ctx.cp.size)[ctx.cp.rank], None
