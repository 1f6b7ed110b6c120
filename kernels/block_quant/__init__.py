"""Block quantization of messages: the public functions, their checks, and the choice of an implementation.

Each row of data [n] is packed into a message of bytes [M]. A `RangeTable` lists the segments of a row: which elements
are quantized in blocks, which are copied unquantized, and where their bytes are in the message (formats.py). One call
handles all segments of all rows, with one kernel launch on CUDA.

Data and messages may be strided views with a contiguous last dim and up to two leading dims. Permuted strides express
the reordering in two-hop collectives, [N, L, S] to [L, N, M], without copies. Data may start at any element; starts and
strides that are multiples of 16 bytes are faster on CUDA. Bytes of a message that no segment uses are not written.

Three implementations agree bit for bit: `native` (C, for CPU tensors), `triton` (for CUDA tensors) and `reference`
(plain torch, which also serves CPUs without a C compiler). C is 3 to 11 times as fast as the reference (one thread of
an EPYC, tools/benchmarks/benchmark_kernels.py with and without CC=none). Tensors without memory (FakeTensor) are only
checked.

A block that contains a NaN or Inf is sent with scale NaN and integers 0, so all of it is unpacked as NaN. A block whose
scale would be subnormal (all magnitudes below about 1e-36) is sent as zeros.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

import megazpp.kernels.block_quant.native as native
import megazpp.kernels.block_quant.reference as reference
from megazpp.kernels.block_quant.range_table import Feedback, RangeTable, range_table, rescale_
from megazpp.kernels.triton_module import triton_module

TRITON = triton_module(__name__)

__all__ = ["Feedback", "backend", "pack", "range_table", "rescale_", "unpack", "unpack_onto", "unpack_sum"]

MESSAGE_ALIGNMENT = 4  # bytes of the widest dtype that is sent unquantized, fp32
DATA_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def pack(
    x: Tensor,
    table: RangeTable,
    *,
    messages: Tensor,
    errors: Feedback | None = None,
    beta: float = 0.0,
    base: Tensor | None = None,
) -> None:
    """Pack every row of `x` into its message.

    Args:
        x: [..., n] fp32, bf16 or fp16; n is the size of the table's layout.
        table: the segments of a row, from `range_table`.
        messages: [..., M] uint8, written.
        errors: quantization errors of the last messages, from `Feedback.zeros` at first. They are added to the elements
            that are quantized, and replaced by the new errors.
        beta: weight of the earlier errors in the errors that replace them (LoCo's moving average); 0 <= beta < 1.
        base: [..., n] fp32, bf16 or fp16 that the receivers hold; its dtype may differ from x. Quantized elements are
            float(x) - float(base), the others are x. Receivers unpack with `unpack_onto`. It cannot be combined with
            `errors`: rounding errors are part of the next difference anyway.
    Errors:
        |x - dequantized| <= |scale| / 2 (1 + 2^-15), except for elements that a format with `clip` clips.
    Raises:
        ValueError: a shape, dtype, stride or device does not match, or both errors and base are given.
    Source: ZeRO++ sections 3.1 and 3.3 (qwZ, qgZ). Rounding is half to even.
    """
    # ---- repeat an equal launch without checks
    implementation = _implementation(x)
    given = [x, messages, *(() if errors is None else (errors.messages,)), *(() if base is None else (base,))]
    launch = _launch_of(implementation, given, None if errors is None else errors.table, float(beta))
    if _repeated(table, launch, given):
        return

    # ---- check the arguments
    _check_data("x", x, table)
    lead = x.shape[:-1]
    _check_messages("messages", messages, lead, table, x.device)
    if errors is not None:
        if errors.table is not table.of_errors:
            raise ValueError(f"errors belongs to messages of another layout; expected the layout {table.layout}")
        if base is not None:
            raise ValueError("errors and base are both given: a difference from a base needs no error feedback")
        _check_messages("errors", errors.messages, lead, errors.table, x.device)
        errors = Feedback(_two_leads(errors.messages), errors.table)
    if base is not None:
        _check_data("base", base, table)
        if base.shape != x.shape or base.device != x.device:
            raise ValueError(f"base is {tuple(base.shape)} on {base.device}, but x is {tuple(x.shape)} on {x.device}")
        base = _two_leads(base)

    # ---- compute
    if x.numel() and implementation is not None:
        repeat = implementation.pack(_two_leads(x), table, _two_leads(messages), errors, base, float(beta))
        if launch is not None and repeat is not None:
            table.repeats[launch] = repeat


def unpack(messages: Tensor, table: RangeTable, *, out: Tensor) -> None:
    """Unpack messages into the rows of `out`: integer times scale in fp32, rounded once to the dtype of `out`.

    Args:
        messages: [..., M] uint8, written by `pack`.
        table: the segments of a row, as for `pack`.
        out: [..., n] fp32, bf16 or fp16, written.
    Raises:
        ValueError: a shape, dtype, stride or device does not match.
    """
    _unpack(messages.unsqueeze(0), table, out, onto_quantized=False, onto_exact=False)


def unpack_onto(messages: Tensor, table: RangeTable, *, out: Tensor) -> None:
    """Unpack messages that `pack` made with a `base`, onto that base in `out`.

    Quantized elements become round(float(out) + integer * scale), in one pass; unquantized elements are replaced. The
    product is exact, so receivers that held the same bits hold the same bits afterwards. An element that is NaN, or for
    which a NaN arrives, is NaN afterwards.

    Args:
        messages: [..., M] uint8, written by `pack`.
        table: the segments of a row, as for `pack`.
        out: [..., n] fp32, bf16 or fp16, updated in place.
    Raises:
        ValueError: a shape, dtype, stride or device does not match.
    """
    _unpack(messages.unsqueeze(0), table, out, onto_quantized=True, onto_exact=False)


def unpack_sum(messages: Tensor, table: RangeTable, *, out: Tensor, accumulate: bool = False) -> None:
    """Unpack K messages per row and sum them in fp32, in the order 0..K-1.

    Args:
        messages: [K, ..., M] uint8.
        table: the segments of a row, as for `pack`.
        out: [..., n] fp32, bf16 or fp16, written and rounded once.
        accumulate: whether the sum starts with the values in `out`.
    Raises:
        ValueError: K is 0, or a shape, dtype, stride or device does not match.
    """
    if messages.ndim < 2 or messages.shape[0] == 0:
        raise ValueError(f"messages {tuple(messages.shape)} cannot be summed; expected [K, ..., bytes] with K >= 1")
    _unpack(messages, table, out, onto_quantized=accumulate, onto_exact=accumulate)


def _unpack(messages: Tensor, table: RangeTable, out: Tensor, **onto: bool) -> None:
    """Check the arguments of an unpacking function and compute it.

    Args:
        messages: [K, ..., M] uint8.
        table: the segments of a row.
        out: [..., n], written.
        onto: `onto_quantized` and `onto_exact`, whether `out` is added to for quantized and for unquantized elements.
    """
    implementation, given = _implementation(out), (messages, out)
    launch = _launch_of(implementation, given, *onto.values())
    if _repeated(table, launch, given):
        return
    _check_data("out", out, table)
    _check_messages("messages", messages, (messages.shape[0], *out.shape[:-1]), table, out.device)
    if out.numel() and implementation is not None:
        repeat = implementation.unpack_sum(_two_leads(messages, after=1), table, _two_leads(out), **onto)
        if launch is not None and repeat is not None:
            table.repeats[launch] = repeat


def backend(device_type: str) -> tuple[str, str, str]:
    """Return (piece, implementation, reason): block quantization's row in the log's table of back ends.

    For "cpu" this compiles native.c unless the cache has it.

    Args:
        device_type: "cpu" or "cuda".
    Raises:
        ValueError: block quantization has no implementation for this device.
    """
    piece = "block quantization"
    if device_type == "cpu":
        library = native.library()
        if library.missing:
            return piece, "the reference in torch", f"{library.missing}; compiled C is 3 to 11 times as fast"
        return piece, f"C, compiled by {library.compiler}", "CPU tensors"
    if device_type == "cuda" and TRITON is not None:
        return piece, f"Triton {TRITON.VERSION}", "CUDA tensors"
    if device_type == "cuda":
        raise ValueError("block quantization of CUDA tensors needs Triton: pip install triton")
    raise ValueError(f"block quantization has no implementation for {device_type} tensors")


def _implementation(tensor: Tensor) -> ModuleType | None:
    """Return the module that computes on the tensor's device; None for tensors without memory."""
    device_type = tensor.device.type
    if isinstance(tensor, FakeTensor):
        return None
    if device_type == "cpu":
        return reference if native.library().missing else native
    if device_type != "cuda" or TRITON is None:
        backend(device_type)  # raises the error that says which package is missing
    return TRITON


def _launch_of(
    implementation: ModuleType | None, tensors: Sequence[Tensor], *others: object
) -> tuple[object, ...] | None:
    """Return a key of a Triton launch: all properties of the arguments that are checked or select the compiled kernel.

    The key contains the remainders of addresses modulo 16, not the addresses. Returns None for the other
    implementations.

    Args:
        implementation: the module that computes.
        tensors: the tensor arguments.
        others: further arguments that change the compiled kernel.
    """
    if implementation is None or implementation is not TRITON:
        return None
    looks = ((x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % 16) for x in tensors)
    return *others, *itertools.chain.from_iterable(looks)


def _repeated(table: RangeTable, launch: tuple[object, ...] | None, tensors: Sequence[Tensor]) -> bool:
    """Repeat an earlier launch for these tensors, if one with an equal key exists. Returns whether it did.

    This takes a fifth of the host time of a launch with our checks and Triton's inspection of its arguments.
    """
    repeat = None if launch is None else table.repeats.get(launch)
    if repeat is not None:
        repeat(*[x.data_ptr() for x in tensors])
    return repeat is not None


def _check_data(name: str, x: Tensor, table: RangeTable) -> None:
    """Raise ValueError if a data tensor does not fit the table."""
    if x.dtype not in DATA_DTYPES:
        raise ValueError(f"{name} is {x.dtype}; expected fp32, bf16 or fp16")
    if not 1 <= x.ndim <= 3:
        raise ValueError(f"{name} {tuple(x.shape)} has {x.ndim} dims; expected 1 to 3")
    if x.shape[-1] != table.layout.size:
        raise ValueError(f"{name} {tuple(x.shape)} has rows of the wrong size; expected {table.layout.size} elements")
    _check_rows(name, x)


def _check_messages(
    name: str, messages: Tensor, lead: tuple[int, ...], table: RangeTable, device: torch.device
) -> None:
    """Raise ValueError if a message tensor does not fit the table."""
    expected = (*lead, table.layout.message_bytes)
    if messages.dtype != torch.uint8 or messages.shape != expected or messages.device != device:
        raise ValueError(
            f"{name} is {messages.dtype} {tuple(messages.shape)} on {messages.device}; for rows of {table.layout.size}"
            f" elements in {table.layout.fmt} expected torch.uint8 {expected} on {device}"
        )
    _check_rows(name, messages)
    starts = messages.storage_offset()
    for stride in messages.stride()[:-1]:
        starts |= stride
    if starts % MESSAGE_ALIGNMENT and messages.numel():
        raise ValueError(
            f"{name} {tuple(messages.shape)} has rows that do not start at a multiple of {MESSAGE_ALIGNMENT} bytes"
        )


def _check_rows(name: str, x: Tensor) -> None:
    """Raise ValueError unless the last dim is contiguous."""
    if x.shape[-1] > 1 and x.stride(-1) != 1:
        raise ValueError(f"{name} {tuple(x.shape)} has stride {x.stride(-1)} in its last dim; it must be contiguous")


def _two_leads(x: Tensor, *, after: int = 0) -> Tensor:
    """Insert leading dims of size 1 until there are two: [after dims, leads, last] -> [after dims, A, B, last]."""
    while x.ndim < after + 3:
        x = x.unsqueeze(after)
    return x
