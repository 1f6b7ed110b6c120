"""The entries and exits of a tensor-parallel region for activations; forward and backward stand side by side.

Activations are [S, B, H] (sequence, batch, hidden), so that a slice of the sequence is contiguous.

| region                   | forward                     | backward                    |
|--------------------------|-----------------------------|-----------------------------|
| copy_to_region           | identity                    | all-reduce                  |
| reduce_from_region_      | all-reduce, in place        | identity                    |
| gather_sequence          | all-gather along S          | reduce-scatter along S      |
| reduce_scatter_sequence  | reduce-scatter along S      | all-gather along S          |
| exchange                 | all-to-all                  | all-to-all                  |
| exchange_rows            | all-to-all, unequal parts   | all-to-all, unequal parts   |
| collect_sequence         | all-gather along S          | this rank's slice           |

`exchange_rows` is expert parallelism's, on ep (model/moe.py). `exchange` and `collect_sequence` are context
parallelism's, on cp: ranks hold tokens of the whole model, but for attention, where they hold
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
    return ep.exchange(x.contiguous().view(-1), *parts, of="tokens").view(-1, width)


class _TakeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor, copies: int) -> torch.Tensor:
        ctx.save_for_backward(inverse)
        ctx.copies = copies
        return x[order // copies if copies > 1 else order]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        rows = grads[0][ctx.saved_tensors[0]]
        if ctx.copies > 1:
            rows = rows.view(-1, ctx.copies, rows.shape[-1]).sum(dim=1)
        return rows, None, None, None
