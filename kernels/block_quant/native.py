"""Block quantization on the CPU in C: native.c, compiled at first use, called without the interpreter's lock.

The C functions take pointers and strides in bytes, so any view that the public functions let through is computed on
where it lies. One call runs on one thread; calls on several threads share nothing.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from kernels.block_quant.feedback import Feedback, feedback_format
from kernels.c_library import CLibrary, CLibraryError, load_c_library
from kernels.formats import BlockFormat

SOURCE = Path(__file__).with_name("native.c")
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


@lru_cache(maxsize=1)
def library() -> CLibrary | CLibraryError:
    """The compiled functions, or why there are none."""
    try:
        return load_c_library(SOURCE)
    except CLibraryError as error:
        return error


def quantize(
    x: Tensor,
    fmt: BlockFormat,
    payload: Tensor,
    scales: Tensor,
    feedback: Feedback | None = None,
    base: Tensor | None = None,
    beta: float = 0.0,
) -> None:
    """Quantize x [A, B, n]; see `kernels.block_quant.quantize_blockwise`."""
    _functions().megazpp_quantize(
        _shape(1, x.shape, fmt),
        _data(x),
        None if base is None else _data(base),
        _segments(payload, scales, fmt),
        None if feedback is None else _segments(*feedback, feedback_format(fmt)),
        ctypes.c_float(beta),
        ctypes.c_float(1 - beta),
    )


def dequantize(payload: Tensor, scales: Tensor, fmt: BlockFormat, out: Tensor) -> None:
    """Dequantize into out [A, B, n]; see `kernels.block_quant.dequantize_blockwise`."""
    dequantize_sum(payload.unsqueeze(0), scales.unsqueeze(0), fmt, out, False)


def dequantize_sum(payload: Tensor, scales: Tensor, fmt: BlockFormat, out: Tensor, accumulate: bool) -> None:
    """Sum payload [K, A, B, bytes] over K into out [A, B, n]; see `kernels.block_quant.dequantize_sum`."""
    _functions().megazpp_dequantize_sum(
        _shape(payload.shape[0], out.shape, fmt),
        _segments(payload, scales, fmt),
        _data(out),
        ctypes.c_int64(accumulate),
    )


class _Shape(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("k", "a", "b", "n", "block_size")]


class _Data(ctypes.Structure):
    _fields_ = [("start", ctypes.c_void_p), *((name, ctypes.c_int64) for name in ("stride_a", "stride_b", "dtype"))]


class _Segments(ctypes.Structure):
    _fields_ = [
        ("payload", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("payload_k", "payload_a", "payload_b")),
        ("scales", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("scales_k", "scales_a", "scales_b", "bits")),
    ]


def _functions() -> ctypes.CDLL:
    loaded = library()
    if isinstance(loaded, CLibraryError):
        raise loaded
    return loaded.functions


def _shape(num_parts: int, data_shape: tuple[int, ...] | torch.Size, fmt: BlockFormat) -> ctypes._CArgObject:
    return ctypes.byref(_Shape(num_parts, *data_shape, fmt.block_size))


def _data(x: Tensor) -> ctypes._CArgObject:
    size = x.element_size()
    return ctypes.byref(_Data(x.data_ptr(), x.stride(0) * size, x.stride(1) * size, DTYPES[x.dtype]))


def _segments(payload: Tensor, scales: Tensor, fmt: BlockFormat) -> ctypes._CArgObject:
    """Segments [A, B] or [K, A, B]; K has stride 0 where it is missing."""
    strides = (0, *payload.stride()[:-1])[-3:]
    scale_strides = (2 * stride for stride in (0, *scales.stride()[:-1])[-3:])
    return ctypes.byref(_Segments(payload.data_ptr(), *strides, scales.data_ptr(), *scale_strides, fmt.bits))
