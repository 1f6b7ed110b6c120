"""Block quantization of segments: what is checked, and who computes it.

A segment is n consecutive elements; its quantized form is `payload` (uint8) and `scales` (bf16), see
`kernels.formats.BlockFormat`. Every tensor may be a strided view whose last dim is contiguous, with up to two leading
dims: the hops' permutation ([N, L, S] to [L, N, message]) is the strides of the views handed in, so nothing is copied
before or after, and payload, scales and unquantized data can lie in one message per peer. Data may start anywhere;
starts and strides that are multiples of 16 bytes are faster on CUDA.

Three implementations agree bit for bit: `native` (C, on the CPU), `triton` (CUDA) and `reference` (readable torch). The
reference also computes on a CPU without a C compiler: C is 3 to 11 times as fast there (one thread of an EPYC,
tools/benchmarks/benchmark_kernels.py with and without CC=none). `shapes` stands in for all of them on tensors that have
no memory.
Non-finite numbers travel: a block that holds a NaN or an Inf is sent as scale NaN, integers 0, and all of it comes back
as NaN. A block whose scale would be subnormal (all of it below about 1e-36) is sent as zeros.
"""

from __future__ import annotations

import importlib.util
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

import kernels.block_quant.native as native
import kernels.block_quant.reference as reference
import kernels.block_quant.shapes as shapes
from kernels.block_quant.feedback import Feedback, feedback_format, rescale_
from kernels.c_library import CLibraryError
from kernels.formats import BlockFormat

if importlib.util.find_spec("triton") is not None:
    import kernels.block_quant.triton as _triton

    TRITON: ModuleType | None = _triton
else:
    TRITON = None

__all__ = [
    "Feedback",
    "KernelBackend",
    "backend",
    "dequantize_blockwise",
    "dequantize_sum",
    "feedback_format",
    "quantize_blockwise",
    "rescale_",
]

DATA_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def quantize_blockwise(
    x: Tensor,
    fmt: BlockFormat,
    *,
    payload: Tensor,
    scales: Tensor,
    feedback: Feedback | None = None,
    beta: float = 0.0,
    base: Tensor | None = None,
) -> None:
    """Quantize every segment of `x`, or of its difference from `base`, into `payload` and `scales`.

    Args:
        x: [..., n] fp32, bf16 or fp16; any n.
        payload: [..., fmt.payload_bytes(n)] uint8, written.
        scales: [..., fmt.num_blocks(n)] bf16, written.
        feedback: the error of the last step; it is added to x before, and holds the new error after.
        beta: share of what feedback held before in what it holds after (LoCo's moving average); the rest is the new
            error's. 0 <= beta < 1.
        base: [..., n] fp32, bf16 or fp16, whatever the dtype of x; float(x) - float(base) is what is quantized. A
            receiver that has `base` adds the message to it with `dequantize_sum(..., accumulate=True)`. Without
            feedback: a base that receives what it sent holds the errors already.
    Errors:
        int8: |x - dequantized| <= scale / 2 (1 + 2^-15). int4: the same, but for elements of the sign opposite to the
        block's largest and more than 7.5/8 of it in size: they are clipped to 7 |scale|, at most 1.032 |scale| away.
        int2: the same, but for those of more than 1.5/2 of it: clipped to |scale|, at most 1.008 |scale| away.
    Raises:
        ValueError: a shape, dtype, stride or device does not fit, or there are both feedback and base.
    Source: ZeRO++ section 3.1 and 3.3 (qwZ, qgZ); rounding is half to even.
    """
    implementation = _implementation("quantize_blockwise", x)
    lead, n = x.shape[:-1], x.shape[-1]
    _check_data("x", x)
    _check_segments(fmt, lead, n, x.device, payload=payload, scales=scales)
    if feedback is not None:
        _check_feedback(feedback, fmt, lead, n, x.device)
        feedback = Feedback(*(_two_leads(part) for part in feedback))
    if base is not None:
        if feedback is not None:
            raise ValueError("a difference from a base is quantized without feedback")
        _check_data("base", base)
        if base.shape != x.shape or base.device != x.device:
            raise ValueError(f"base is {tuple(base.shape)} on {base.device}, but x is {tuple(x.shape)} on {x.device}")
        base = _two_leads(base)
    if x.numel():
        implementation.quantize(_two_leads(x), fmt, _two_leads(payload), _two_leads(scales), feedback, base, beta)


def dequantize_blockwise(payload: Tensor, scales: Tensor, fmt: BlockFormat, *, out: Tensor) -> None:
    """Dequantize every segment into `out`: integer times scale, in fp32, rounded once to the dtype of `out`.

    Args:
        payload, scales: as `quantize_blockwise` wrote them.
        out: [..., n] fp32, bf16 or fp16, written.
    Raises:
        ValueError: a shape, dtype, stride or device does not fit.
    """
    implementation = _implementation("dequantize_blockwise", out)
    _check_data("out", out)
    _check_segments(fmt, out.shape[:-1], out.shape[-1], out.device, payload=payload, scales=scales)
    if out.numel():
        implementation.dequantize(_two_leads(payload), _two_leads(scales), fmt, _two_leads(out))


def dequantize_sum(payload: Tensor, scales: Tensor, fmt: BlockFormat, *, out: Tensor, accumulate: bool = False) -> None:
    """Dequantize K segments and sum them, in the order 0..K-1, in fp32.

    With K = 1 and `accumulate` this is the receiving half of a difference (`base` of `quantize_blockwise`):
    out = round(float(out) + integer * scale), in one pass. The product is exact, so every receiver that held the same
    bits holds the same bits after it; an element that is NaN, or that a NaN arrives for, stays NaN.

    Args:
        payload: [K, ..., fmt.payload_bytes(n)] uint8.
        scales: [K, ..., fmt.num_blocks(n)] bf16.
        out: [..., n] fp32, bf16 or fp16, written (rounded once).
        accumulate: start from what is in `out` instead of from segment 0.
    Raises:
        ValueError: K is 0, or a shape, dtype, stride or device does not fit.
    """
    implementation = _implementation("dequantize_sum", out)
    _check_data("out", out)
    lead = (_num_summands(payload), *out.shape[:-1])
    _check_segments(fmt, lead, out.shape[-1], out.device, payload=payload, scales=scales)
    if out.numel():
        implementation.dequantize_sum(
            _two_leads(payload, after=1), _two_leads(scales, after=1), fmt, _two_leads(out), accumulate
        )


class KernelBackend(NamedTuple):
    """A row of the table of back ends."""

    piece: str
    implementation: str
    why: str


def backend(device_type: str) -> KernelBackend:
    """Which implementation block quantization uses on tensors of this device type ("cpu", "cuda").

    For the CPU, this compiles native.c unless it was compiled before.

    Raises:
        ValueError: there is none.
    """
    if device_type == "cpu":
        library = native.library()
        if isinstance(library, CLibraryError):
            return KernelBackend(
                "block quantization", "the reference in torch", f"{library}; compiled C is 3 to 11 times as fast"
            )
        return KernelBackend("block quantization", f"C, compiled by {library.compiler}", "CPU tensors")
    if device_type == "cuda" and TRITON is not None:
        return KernelBackend("block quantization", f"Triton {TRITON.VERSION}", "CUDA tensors")
    if device_type == "cuda":
        raise ValueError("block quantization of CUDA tensors needs Triton: pip install triton")
    raise ValueError(f"block quantization has no implementation for {device_type} tensors")


def _implementation(function: str, tensor: Tensor) -> ModuleType:
    device_type = tensor.device.type
    if isinstance(tensor, FakeTensor):
        return shapes
    if device_type == "cpu":
        return reference if isinstance(native.library(), CLibraryError) else native
    if device_type == "cuda" and TRITON is not None:
        return TRITON
    backend(device_type)
    raise AssertionError(f"{function}: back end {device_type} exists but has no module")


def _num_summands(payload: Tensor) -> int:
    if payload.ndim < 2 or payload.shape[0] == 0:
        raise ValueError(f"payload {tuple(payload.shape)} has nothing to sum: expected [K, ..., bytes] with K >= 1")
    return payload.shape[0]


def _check_data(name: str, x: Tensor) -> None:
    if x.dtype not in DATA_DTYPES:
        raise ValueError(f"{name} is {x.dtype}; expected fp32, bf16 or fp16")
    _check_rows(name, x, max_leads=2)


def _check_segments(
    fmt: BlockFormat, lead: tuple[int, ...], n: int, device: torch.device, **payload_and_scales: Tensor
) -> None:
    """Check the two tensors, payload first, of segments of n elements in `fmt`."""
    sizes = (fmt.payload_bytes(n), torch.uint8), (fmt.num_blocks(n), torch.bfloat16)
    for (name, tensor), (size, dtype) in zip(payload_and_scales.items(), sizes, strict=True):
        if tensor.dtype != dtype or tensor.shape != (*lead, size) or tensor.device != device:
            raise ValueError(
                f"{name} is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}; segments of {n} elements in {fmt}"
                f" need {dtype} {(*lead, size)} on {device}"
            )
        _check_rows(name, tensor, max_leads=3)


def _check_feedback(feedback: Feedback, fmt: BlockFormat, lead: tuple[int, ...], n: int, device: torch.device) -> None:
    parts = {"feedback.payload": feedback.payload, "feedback.scales": feedback.scales}
    _check_segments(feedback_format(fmt), lead, n, device, **parts)


def _check_rows(name: str, x: Tensor, *, max_leads: int) -> None:
    if not 1 <= x.ndim <= max_leads + 1:
        raise ValueError(f"{name} {tuple(x.shape)} has {x.ndim} dims; expected 1 to {max_leads + 1}")
    if x.shape[-1] > 1 and x.stride(-1) != 1:
        raise ValueError(f"{name} {tuple(x.shape)} has stride {x.stride(-1)} in its last dim; it must be contiguous")


def _two_leads(x: Tensor, *, after: int = 0) -> Tensor:
    """View [after dims.., A, B, last] of [after dims.., leads.., last]."""
    while x.ndim < after + 3:
        x = x.unsqueeze(after)
    return x
