"""Sorting and combining a mixture of experts' rows on CUDA, in Triton; reference.py defines the results.

Sorting is a counting sort. One kernel counts the rows of each expert in each block of rows. The programs of a second
kernel, one per block, add up the counts of the blocks before their own. From these sums each program computes the
sorted positions of its rows. The host never waits.
"""
# Compile-time constants are upper case, as is usual in Triton. mypy has no types for the arguments of kernels, which
# are pointers and tensors on the device.
# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megazpp.kernels.expert_rows.reference import Sorted

# A program of the counting sort handles _BLOCK rows, and _CHUNK rows in each iteration of its loop.
_BLOCK, _CHUNK = 512, tl.constexpr(32)
_AT_ONCE = tl.constexpr(32)  # blocks of rows whose counts the second kernel of the sort adds up per iteration
_COLUMNS = 2048  # maximum elements of a token's vector that a program copies or sums per iteration
NUM_WARPS = 4


def sort_rows(experts: Tensor, num_experts: int) -> Sorted:
    """Sort the rows of a mixture of experts by expert, in Triton; see `expert_rows.sort_rows`."""
    size, device = len(experts), experts.device
    num_blocks, padded = triton.cdiv(size, _BLOCK), triton.next_power_of_2(num_experts)
    found = torch.empty(num_blocks, num_experts, dtype=torch.int32, device=device)
    order, inverse = torch.empty(2, size, dtype=torch.int64, device=device)
    counts = torch.empty(num_experts, dtype=torch.int64, device=device)
    ends = torch.empty(num_experts, dtype=torch.int32, device=device)
    shape = {"EXPERTS": padded, "BLOCK": _BLOCK, "num_warps": NUM_WARPS}
    _count_kernel[(num_blocks,)](experts, found, size, num_experts, **shape)
    _place_kernel[(num_blocks,)](experts, found, order, inverse, counts, ends, size, num_blocks, num_experts, **shape)
    return Sorted(order, inverse, counts, ends)


def take(x: Tensor, order: Tensor, copies: int) -> Tensor:
    """Copy tokens into rows that are sorted by expert, in Triton; see `expert_rows.take`."""
    x, width = x.contiguous(), x.shape[-1]
    rows = torch.empty(len(order), width, dtype=x.dtype, device=x.device)
    _take_kernel[(len(order),)](x, order, rows, copies, **_columns(width))
    return rows


def combine(rows: Tensor, inverse: Tensor, weight: Tensor | None, copies: int) -> Tensor:
    """Sum the outputs of each token's experts, in Triton; see `expert_rows.combine`."""
    rows, width = rows.contiguous(), rows.shape[-1]
    total = torch.empty(len(inverse) // copies, width, dtype=rows.dtype, device=rows.device)
    factors = inverse if weight is None else weight  # without WEIGHTED the kernel does not read this argument
    _combine_kernel[(len(total),)](
        *(rows, inverse, factors, total), COPIES=copies, WEIGHTED=weight is not None, **_columns(width)
    )
    return total


def combine_backward(
    grad: Tensor, rows: Tensor, order: Tensor, inverse: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of `combine` for rows and weight, in Triton; see `expert_rows.combine_backward`."""
    of_rows, of_weight = torch.empty_like(rows), torch.empty_like(weight)
    data = (grad.contiguous(), rows, order, weight, of_rows, of_weight)
    _combine_backward_kernel[(len(rows),)](*data, weight.shape[1], **_columns(rows.shape[-1]))
    return of_rows, of_weight


def _columns(width: int) -> dict[str, int]:
    """Return keyword arguments of kernels that process tokens of `width` elements: WIDTH, COLUMNS and `num_warps`.

    COLUMNS is the number of elements per iteration, a power of two.
    """
    columns = min(triton.next_power_of_2(width), _COLUMNS)
    return {"WIDTH": width, "COLUMNS": columns, "num_warps": max(1, min(NUM_WARPS, columns // 256))}


@triton.jit
def _count_kernel(experts, found, size, num_experts, EXPERTS: tl.constexpr, BLOCK: tl.constexpr):
    """Count the rows of each expert in one block of rows, for the counting sort of `sort_rows`.

    `found` [number of blocks, number of experts] receives the counts, from which `_place_kernel` computes positions.
    """
    first, numbers = tl.program_id(0).to(tl.int64) * BLOCK, tl.arange(0, EXPERTS)
    counts = tl.zeros((EXPERTS,), tl.int32)
    for start in range(0, BLOCK, _CHUNK):
        index = first + start + tl.arange(0, _CHUNK)
        expert = tl.load(experts + index, mask=index < size, other=-1).to(tl.int32)
        counts += tl.sum((expert[:, None] == numbers[None, :]).to(tl.int32), axis=0)
    tl.store(found + tl.program_id(0) * num_experts + numbers, counts, mask=numbers < num_experts)


@triton.jit
def _place_kernel(
    experts, found, order, inverse, counts, ends, size, num_blocks, num_experts,
    EXPERTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute the sorted positions of one block of rows: write them into `inverse`, and the row numbers into `order`.

    The first program also writes the number of rows of each expert in all blocks, and its cumulative sum.
    """
    own, numbers = tl.program_id(0), tl.arange(0, EXPERTS)
    total, before = tl.zeros((EXPERTS,), tl.int32), tl.zeros((EXPERTS,), tl.int32)
    # ---- count the rows of each expert in all blocks (`total`), and in the blocks before this program's (`before`)
    first = 0
    while first < num_blocks:  # not `for`: Triton 3.6's interpreter does not support a kernel argument as a range's end
        block = first + tl.arange(0, _AT_ONCE)
        inside = (block < num_blocks)[:, None] & (numbers < num_experts)[None, :]
        each = tl.load(found + block[:, None] * num_experts + numbers[None, :], mask=inside, other=0)
        total += tl.sum(each, axis=0)
        before += tl.sum(tl.where(block[:, None] < own, each, 0), axis=0)
        first += _AT_ONCE
    end = tl.cumsum(total, axis=0)
    if own == 0:
        tl.store(counts + numbers, total.to(tl.int64), mask=numbers < num_experts)
        tl.store(ends + numbers, end, mask=numbers < num_experts)
    # ---- compute the sorted position of each row: the first free position of its expert, plus the number of this
    # expert's earlier rows in the same iteration
    place = end - total + before
    for start in range(0, BLOCK, _CHUNK):
        index = own.to(tl.int64) * BLOCK + start + tl.arange(0, _CHUNK)
        expert = tl.load(experts + index, mask=index < size, other=-1).to(tl.int32)
        chosen = (expert[:, None] == numbers[None, :]).to(tl.int32)
        earlier = tl.cumsum(chosen, axis=0) - chosen
        to = tl.sum(chosen * (place[None, :] + earlier), axis=1).to(tl.int64)
        tl.store(inverse + index, to, mask=index < size)
        tl.store(order + to, index, mask=index < size)
        place += tl.sum(chosen, axis=0)


@triton.jit
def _take_kernel(x, order, rows, copies, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """Copy the vector of one token into one row for an expert.

    Each token has chosen `copies` experts, so row i gets the vector of token order[i] // copies.
    """
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(order + row) // copies
    for start in range(0, WIDTH, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        values = tl.load(x + token * WIDTH + column, mask=column < WIDTH)
        tl.store(rows + row * WIDTH + column, values, mask=column < WIDTH)


@triton.jit
def _combine_kernel(
    rows, inverse, weight, total,
    COPIES: tl.constexpr, WEIGHTED: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Sum the outputs of one token's experts; with WEIGHTED each output is multiplied by its factor first."""
    token = tl.program_id(0).to(tl.int64)
    for start in range(0, WIDTH, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        found = tl.zeros((COLUMNS,), tl.float32)
        for k in tl.static_range(COPIES):
            place = tl.load(inverse + token * COPIES + k)
            values = tl.load(rows + place * WIDTH + column, mask=column < WIDTH, other=0.0).to(tl.float32)
            if WEIGHTED:
                factor = tl.load(weight + token * COPIES + k)
                values *= factor.to(rows.dtype.element_ty).to(tl.float32)
            found += values
        tl.store(total + token * WIDTH + column, found, mask=column < WIDTH)


@triton.jit
def _combine_backward_kernel(
    grad, rows, order, weight, of_rows, of_weight, copies, WIDTH: tl.constexpr, COLUMNS: tl.constexpr
):
    """Compute two gradients for one row, an expert's output for a token: of the row, and of the factor of the row."""
    row = tl.program_id(0).to(tl.int64)
    choice = tl.load(order + row)
    token = choice // copies
    factor = tl.load(weight + choice).to(rows.dtype.element_ty).to(tl.float32)
    products = tl.zeros((COLUMNS,), tl.float32)
    for start in range(0, WIDTH, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        above = tl.load(grad + token * WIDTH + column, mask=column < WIDTH, other=0.0).to(tl.float32)
        values = tl.load(rows + row * WIDTH + column, mask=column < WIDTH, other=0.0).to(tl.float32)
        products += above * values
        tl.store(of_rows + row * WIDTH + column, above * factor, mask=column < WIDTH)
    tl.store(of_weight + choice, tl.sum(products))
