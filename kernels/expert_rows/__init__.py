"""Permute the tokens of a mixture of experts: sort them by expert, copy them, and sum the experts' outputs.

A token is a vector of H elements. The router chooses K experts for each of N tokens, which gives N K rows: row t K + k
is the k-th choice of token t. Experts process the rows in an order in which the rows of each expert are adjacent.

Implementations: `triton` for CUDA tensors, with one or two kernels for each function, and `reference` for all others.
Both sort identically and use no atomic operations, so each of them reproduces its results bit for bit. Their sums
differ in rounding.
"""

from __future__ import annotations

from types import ModuleType

from torch import Tensor

import megazpp.kernels.expert_rows.reference as reference
from megazpp.kernels.expert_rows.reference import Sorted
from megazpp.kernels.triton_module import is_in_gpu_memory, triton_module

TRITON = triton_module(__name__)

__all__ = ["Sorted", "combine", "combine_backward", "sort_rows", "take"]


def sort_rows(experts: Tensor, num_experts: int) -> Sorted:
    """Sort the rows of a mixture of experts by expert, with the rows of an expert in their original order.

    Args:
        experts: [n] int64, contiguous, the expert of each of n rows, where a row is one of a token's choices.
        num_experts: number of experts E.
    Returns:
        The sorted order, its inverse, and the number of rows of each expert.
    """
    return _implementation(experts).sort_rows(experts, num_experts)


def take(x: Tensor, order: Tensor, copies: int = 1) -> Tensor:
    """Copy tokens of a mixture of experts into rows: row i of the result is row order[i] // copies of `x`.

    Args:
        x: [n / copies, H], contiguous, the tokens, vectors of H elements.
        order: [n] int64, for each of n rows the number of its choice; choice c belongs to token c // copies.
        copies: number of experts that each token has chosen.
    Returns:
        The rows, [n, H] in the dtype of `x`.
    """
    return _implementation(x).take(x, order, copies)


def combine(rows: Tensor, inverse: Tensor, weight: Tensor | None = None, copies: int = 1) -> Tensor:
    """Sum the outputs of the experts that each token has chosen, in fp32 and in the order of the choices.

    Args:
        rows: [N K, H] outputs of the experts, vectors of H elements, sorted by expert, contiguous.
        inverse: [N K] int64, index in `rows` of the output for each choice of each of N tokens.
        weight: [N, K] fp32, factors of the outputs, which are rounded to the dtype of `rows`; None for no factors.
        copies: number K of experts that each token has chosen.
    Returns:
        [N, H], rounded to the dtype of `rows`.
    """
    return _implementation(rows).combine(rows, inverse, weight, copies)


def combine_backward(
    grad: Tensor, rows: Tensor, order: Tensor, inverse: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the gradients of `combine`, the weighted sum of the experts' outputs for each token.

    Args:
        grad: [N, H] gradient of the sums of N tokens, vectors of H elements, contiguous.
        rows: [N K, H] outputs of the K experts of each token, sorted by expert, contiguous.
        order: [N K] int64, sorted order of the choices, from `sort_rows`.
        inverse: [N K] int64, inverse of `order`.
        weight: [N, K] fp32, factors of the outputs.
    Returns:
        The gradients of `rows` [N K, H] and of `weight` [N, K] fp32.
    """
    return _implementation(rows).combine_backward(grad, rows, order, inverse, weight)


def _implementation(tensor: Tensor) -> ModuleType:
    """Return the module that computes with this tensor: Triton's kernels for a CUDA tensor, otherwise PyTorch's code.

    PyTorch's code also serves empty tensors and FakeTensors, for which only the shapes of results matter.
    """
    return TRITON if TRITON is not None and is_in_gpu_memory(tensor) else reference
