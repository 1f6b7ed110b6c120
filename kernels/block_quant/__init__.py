"""Block quantization of messages: what is checked, and who computes it.

A row of data [n] travels as one message [M] of bytes. A `RangeTable` says which elements are quantized, in blocks, and
where their integers and scales lie in it (see formats.py), and which travel as they are. One call works on all
segments of all rows: on CUDA it is one kernel, whatever their number. Data and messages may be strided views whose last
dim is contiguous, with up to two leading dims: the hops' permutation ([N, L, S] to [L, N, M]) is the strides of the
views handed in, so nothing is copied before or after. Data may start anywhere; starts and strides that are multiples of
16 bytes are faster on CUDA. Bytes of a message in which nothing lies are not written.

Three implementations agree bit for bit: `native` (C, on the CPU), `triton` (CUDA) and `reference` (readable torch). The
reference also computes on a CPU without a C compiler: C is 3 to 11 times as fast there (one thread of an EPYC,
tools/benchmarks/benchmark_kernels.py with and without CC=none). Tensors that have shapes and no memory (FakeTensor) are
checked, and nothing else is done.
Non-finite numbers travel: a block that holds a NaN or an Inf is sent as scale NaN, integers 0, and all of it comes back
as NaN. A block whose scale would be subnormal (all of it below about 1e-36) is sent as zeros.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

import megazpp.kernels.block_quant.native as native
import megazpp.kernels.block_quant.reference as reference
from megazpp.kernels.block_quant.range_table import Feedback, RangeTable, range_table, rescale_
from megazpp.kernels.c_library import CLibraryError

HAS_TRITON = importlib.util.find_spec("triton") is not None
TRITON: ModuleType | None = importlib.import_module("megazpp.kernels.block_quant.triton") if HAS_TRITON else None

__all__ = ["Feedback", "backend", "pack", "range_table", "rescale_", "unpack", "unpack_onto", "unpack_sum"]

MESSAGE_ALIGNMENT = 4  # bytes: of the widest element that travels as it is
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
    """Write every row of `x` into its message.

    Args:
        x: [..., n] fp32, bf16 or fp16; n of the table's layout.
        messages: [..., M] uint8, written.
        errors: what the last messages have lost (`Feedback.zeros` at first); it is added to the elements that are
            quantized before, and holds the new error after.
        beta: share of what `errors` held before in what they hold after (LoCo's moving average); the rest is the new
            error's. 0 <= beta < 1.
        base: [..., n] fp32, bf16 or fp16, whatever the dtype of x; of the elements that are quantized float(x) -
            float(base) is, the others travel whole as ever. A receiver that has `base` takes the message in with
            `unpack_onto`. Without errors: a base that receives what it sent holds them already.
    Errors:
        |x - dequantized| <= |scale| / 2 (1 + 2^-15), but for what a format with `clip` clips.
    Raises:
        ValueError: a shape, dtype, stride or device does not fit, or there are both errors and a base.
    Source: ZeRO++ section 3.1 and 3.3 (qwZ, qgZ); rounding is half to even.
    """
    implementation = _implementation(x)
    given = [x, messages, *(() if errors is None else (errors.messages,)), *(() if base is None else (base,))]
    launch = _launch_of(implementation, given, None if errors is None else errors.table, float(beta))
    if _repeated(table, launch, given):
        return
    _check_data("x", x, table)
    lead = x.shape[:-1]
    _check_messages("messages", messages, lead, table, x.device)
    if errors is not None:
        if errors.table is not table.of_errors:
            raise ValueError(f"the errors are those of messages in another layout than {table.layout}")
        if base is not None:
            raise ValueError("a difference from a base is quantized without errors of earlier ones")
        _check_messages("errors", errors.messages, lead, errors.table, x.device)
        errors = Feedback(_two_leads(errors.messages), errors.table)
    if base is not None:
        _check_data("base", base, table)
        if base.shape != x.shape or base.device != x.device:
            raise ValueError(f"base is {tuple(base.shape)} on {base.device}, but x is {tuple(x.shape)} on {x.device}")
        base = _two_leads(base)
    if x.numel() and implementation is not None:
        repeat = implementation.pack(_two_leads(x), table, _two_leads(messages), errors, base, float(beta))
        if launch is not None and repeat is not None:
            table.repeats[launch] = repeat


def unpack(messages: Tensor, table: RangeTable, *, out: Tensor) -> None:
    """Read every row of `out` from its message: integer times scale, in fp32, rounded once to the dtype of `out`.

    Args:
        messages: [..., M] uint8, as `pack` wrote them.
        out: [..., n] fp32, bf16 or fp16, written.
    Raises:
        ValueError: a shape, dtype, stride or device does not fit.
    """
    _unpack(messages.unsqueeze(0), table, out, onto_quantized=False, onto_exact=False)


def unpack_onto(messages: Tensor, table: RangeTable, *, out: Tensor) -> None:
    """Receive differences (`base` of `pack`) in `out`: add what was quantized, replace what was not; else as `unpack`.

    out = round(float(out) + integer * scale), in one pass. The product is exact, so every receiver that held the same
    bits holds the same bits after it; an element that is NaN, or that a NaN arrives for, stays NaN.
    """
    _unpack(messages.unsqueeze(0), table, out, onto_quantized=True, onto_exact=False)


def unpack_sum(messages: Tensor, table: RangeTable, *, out: Tensor, accumulate: bool = False) -> None:
    """Read K messages per row and sum them, in the order 0..K-1, in fp32.

    Args:
        messages: [K, ..., M] uint8.
        out: [..., n] fp32, bf16 or fp16, written (rounded once).
        accumulate: start from what is in `out` instead of from message 0.
    Raises:
        ValueError: K is 0, or a shape, dtype, stride or device does not fit.
    """
    if messages.ndim < 2 or messages.shape[0] == 0:
        raise ValueError(f"messages {tuple(messages.shape)} have nothing to sum: expected [K, ..., bytes] with K >= 1")
    _unpack(messages, table, out, onto_quantized=accumulate, onto_exact=accumulate)


def _unpack(messages: Tensor, table: RangeTable, out: Tensor, **onto: bool) -> None:
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
    """Piece, implementation and why: block quantization's row of the table of back ends for a device ("cpu", "cuda").

    For the CPU, this compiles native.c unless it was compiled before.

    Raises:
        ValueError: there is none.
    """
    piece = "block quantization"
    if device_type == "cpu":
        library = native.library()
        if isinstance(library, CLibraryError):
            return piece, "the reference in torch", f"{library}; compiled C is 3 to 11 times as fast"
        return piece, f"C, compiled by {library.compiler}", "CPU tensors"
    if device_type == "cuda" and TRITON is not None:
        return piece, f"Triton {TRITON.VERSION}", "CUDA tensors"
    if device_type == "cuda":
        raise ValueError("block quantization of CUDA tensors needs Triton: pip install triton")
    raise ValueError(f"block quantization has no implementation for {device_type} tensors")


def _implementation(tensor: Tensor) -> ModuleType | None:
    """The module that computes on the tensor's device; None for tensors without memory."""
    device_type = tensor.device.type
    if isinstance(tensor, FakeTensor):
        return None
    if device_type == "cpu":
        return reference if isinstance(native.library(), CLibraryError) else native
    if device_type != "cuda" or TRITON is None:
        backend(device_type)  # says what is missing
    return TRITON


def _launch_of(
    implementation: ModuleType | None, tensors: Sequence[Tensor], *others: object
) -> tuple[object, ...] | None:
    """Return all that a launch of Triton is checked for and compiled for, but for addresses; None if it is another's.

    Of an address that is the remainder by 16.
    """
    if implementation is None or implementation is not TRITON:
        return None
    looks = ((x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % 16) for x in tensors)
    return *others, *itertools.chain.from_iterable(looks)


def _repeated(table: RangeTable, launch: tuple[object, ...] | None, tensors: Sequence[Tensor]) -> bool:
    """Launch once more for these tensors, if an equal launch was made before.

    That takes a fifth of the host time of a launch with our checks and Triton's own look at its arguments.
    """
    repeat = None if launch is None else table.repeats.get(launch)
    if repeat is not None:
        repeat(*[x.data_ptr() for x in tensors])
    return repeat is not None


def _check_data(name: str, x: Tensor, table: RangeTable) -> None:
    if x.dtype not in DATA_DTYPES:
        raise ValueError(f"{name} is {x.dtype}; expected fp32, bf16 or fp16")
    if not 1 <= x.ndim <= 3:
        raise ValueError(f"{name} {tuple(x.shape)} has {x.ndim} dims; expected 1 to 3")
    if x.shape[-1] != table.layout.size:
        raise ValueError(f"{name} {tuple(x.shape)} has rows of another size than {table.layout.size}")
    _check_rows(name, x)


def _check_messages(
    name: str, messages: Tensor, lead: tuple[int, ...], table: RangeTable, device: torch.device
) -> None:
    expected = (*lead, table.layout.message_bytes)
    if messages.dtype != torch.uint8 or messages.shape != expected or messages.device != device:
        raise ValueError(
            f"{name} is {messages.dtype} {tuple(messages.shape)} on {messages.device}; rows of {table.layout.size}"
            f" elements in {table.layout.fmt} need torch.uint8 {expected} on {device}"
        )
    _check_rows(name, messages)
    starts = messages.storage_offset()
    for stride in messages.stride()[:-1]:
        starts |= stride
    if starts % MESSAGE_ALIGNMENT and messages.numel():
        raise ValueError(f"{name} {tuple(messages.shape)} do not all start at a multiple of {MESSAGE_ALIGNMENT} bytes")


def _check_rows(name: str, x: Tensor) -> None:
    if x.shape[-1] > 1 and x.stride(-1) != 1:
        raise ValueError(f"{name} {tuple(x.shape)} has stride {x.stride(-1)} in its last dim; it must be contiguous")


def _two_leads(x: Tensor, *, after: int = 0) -> Tensor:
    """View [after dims.., A, B, last] of [after dims.., leads.., last]."""
    while x.ndim < after + 3:
        x = x.unsqueeze(after)
    return x
