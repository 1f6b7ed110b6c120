"""Segments in awkward places, and the comparison of two implementations of block quantization on them.

Every byte that a function may write lies in a buffer of 0xFF bytes (NaN in every float dtype): an element that was not
written, or a byte beside it that was, shows in the comparison.
"""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.block_quant import reference
from kernels.block_quant.feedback import Feedback, feedback_format
from kernels.formats import BlockFormat

GUARD_BYTES = 32


class Quantized(NamedTuple):
    """Payload and scales that lie in one uint8 message per row, as on the wire."""

    message: Tensor
    payload: Tensor
    scales: Tensor


def messages(lead: tuple[int, int], n: int, fmt: BlockFormat, device: str, *, swapped: bool = False) -> Quantized:
    """Messages [A, B, guard | payload | scales | guard] of 0xFF bytes; [B, A, ..] seen as [A, B, ..] if `swapped`."""
    payload_bytes, scale_bytes = fmt.payload_bytes(n), fmt.scale_bytes(n)
    size = -(-(GUARD_BYTES + payload_bytes + scale_bytes + GUARD_BYTES) // 16) * 16
    order = lead[::-1] if swapped else lead
    message = torch.full((*order, size), 0xFF, dtype=torch.uint8, device=device)
    rows = message.transpose(0, 1) if swapped else message
    return Quantized(
        message,
        rows[..., GUARD_BYTES : GUARD_BYTES + payload_bytes],
        rows[..., GUARD_BYTES + payload_bytes :][..., :scale_bytes].view(torch.bfloat16),
    )


def data(lead: tuple[int, ...], n: int, dtype: torch.dtype, device: str, *, offset: int = 0) -> tuple[Tensor, Tensor]:
    """(buffer, view [*lead, n]) of NaN, with `offset` elements before every row and guards behind it."""
    buffer = torch.full((*lead, offset + n + 16), float("nan"), dtype=dtype, device=device)
    return buffer, buffer[..., offset : offset + n]


def difficult(lead: tuple[int, ...], n: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Rows of many magnitudes with zeros, subnormals, ties, huge values and numbers that are not finite, on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*lead, n, generator=generator)
    rows = x.view(-1, n)
    for index, row in enumerate(rows):
        if n == 0:
            continue
        at = int(torch.randint(n, (1,), generator=generator))
        kind = (index + seed) % 8
        if kind == 1:
            row.zero_()
            row[at] = -0.0
        elif kind == 2:
            row.mul_(1e-38)  # scales below the smallest normal
        elif kind == 3:
            row.mul_(3e36).clamp_(-3.3e38, 3.3e38)
        elif kind == 4:
            row[at] = row[0] = 4.0
            row[(at + 1) % n] = -4.0  # a tie of signs
        elif kind == 5:
            row.copy_(torch.randint(-8, 8, (n,), generator=generator) * 0.5)  # halves: ties of rounding
        elif kind == 6:
            row[at] = float("nan")
        elif kind == 7:
            row[at] = -float("inf")
    return x.to(dtype)


def bits(x: Tensor) -> Tensor:
    """The bytes of `x` on the CPU, every NaN made the same."""
    x = x.detach().cpu()
    if x.is_floating_point():
        x = torch.where(x.isnan(), torch.full_like(x, float("nan")), x)
    return x.contiguous().view(torch.uint8)


def assert_same(name: str, got: Tensor, expected: Tensor) -> None:
    assert got.shape == expected.shape, name
    wrong = bits(got) != bits(expected)
    assert not wrong.any(), f"{name}: {int(wrong.sum())} bytes differ, first at {wrong.nonzero()[0].tolist()}"


def quantize_both(
    implementation: ModuleType,
    x: Tensor,
    fmt: BlockFormat,
    device: str,
    *,
    swapped: bool,
    offset: int,
    steps: int = 0,
    beta: float = 0.0,
    base: Tensor | None = None,
) -> None:
    """Quantize and dequantize x [A, B, n]; compare every byte with the reference.

    Args:
        steps: > 0: so many times, with feedback.
        beta: share of the earlier error in it.
        base: [A, B, n], whose difference from x is quantized; it lies one element further from the rows' starts.
    """
    lead, n = (x.shape[0], x.shape[1]), x.shape[2]
    results = []
    for module, place in ((reference, "cpu"), (implementation, device)):
        source_buffer, source = data(lead, n, x.dtype, place, offset=offset)
        source.copy_(x)
        base_buffer, subtracted = data(lead, n, (x if base is None else base).dtype, place, offset=offset + 1)
        if base is not None:
            subtracted.copy_(base)
        before = source_buffer.clone(), base_buffer.clone()
        sent = messages(lead, n, fmt, place, swapped=swapped)
        error = messages(lead, n, feedback_format(fmt), place, swapped=not swapped)
        feedback = Feedback(error.payload, error.scales)
        for part in feedback:
            part.zero_()
        history = []
        for _ in range(max(steps, 1)):
            module.quantize(
                *(source, fmt, sent.payload, sent.scales),
                feedback if steps else None,
                None if base is None else subtracted,
                beta,
            )
            history += [sent.message.clone(), error.message.clone()]
        out_buffer, out = data(lead, n, x.dtype, place, offset=offset)
        module.dequantize(sent.payload, sent.scales, fmt, out)
        assert_same("the input", source_buffer, before[0])
        assert_same("the base", base_buffer, before[1])
        results.append([*history, out_buffer])
    for step, (expected, got) in enumerate(zip(*results, strict=True)):
        assert_same(f"result {step} of {fmt}, n {n}, {x.dtype}", got, expected)


def sum_both(implementation: ModuleType, parts: Tensor, fmt: BlockFormat, device: str, dtype: torch.dtype) -> None:
    """Sum parts [K, M, n], with and without accumulation; compare every byte."""
    num_parts, num_rows, n = parts.shape
    received = messages((num_parts, num_rows), n, fmt, "cpu", swapped=True)
    reference.quantize(parts, fmt, received.payload, received.scales, None)
    results = []
    for module, place in ((reference, "cpu"), (implementation, device)):
        sent = messages((num_parts, num_rows), n, fmt, place, swapped=True)
        sent.message.copy_(received.message)
        payload, scales = sent.payload.unsqueeze(1), sent.scales.unsqueeze(1)  # [K, 1, M, ..]
        history = []
        buffer, out = data((1, num_rows), n, dtype, place, offset=3)
        for accumulate in (False, True, True):
            module.dequantize_sum(payload, scales, fmt, out, accumulate)
            history.append(buffer.clone())
        results.append(history)
    for step, (expected, got) in enumerate(zip(*results, strict=True)):
        assert_same(f"result {step} of {num_parts} x {fmt}, n {n}, {dtype}", got, expected)
