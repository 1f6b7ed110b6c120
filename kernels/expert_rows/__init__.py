"""Rows of experts: sort them by expert, copy tokens to them, and sum them back to tokens.

A token is a vector [H]. Each of its K choices of an expert is a row; row n K + k is the k-th choice of token n. Experts
process their rows in an order in which the rows of each expert are adjacent.

Implementations: `triton` for CUDA tensors, with one or two kernels for each function, and `reference` for all others.
They sort identically and without atomic operations, so two runs have the same bits. Their sums differ in rounding.
"""

from __future__ import annotations

from types import ModuleType

from torch import Tensor

import megazpp.kernels.expert_rows.reference as reference
from megazpp.kernels.expert_rows.formats import Sorted
from megazpp.kernels.triton_module import is_in_gpu_memory, triton_module

TRITON = triton_module(__name__)

__all__ = ["Sorted", "combine", "combine_backward", "sort_rows", "take"]


def sort_rows(experts: Tensor, num_experts: int) -> Sorted:
    """Sort rows by expert, with the rows of an expert in their original order.

    Args:
        experts: [n] int64, contiguous, the expert of each row.
        num_experts: number of experts E.
    """
    return _implementation(experts).sort_rows(experts, num_experts)


def take(x: Tensor, order: Tensor, copies: int = 1) -> Tensor:
    """Return rows [n, H] of `x` [n / copies, H]: row i of the result is row order[i] // copies of `x`.

    Args:
        x: contiguous.
        order: [n] int64.
        copies: number of rows of a token.
    """
    return _implementation(x).take(x, order, copies)


def combine(rows: Tensor, inverse: Tensor, weight: Tensor | None = None, copies: int = 1) -> Tensor:
    """Sum the rows of each token in fp32, in the order of its choices, and round the sum to their dtype.

    Args:
        rows: [N K, H] sorted by expert, contiguous.
        inverse: [N K] int64, place of each choice's row in `rows`.
        weight: [N, K] fp32 factors of the rows, which are rounded to the dtype of `rows`; None for no factors.
        copies: K.
    Returns:
        [N, H] in the dtype of `rows`.
    """
    return _implementation(rows).combine(rows, inverse, weight, copies)


def combine_backward(
    grad: Tensor, rows: Tensor, order: Tensor, inverse: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of `combine` with weights.

    Args:
        grad: [N, H] gradient of the sums, contiguous.
        rows: [N K, H] sorted by expert, contiguous.
        order: [N K] int64, see `Sorted`.
        inverse: [N K] int64, see `Sorted`.
        weight: [N, K] fp32.
    Returns:
        The gradients of the rows [N K, H] and of the weight [N, K] fp32.
    """
    return _implementation(rows).combine_backward(grad, rows, order, inverse, weight)


def _implementation(tensor: Tensor) -> ModuleType:
    """Return the module that computes on the tensor's device; tensors without memory only need shapes."""
    return TRITON if TRITON is not None and is_in_gpu_memory(tensor) else reference
