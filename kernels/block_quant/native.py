"""Block quantization of CPU tensors in C: compiles native.c at first use, and calls its functions through ctypes.

The C functions take pointers, strides in bytes and the table of segments, so they work on strided views in place. A
call runs on one thread and releases Python's global interpreter lock. Concurrent calls share no state.

Letters in shapes: A, B: two leading dims of data and messages; K: number of messages that are summed per row;
n: elements of a row; M: bytes of a message.
"""

from __future__ import annotations

from ctypes import Structure, byref, c_float, c_int64, c_void_p
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from megazpp.kernels.block_quant.range_table import Feedback, RangeTable
from megazpp.kernels.c_library import find_c_library

library = partial(find_c_library, Path(__file__).with_name("native.c"))
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def pack(
    x: Tensor,
    table: RangeTable,
    messages: Tensor,
    errors: Feedback | None = None,
    base: Tensor | None = None,
    beta: float = 0.0,
) -> None:
    """Quantize A x B rows of n elements, x [A, B, n], into messages [A, B, M] of M bytes; see `block_quant.pack`."""
    library().functions.megazpp_pack(
        byref(_Shape(1, *x.shape[:2])),
        byref(_table(table)),
        byref(_data(x)),
        None if base is None else byref(_data(base)),
        byref(_messages(messages)),
        None if errors is None else byref(_table(errors.table)),
        None if errors is None else byref(_messages(errors.messages)),
        c_float(beta),
        c_float(1 - beta),
    )


def unpack_sum(messages: Tensor, table: RangeTable, out: Tensor, *, onto_quantized: bool, onto_exact: bool) -> None:
    """Dequantize K messages for each of A x B rows in C, and sum the K results into `out`.

    The messages are [K, A, B, M] with M bytes each, and `out` is [A, B, n] with rows of n elements.
    `reference.unpack_sum` defines the arguments.
    """
    library().functions.megazpp_unpack_sum(
        byref(_Shape(messages.shape[0], *out.shape[:2])),
        byref(_table(table)),
        byref(_messages(messages)),
        byref(_data(out)),
        c_int64(onto_quantized),
        c_int64(onto_exact),
    )


class _Shape(Structure):
    """The struct `shape` of native.c: the number K of messages per row, and the leading dims A and B of the rows."""

    _fields_ = [(name, c_int64) for name in ("k", "a", "b")]


class _Table(Structure):
    """The struct `table` of native.c: the segments of a row and their quantization format."""

    _fields_ = [("rows", c_void_p), *((name, c_int64) for name in ("num_rows", "bits", "block_size", "clip", "dtype"))]


class _Data(Structure):
    """The struct `data` of native.c: address, strides in bytes and dtype of a tensor of elements."""

    _fields_ = [("start", c_void_p), *((name, c_int64) for name in ("stride_a", "stride_b", "dtype"))]


class _Messages(Structure):
    """The struct `messages` of native.c: address and strides in bytes of a tensor of messages."""

    _fields_ = [("start", c_void_p), *((name, c_int64) for name in ("stride_k", "stride_a", "stride_b"))]


def _table(table: RangeTable) -> _Table:
    """Describe a table of segments as the struct `table` of native.c.

    If the table has no quantized segment, bits and block size are 0.
    """
    fmt = table.layout.fmt
    of_blocks = (0, 0, 0) if fmt is None else (fmt.bits, fmt.block_size, fmt.clip)
    assert of_blocks[0] in (0, 4, 8), f"native.c supports 4 and 8 bits, and would treat {of_blocks[0]} bits as 4"
    return _Table(table.address, table.num_ranges, *of_blocks, DTYPES[table.dtype])


def _data(x: Tensor) -> _Data:
    """Describe a tensor of elements, A x B rows of n elements [A, B, n], as the struct `data` of native.c."""
    size, strides = x.element_size(), x.stride()
    return _Data(x.data_ptr(), strides[0] * size, strides[1] * size, DTYPES[x.dtype])


def _messages(messages: Tensor) -> _Messages:
    """Describe messages [A, B, M] or [K, A, B, M] as the struct `messages` of native.c; without K, K's stride is 0."""
    return _Messages(messages.data_ptr(), *(0, *messages.stride()[:-1])[-3:])
