"""Quantize weights and gradients in blocks into ZeRO++'s messages, and dequantize them: the public functions.

A row of data, a rank's flat shard of n elements, is packed into a message of M bytes. A `RangeTable` lists the segments
of a row: which elements are quantized in blocks, which are copied unquantized, and where their bytes are in the message
(formats.py). One call handles all segments of all rows, with one kernel launch on CUDA.

Data and messages may be strided views with a contiguous last dim and up to two leading dims. Permuted strides express
the reordering of two-hop collectives without copies, from [N, L, n] to [L, N, M] with N nodes of L ranks. Data may
start at any element; starts and strides that are multiples of 16 bytes are faster on CUDA. Bytes of a message that
belong to no segment are not written. The functions assert that shapes, dtypes, strides and devices of their arguments
match.

Three implementations agree bit for bit: `native` (C, for CPU tensors), `triton` (for CUDA tensors) and `reference`
(plain torch, which also serves CPUs without a C compiler). C is 3 to 11 times as fast as the reference (one thread of
an EPYC, tools/benchmarks/benchmark_kernels.py with and without CC=none). For a FakeTensor, which has no memory, the
functions only check the arguments.

A block that contains a NaN or Inf is sent with scale NaN and integers 0, so the receiver unpacks the whole block as
NaN. A block whose scale would be subnormal (all magnitudes below about 1e-36) is sent as zeros.
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

# Messages start at multiples of this many bytes, the size of fp32, which is the widest dtype that is sent unquantized.
MESSAGE_ALIGNMENT = 4
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
    """Quantize every row of `x` in blocks, and write the integers and scales into the row's message.

    Args:
        x: [..., n] fp32, bf16 or fp16, rows of weights or gradients; n is the size of the table's layout.
        table: list of the segments of a row and of their bytes in a message, from `range_table`.
        messages: [..., M] uint8, one message of M bytes per row, written.
        errors: error feedback's buffer with the quantization errors of the previous messages; `Feedback.zeros` creates
            it. The errors are added to the elements that are quantized, and then replaced by this call's errors. None
            without error feedback.
        beta: weight of the earlier errors in the errors that replace them (LoCo's moving average); 0 <= beta < 1.
        base: [..., n] fp32, bf16 or fp16, values that the receivers already hold; their dtype may differ from x. If
            given, the message quantizes the weight delta float(x) - float(base), and receivers call `unpack_onto`.
            Unquantized elements are sent as x. A base cannot be combined with `errors`, because the next delta
            contains this message's rounding errors anyway.
    Errors:
        |x - dequantized| <= (1 + 2^-15) |scale| / 2, except for elements that a format with `clip` clips.
    Source: ZeRO++ sections 3.1 and 3.3 (qwZ, qgZ). Rounding is half to even.
    """
    # ---- on CUDA, repeat an earlier launch with equal shapes, strides and dtypes without checking the arguments again
    implementation = _implementation(x)
    given = [x, messages, *(() if errors is None else (errors.messages,)), *(() if base is None else (base,))]
    launch = _launch_of(implementation, given, None if errors is None else errors.table, float(beta))
    if _repeated(table, launch, given):
        return

    # ---- check shapes, dtypes, strides and devices of the arguments
    _check_data("x", x, table)
    lead = x.shape[:-1]
    _check_messages("messages", messages, lead, table, x.device)
    if errors is not None:
        assert errors.table is table.of_errors, f"errors belongs to messages with another layout than {table.layout}"
        assert base is None, "pack got both errors and base: the next delta from a base contains the rounding errors"
        _check_messages("errors", errors.messages, lead, errors.table, x.device)
        errors = Feedback(_two_leads(errors.messages), errors.table)
    if base is not None:
        _check_data("base", base, table)
        own, expected = (base.shape, base.device), (x.shape, x.device)
        assert own == expected, f"base is {own}; expected x's shape and device, {expected}"
        base = _two_leads(base)

    # ---- quantize with the implementation for this device; on CUDA, store a function that repeats this launch, so that
    # the next call with equal shapes skips the checks above
    if x.numel() and implementation is not None:
        repeat = implementation.pack(_two_leads(x), table, _two_leads(messages), errors, base, float(beta))
        if launch is not None and repeat is not None:
            table.repeats[launch] = repeat


def unpack(messages: Tensor, table: RangeTable, *, out: Tensor) -> None:
    """Dequantize messages of `pack` into the rows of `out`.

    An element is its integer times its block's scale, computed in fp32 and rounded once to the dtype of `out`.

    Args:
        messages: [..., M] uint8, one message of M bytes per row, written by `pack`.
        table: list of the segments of a row, the same as for `pack`.
        out: [..., n] fp32, bf16 or fp16, rows of n elements, written.
    """
    _unpack(messages.unsqueeze(0), table, out, onto_quantized=False, onto_exact=False)


def unpack_onto(messages: Tensor, table: RangeTable, *, out: Tensor) -> None:
    """Dequantize messages that `pack` wrote with a `base`, and add the deltas to that base in `out`.

    Quantized elements become round(float(out) + integer * scale); unquantized elements are replaced. The product is
    exact in fp32, so receivers that held the same bits hold the same bits afterwards. An element that is NaN, or for
    which a NaN arrives, is NaN afterwards.

    Args:
        messages: [..., M] uint8, one message of M bytes per row, written by `pack`.
        table: list of the segments of a row, the same as for `pack`.
        out: [..., n] fp32, bf16 or fp16, the base, in rows of n elements, updated in place.
    """
    _unpack(messages.unsqueeze(0), table, out, onto_quantized=True, onto_exact=False)


def unpack_sum(messages: Tensor, table: RangeTable, *, out: Tensor, accumulate: bool = False) -> None:
    """Dequantize K messages per row, and sum them in fp32 in the order 0..K-1, as a reduce-scatter does.

    Args:
        messages: [K, ..., M] uint8, for each row one message of M bytes from each of K ranks, written by `pack`.
        table: list of the segments of a row, the same as for `pack`.
        out: [..., n] fp32, bf16 or fp16, rows of n elements; receives the sums, which are rounded once to its dtype.
        accumulate: True if the sum starts with the values in `out`; False overwrites them.
    """
    assert messages.ndim > 1, f"messages {tuple(messages.shape)} cannot be summed; expected [K, ..., M]"
    assert len(messages) > 0, f"messages {tuple(messages.shape)} cannot be summed: there is no message"
    _unpack(messages, table, out, onto_quantized=accumulate, onto_exact=accumulate)


def _unpack(messages: Tensor, table: RangeTable, out: Tensor, **onto: bool) -> None:
    """Check the arguments of `unpack`, `unpack_onto` or `unpack_sum`, and dequantize and sum the messages.

    Args:
        messages: [K, ..., M] uint8, K messages of M bytes per row; K is 1 unless messages are summed.
        table: list of the segments of a row and of their bytes in a message.
        out: [..., n], rows of n elements, written.
        onto: two flags. `onto_quantized` adds quantized elements to the values in `out`, and `onto_exact` adds
            unquantized ones; False overwrites the values.
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
    """Return the row about block quantization for the log's table of back ends: (piece, implementation, reason).

    For "cpu" this compiles native.c, unless the cache folder has its library.

    Args:
        device_type: type of the run's device, "cpu" or "cuda".
    Raises:
        ValueError: `device_type` is "cuda" and Triton is not installed, or it is another type.
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
        raise ValueError(
            "block quantization of CUDA tensors requires Triton, which is not installed: pip install triton"
        )
    raise ValueError(
        f"block quantization has no implementation for {device_type} tensors: move them to a device of type cpu or cuda"
    )


def _implementation(tensor: Tensor) -> ModuleType | None:
    """Return the module that quantizes tensors on this tensor's device: native (C), reference (torch) or triton.

    None for a FakeTensor, for which nothing is computed.
    """
    device_type = tensor.device.type
    if isinstance(tensor, FakeTensor):
        return None
    if device_type == "cpu":
        return reference if native.library().missing else native
    if device_type != "cuda" or TRITON is None:
        backend(device_type)  # raises ValueError: Triton is not installed, or the device type is not supported
    return TRITON


def _launch_of(
    implementation: ModuleType | None, tensors: Sequence[Tensor], *others: object
) -> tuple[object, ...] | None:
    """Return the key by which `_repeated` finds an equal earlier launch of a Triton kernel; None for C and torch.

    The key holds all properties of the tensors that are checked or that select the compiled kernel. These include each
    address modulo 16, because Triton compiles another kernel for addresses that are not multiples of 16. The key also
    holds `others`, because a repeated launch reuses their values.

    Args:
        implementation: module that computes, from `_implementation`.
        tensors: tensor arguments of the launch.
        others: arguments of the launch that are not tensors, and the table of the errors for error feedback.
    """
    if implementation is None or implementation is not TRITON:
        return None
    looks = ((x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % 16) for x in tensors)
    return *others, *itertools.chain.from_iterable(looks)


def _repeated(table: RangeTable, launch: tuple[object, ...] | None, tensors: Sequence[Tensor]) -> bool:
    """Repeat an earlier Triton launch that has the key `launch`, and return True; return False if there was none.

    The repeated launch uses the addresses of `tensors`. It skips this module's checks and Triton's inspection of
    arguments, and so takes a fifth of a normal launch's host time.

    Args:
        table: table of segments, which stores the launches that can be repeated.
        launch: key of the launch, from `_launch_of`; None returns False.
        tensors: tensor arguments of the launch, whose addresses are used.
    """
    repeat = None if launch is None else table.repeats.get(launch)
    if repeat is not None:
        repeat(*[x.data_ptr() for x in tensors])
    return repeat is not None


def _check_data(name: str, x: Tensor, table: RangeTable) -> None:
    """Assert that the dtype, shape and strides of a tensor of elements match the table of segments.

    `name` is the tensor's argument name, for the error message.
    """
    assert x.dtype in DATA_DTYPES, f"{name} is {x.dtype}; expected fp32, bf16 or fp16"
    assert 1 <= x.ndim <= 3, f"{name} {tuple(x.shape)} has {x.ndim} dims; expected rows with up to 2 leading dims"
    size = table.layout.size
    assert x.shape[-1] == size, f"{name} {tuple(x.shape)} has rows of the wrong size; expected {size} elements"
    _check_rows(name, x)


def _check_messages(
    name: str, messages: Tensor, lead: tuple[int, ...], table: RangeTable, device: torch.device
) -> None:
    """Assert that a tensor of messages has the dtype, shape, device and strides that it must have.

    Args:
        name: the tensor's argument name, for the error message.
        messages: tensor to check.
        lead: expected leading dims, before the bytes of a message.
        table: table of segments, which determines the bytes of a message.
        device: expected device.
    """
    expected = torch.uint8, (*lead, table.layout.message_bytes), device
    found = messages.dtype, messages.shape, messages.device
    assert found == expected, f"{name} is {found}; expected {expected} for rows of {table.layout.size} elements"
    _check_rows(name, messages)
    starts = messages.storage_offset()
    for stride in messages.stride()[:-1]:
        starts |= stride
    is_aligned = starts % MESSAGE_ALIGNMENT == 0 or messages.numel() == 0
    assert is_aligned, f"{name} has messages that do not start at multiples of {MESSAGE_ALIGNMENT} bytes"


def _check_rows(name: str, x: Tensor) -> None:
    """Assert that the last dim of the tensor is contiguous; `name` is its argument name, for the error message."""
    is_contiguous = x.shape[-1] < 2 or x.stride(-1) == 1
    assert is_contiguous, f"{name} {tuple(x.shape)} has stride {x.stride(-1)} in its last dim instead of 1"


def _two_leads(x: Tensor, *, after: int = 0) -> Tensor:
    """Return a view of `x` with exactly two leading dims A and B, because the quantization kernels expect two.

    Missing dims are inserted with size 1. The first `after` dims stay in front. So the result is [A, B, n] for data or
    messages with last dim n, or [K, A, B, n] for K messages per row with `after` = 1.
    """
    while x.ndim < after + 3:
        x = x.unsqueeze(after)
    return x
