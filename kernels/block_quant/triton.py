"""Block quantization of CUDA tensors in Triton: one kernel per function, which reads and writes each byte once.

Each program handles one tile of one row. Grid axis 0 runs over the tiles of all segments. A table on the device tells
where each tile is in the data and in the message (range_table.py). Grid axes 1 and 2 run over the two leading dims of
the data. Complete tiles that start at a multiple of 16 elements use 16-byte accesses without masks; other tiles use
masks.

The launch configuration is fixed: with tiles of 4096 elements and 4 warps, each thread accesses 16 bytes at a time and
nine programs fit on an SM. `enable_fp_fusion` is off because fused multiply-adds round differently, and its default
differs between versions of Triton. Kernels run on the current CUDA device and stream, so the current device must be the
device of the tensors. Set TRITON_INTERPRET=1 before the import to run the same kernels on CPU tensors.
"""
# Compile-time constants are upper case, as is usual in Triton. mypy has no types for the arguments of kernels, which
# are pointers and tensors on the device.
# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

import megazpp.kernels.block_quant.triton_tiles as tiles
from megazpp.kernels.block_quant.range_table import COLUMNS, Feedback, RangeTable
from megazpp.kernels.block_quant.triton_tiles import TILE_ELEMENTS

VERSION = triton.__version__
OPTIONS: dict[str, Any] = {"num_warps": 4, "enable_fp_fusion": False}
# A function that repeats a Triton launch for tensors at other addresses (integers) with equal alignment. Triton
# inspects every argument of every launch, which takes most of a launch's host time; a repeat skips this inspection.
# `pack` and `unpack_sum` return None instead of such a function under TRITON_INTERPRET=1, because the interpreter
# launches nothing that could be repeated.
Repeat = Callable[..., None]

DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}

_TILE = tl.constexpr(TILE_ELEMENTS)
_COLUMNS = tl.constexpr(COLUMNS)


def pack(
    x: Tensor,
    table: RangeTable,
    messages: Tensor,
    errors: Feedback | None = None,
    base: Tensor | None = None,
    beta: float = 0.0,
) -> Repeat | None:
    """Quantize A x B rows of n elements, x [A, B, n], into messages [A, B, M] of M bytes; see `block_quant.pack`.

    Returns:
        A function that repeats this launch. Its arguments are the addresses of x, of the messages, and of the errors
        or the base if this call has one. None under TRITON_INTERPRET=1.
    """
    # Each pointer argument of a kernel needs a tensor. The kernel reads neither `minus` without a base, nor `lost` and
    # `lost_places` without error feedback, so any other tensor serves in these cases.
    minus, places = x if base is None else base, table.tiles(x.device, TILE_ELEMENTS)
    lost, lost_places = messages, places
    if errors is not None:
        lost, lost_places = errors.messages, errors.table.tiles(x.device, TILE_ELEMENTS)
    grid = (len(places), x.shape[1], x.shape[0])
    strides = (*_strides(x), *_strides(minus), *_strides(messages), *_strides(lost))
    constants = {
        **_constants(table),
        "BASE": base is not None,
        "FEEDBACK": errors is not None,
        "AVERAGE": beta > 0,
        "CLIP": table.layout.fmt is not None and table.layout.fmt.clip,
    }
    numbers = (*strides, beta, 1 - beta, *constants.values())
    kernel = _pack_kernel[grid](x, minus, messages, lost, places, lost_places, *numbers, **OPTIONS)
    if kernel is None:
        return None
    run, rest = kernel[grid], (places.data_ptr(), lost_places.data_ptr(), *numbers)
    if base is None:
        return lambda x, messages, errors=None: run(x, x, messages, errors or messages, *rest)
    return lambda x, messages, base: run(x, base, messages, messages, *rest)


def unpack_sum(
    messages: Tensor, table: RangeTable, out: Tensor, *, onto_quantized: bool, onto_exact: bool
) -> Repeat | None:
    """Dequantize K messages for each of A x B rows in Triton, and sum the K results into `out`.

    The messages are [K, A, B, M] with M bytes each, and `out` is [A, B, n] with rows of n elements.
    `reference.unpack_sum` defines the arguments.

    Returns:
        A function that repeats this launch. Its arguments are the addresses of the messages and of `out`. None under
        TRITON_INTERPRET=1.
    """
    places = table.tiles(out.device, TILE_ELEMENTS)
    grid = (len(places), out.shape[1], out.shape[0])
    constants = {
        **_constants(table),
        "K": messages.shape[0],
        "ONTO_QUANTIZED": onto_quantized,
        "ONTO_EXACT": onto_exact,
    }
    numbers = (*_strides(messages), *_strides(out), *constants.values())
    kernel = _unpack_sum_kernel[grid](messages, out, places, *numbers, **OPTIONS)
    if kernel is None:
        return None
    run, rest = kernel[grid], (places.data_ptr(), *numbers)
    return lambda messages, out: run(messages, out, *rest)


def _strides(x: Tensor) -> list[int]:
    """Return the strides of all dims except the last, in elements, as arguments of a Triton kernel.

    Dims of size 1 get stride 0, because Triton could compile the kernel again for each new stride.
    """
    return [stride if size > 1 else 0 for size, stride in zip(x.shape[:-1], x.stride(), strict=False)]


def _constants(table: RangeTable) -> dict[str, object]:
    """Return compile-time constants of the quantization kernels by name, for messages with this table of segments.

    BITS and BLOCK, the block size, are 0 if no segment is quantized. EXACT is Triton's dtype of the unquantized
    elements.
    """
    fmt = table.layout.fmt
    bits, block_size = (0, 0) if fmt is None else (fmt.bits, fmt.block_size)
    assert bits in (0, 4, 8), f"triton_tiles.py supports 4 and 8 bits, and would treat {bits} bits as 4"
    return {"BITS": bits, "BLOCK": block_size, "EXACT": DTYPES[table.dtype]}


# In the kernels below, name_a, name_b and name_k are the strides of the tensor `name`, in bytes for messages. `left` is
# the number of elements from the start of the tile to the end of the segment. BITS is 0 if nothing is quantized. WHOLE
# selects accesses without masks. It is True for a tile that lies completely in its segment and starts at a multiple of
# 16 elements.


@triton.jit
def _pack_kernel(
    x, base, messages, errors, table, error_table,
    x_a, x_b, base_a, base_b, messages_a, messages_b, errors_a, errors_b, beta, rest,
    BITS: tl.constexpr, BLOCK: tl.constexpr, EXACT: tl.constexpr, BASE: tl.constexpr, FEEDBACK: tl.constexpr,
    AVERAGE: tl.constexpr, CLIP: tl.constexpr,
):  # fmt: skip
    """Quantize one tile of x into its message, or copy the tile if its segment is not quantized.

    Before quantization the base is subtracted if BASE, and the stored errors are added if FEEDBACK. The new error is
    stored for the next call, or with AVERAGE the mean `rest` * new error + `beta` * earlier error, where `rest` is
    1 - `beta`. CLIP is `clip` of the block format.
    """
    # ---- move all pointers to this program's row, and load where its tile is in the data and in the message
    a, b = _row()
    x += a * x_a + b * x_b
    base += a * base_a + b * base_b
    messages += a * messages_a + b * messages_b
    errors += a * errors_a + b * errors_b
    start, left, payload, scales = _place(table)
    payload = _wide(payload)
    is_wide = (left >= _TILE) & (start % 16 == 0)
    # ---- copy the tile if it is unquantized, otherwise quantize it
    if scales < 0:
        if is_wide:
            _pack_exact(x, messages, _wide(start), left, payload, EXACT, True)
        else:
            _pack_exact(x, messages, start, left, payload, EXACT, False)
    elif BITS > 0:
        lost, lost_scales = payload, scales
        if FEEDBACK:
            _, _, lost, lost_scales = _place(error_table)
            lost = _wide(lost)
        if is_wide:
            _quantize(x, base, messages, errors, _wide(start), left, payload, scales, lost, lost_scales,
                      beta, rest, BITS, BLOCK, BASE, FEEDBACK, AVERAGE, CLIP, True)  # fmt: skip
        else:
            _quantize(x, base, messages, errors, start, left, payload, scales, lost, lost_scales,
                      beta, rest, BITS, BLOCK, BASE, FEEDBACK, AVERAGE, CLIP, False)  # fmt: skip


@triton.jit
def _pack_exact(x, messages, start, left, payload, EXACT: tl.constexpr, WHOLE: tl.constexpr):
    """Copy one tile of unquantized elements into the message, converted to the dtype EXACT."""
    out = (messages + payload).to(tl.pointer_type(EXACT))
    for first in tl.range(0, _TILE, tiles.STRIP):
        values = tiles.load_elements(x + start + first, left - first, WHOLE)
        tiles.store_elements(out + first, values, left - first, WHOLE)


@triton.jit
def _quantize(
    x, base, messages, errors, start, left, payload, scales, lost, lost_scales, beta, rest, BITS: tl.constexpr,
    BLOCK: tl.constexpr, BASE: tl.constexpr, FEEDBACK: tl.constexpr, AVERAGE: tl.constexpr, CLIP: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """Quantize one tile of x into the message, after subtracting the base if BASE.

    With FEEDBACK the tile's errors of the last quantization are added before the tile is quantized. Then the new errors
    replace them in `errors`, the buffer of error feedback: the integers at the offset `lost` and the scales at the
    offset `lost_scales`, in bytes.
    """
    # ---- load the elements of x, subtract the base, and add the stored quantization errors
    low, high = tiles.load_data(x + start, left, BLOCK, WHOLE)
    if BASE:
        base_low, base_high = tiles.load_data(base + start, left, BLOCK, WHOLE)
        low -= base_low
        high -= base_high
    if FEEDBACK:
        error, error_scales = errors + lost, _bf16(errors + lost_scales)
        error_low, error_high = tiles.load_quantized(error, error_scales, left, 8, BLOCK, WHOLE)
        low += error_low
        high += error_high
    # ---- quantize the tile, and store integers and scales in the message
    scale, inverse, finite = tiles.block_scales(low, high, BITS, BLOCK, CLIP)
    shifted_low = tiles.round_shifted(low, inverse, BITS, CLIP)
    shifted_high = tiles.round_shifted(high, inverse, BITS, CLIP)
    tiles.store_integers(messages + payload, shifted_low, shifted_high, finite, left, BITS, BLOCK, WHOLE)
    tiles.store_scales(_bf16(messages + scales), tl.where(finite, scale, float("nan")), left, BLOCK, WHOLE)
    # ---- store the new quantization error, itself quantized to int8, for the next call
    if FEEDBACK:
        low -= tiles.unshift(shifted_low, BITS) * scale[:, None]
        high -= tiles.unshift(shifted_high, BITS) * scale[:, None]
        if AVERAGE:
            low = low * rest + error_low * beta
            high = high * rest + error_high * beta
        scale, inverse, error_finite = tiles.block_scales(low, high, 8, BLOCK, False)
        finite = finite & error_finite
        low = tiles.round_shifted(low, inverse, 8, False)
        high = tiles.round_shifted(high, inverse, 8, False)
        tiles.store_integers(error, low, high, finite, left, 8, BLOCK, WHOLE)
        tiles.store_scales(error_scales, tl.where(finite, scale, 0.0), left, BLOCK, WHOLE)


@triton.jit
def _unpack_sum_kernel(
    messages, out, table, messages_k, messages_a, messages_b, out_a, out_b,
    BITS: tl.constexpr, BLOCK: tl.constexpr, EXACT: tl.constexpr, K: tl.constexpr, ONTO_QUANTIZED: tl.constexpr,
    ONTO_EXACT: tl.constexpr,
):  # fmt: skip
    """Dequantize one tile of K messages, and sum the K results into `out`.

    For a quantized tile, the sum starts with the values in `out` if ONTO_QUANTIZED is True. For an unquantized tile,
    the sum starts with these values if ONTO_EXACT is True.
    """
    a, b = _row()
    messages += a * messages_a + b * messages_b
    out += a * out_a + b * out_b
    start, left, payload, scales = _place(table)
    payload = _wide(payload)
    is_wide = (left >= _TILE) & (start % 16 == 0)
    if scales < 0:
        if is_wide:
            _sum_exact(messages, out, messages_k, _wide(start), left, payload, EXACT, K, ONTO_EXACT, True)
        else:
            _sum_exact(messages, out, messages_k, start, left, payload, EXACT, K, ONTO_EXACT, False)
    elif BITS > 0:
        if is_wide:
            _sum_quantized(messages, out, messages_k, _wide(start), left, payload, scales,
                           BITS, BLOCK, K, ONTO_QUANTIZED, True)  # fmt: skip
        else:
            _sum_quantized(messages, out, messages_k, start, left, payload, scales,
                           BITS, BLOCK, K, ONTO_QUANTIZED, False)  # fmt: skip


@triton.jit
def _sum_exact(
    messages, out, messages_k, start, left, payload, EXACT: tl.constexpr, K: tl.constexpr, ONTO: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """Sum one tile of unquantized elements over K messages, and write the sum into `out`.

    With ONTO the sum starts with the values in `out`.
    """
    for first in tl.range(0, _TILE, tiles.STRIP):
        rest, sums = left - first, out + start + first
        row = messages + payload
        values = tiles.load_elements(row.to(tl.pointer_type(EXACT)) + first, rest, WHOLE)
        if K > 1 or ONTO:
            values = tiles.to_float(values)
            if ONTO:
                values = tiles.to_float(tiles.load_elements(sums, rest, WHOLE)) + values
            for _ in tl.range(1, K):
                row += messages_k
                values += tiles.to_float(tiles.load_elements(row.to(tl.pointer_type(EXACT)) + first, rest, WHOLE))
        tiles.store_elements(sums, values, rest, WHOLE)


@triton.jit
def _sum_quantized(
    messages, out, messages_k, start, left, payload, scales, BITS: tl.constexpr, BLOCK: tl.constexpr, K: tl.constexpr,
    ONTO: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Dequantize one quantized tile of K messages, and write the sum of the K results into `out`.

    With ONTO the sum starts with the values in `out`.
    """
    low, high = tiles.load_sum(
        messages + payload, _bf16(messages + scales), out + start, messages_k, messages_k // 2, left,
        BITS, BLOCK, K, ONTO, WHOLE,
    )  # fmt: skip
    tiles.store_data(out + start, low, high, left, BLOCK, WHOLE)


@triton.jit
def _row():
    """Return this program's indices (a, b) in the two leading dims of the data, as int64: offsets may exceed 2^31."""
    return tl.program_id(2).to(tl.int64), tl.program_id(1).to(tl.int64)


@triton.jit
def _place(table):
    """Load this program's row of the table of tiles, which tells where the tile is in the data and in the message.

    Returns the index of the tile's first element, the number of elements left in the segment, and the offsets in bytes
    of the integers and of the scales in the message.
    """
    row = table + tl.program_id(0) * _COLUMNS
    return tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3)


@triton.jit
def _wide(offset):
    """Return `offset`, a multiple of 16, written so that Triton's compiler can prove this and use 16-byte accesses."""
    return offset // 16 * 16


@triton.jit
def _bf16(pointer):
    """Cast a pointer to a message's bytes, where scales are stored, to a pointer to bf16."""
    return pointer.to(tl.pointer_type(tl.bfloat16))
