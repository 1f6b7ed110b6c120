"""Sorting and combining a mixture of experts' rows in plain PyTorch: the definition, which also serves CPUs."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Sorted(NamedTuple):
    """An order of n rows in which the rows of each expert are adjacent. A row is one token's choice of an expert.

    Attributes:
        order: [n] int64, the numbers of the rows, sorted by expert; rows of the same expert have ascending numbers.
        inverse: [n] int64, the inverse permutation: the index in `order` at which each row's number is.
        counts: [E] int64, number of rows of each of E experts.
        ends: [E] int32, cumulative sum of `counts`, as torch's grouped matrix product expects it.
    """

    order: Tensor
    inverse: Tensor
    counts: Tensor
    ends: Tensor


def sort_rows(experts: Tensor, num_experts: int) -> Sorted:
    """Sort the rows of a mixture of experts by expert, with PyTorch; see `expert_rows.sort_rows`."""
    order = experts.argsort(stable=True)
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    counts = torch.zeros(num_experts, dtype=torch.int64, device=experts.device)
    counts.scatter_add_(0, experts, torch.ones_like(experts))
    return Sorted(order, inverse, counts, counts.cumsum(dim=0).int())


def take(x: Tensor, order: Tensor, copies: int) -> Tensor:
    """Copy tokens into rows that are sorted by expert, with PyTorch; see `expert_rows.take`."""
    return x.index_select(0, order // copies if copies > 1 else order)  # faster than indexing on CPUs


def combine(rows: Tensor, inverse: Tensor, weight: Tensor | None, copies: int) -> Tensor:
    """Sum the outputs of each token's experts, with PyTorch; see `expert_rows.combine`."""
    found = rows.index_select(0, inverse).view(-1, copies, rows.shape[-1])
    if weight is None:
        return found.sum(dim=1)
    return torch.bmm(weight.to(rows.dtype).unsqueeze(1), found).squeeze(1)


def combine_backward(
    grad: Tensor, rows: Tensor, order: Tensor, inverse: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of `combine` for rows and weight, with PyTorch; see `expert_rows.combine_backward`."""
    found = rows.index_select(0, inverse).view(*weight.shape, rows.shape[-1])
    of_weight = torch.bmm(found, grad.unsqueeze(2)).squeeze(2).to(weight.dtype)
    factors = weight.to(rows.dtype).flatten()[order].unsqueeze(1)
    return grad.index_select(0, order // weight.shape[1]).mul_(factors), of_weight
