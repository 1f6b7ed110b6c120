"""Build messages with awkward layouts, and compare two implementations of block quantization on them.

Every buffer that a function may write is filled with 0xFF bytes (NaN in every float dtype). An element that was not
written, or a byte that was written outside the elements, makes the comparison fail.
"""

from collections.abc import Callable, Iterator
from types import ModuleType

import torch
from torch import Tensor

from megazpp.kernels.block_quant import Feedback, range_table, reference
from megazpp.kernels.block_quant.range_table import span_of
from megazpp.kernels.formats import BlockFormat, ByteRange, MessageLayout, align

GUARD_BYTES = 32


def layout_of(sizes: list[tuple[int, bool]], fmt: BlockFormat, itemsize: int = 4) -> MessageLayout:
    """Lay out adjacent segments, given as (elements, is quantized), with guard bytes between them in the message."""
    ranges, offset, start = [], GUARD_BYTES, 0
    for size, is_quantized in sizes:
        payload = offset, fmt.payload_bytes(size) if is_quantized else size * itemsize
        scales = (align(sum(payload)) + 2, fmt.scale_bytes(size)) if is_quantized else None
        ranges.append(ByteRange(start=start, stop=start + size, payload=payload, scales=scales))
        offset, start = align(sum(scales or payload) + 1), start + size
    ranges.sort(key=lambda part: part.scales is None)
    return MessageLayout(size=start, message_bytes=offset, ranges=tuple(ranges), fmt=fmt)


def messages(lead: tuple[int, ...], layout: MessageLayout, device: str, *, swapped: bool) -> Tensor:
    """Return messages [A, B, M] of 0xFF bytes; in memory they are [B, A, M] if `swapped`."""
    order = lead[::-1] if swapped else lead
    made = torch.full((*order, layout.message_bytes), 0xFF, dtype=torch.uint8, device=device)
    return made.transpose(0, 1) if swapped else made


def same_nans(messages: Tensor, layout: MessageLayout, dtype: torch.dtype) -> Tensor:
    """Return a copy in which all NaN in exact segments have the same bits, since dtype conversion may choose any."""
    copied = messages.clone()
    for part in layout.ranges:
        if part.scales is None:
            values = span_of(copied, part.payload).view(dtype)
            values[values.isnan()] = torch.nan
    return copied


def placed(x: Tensor, device: str, offset: int) -> tuple[Tensor, Tensor]:
    """Return (NaN buffer, view of it that holds x), with `offset` elements before each row and guards after it."""
    *lead, n = x.shape
    buffer = torch.full((*lead, offset + n + 16), torch.nan, dtype=x.dtype, device=device)
    return buffer, buffer[..., offset : offset + n].copy_(x)


def difficult(lead: tuple[int, ...], n: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Return CPU rows of many magnitudes with zeros, subnormals, ties, huge values, NaN and infinities."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*lead, n, generator=generator)
    for index, row in enumerate(x.flatten(0, -2) if n else ()):
        at = int(torch.randint(n, (1,), generator=generator))
        kind = (index + seed) % 8
        if kind == 0:
            row[n // 2 :] = row[n // 2 :].sign() * torch.where(row[n // 2 :] > 1, 0.29, 0.3)  # nearly equal magnitudes
        elif kind == 1:
            row.zero_()[at] = -0.0
        elif kind == 2:
            row.mul_(1e-38)  # scales below the smallest normal
        elif kind == 3:
            row.mul_(3e36).clamp_(-3.3e38, 3.3e38)
        elif kind == 4:
            row[at] = row[0] = 4.0
            row[(at + 1) % n] = -4.0  # a tie of signs
        elif kind == 5:
            row.copy_(torch.randint(-8, 8, (n,), generator=generator) * 0.5)  # halves: ties of rounding
        else:
            row[at] = torch.nan if kind == 6 else -torch.inf
    return x.to(dtype)


def assert_same(name: str, got: Tensor, expected: Tensor) -> None:
    """Assert that two tensors have the same bytes, except that any NaN equals any other."""
    got, expected = (
        torch.where(x.isnan(), torch.nan, x) if x.is_floating_point() else x for x in (got.cpu(), expected)
    )
    wrong = got.contiguous().view(torch.uint8) != expected.contiguous().view(torch.uint8)
    assert not wrong.any(), f"{name}: {int(wrong.sum())} bytes differ, first at {wrong.nonzero()[0].tolist()}"


def compare(run: Callable[[ModuleType, str], Iterator[Tensor]], with_: ModuleType, device: str, what: str) -> None:
    """Assert that all results of `run` are equal on the reference and on the implementation `with_`."""
    for step, (expected, got) in enumerate(zip(run(reference, "cpu"), run(with_, device), strict=True)):
        assert_same(f"result {step} of {what}", got, expected)


def pack_both(
    implementation: ModuleType,
    x: Tensor,
    layout: MessageLayout,
    device: str,
    *,
    dtype: torch.dtype = torch.float32,
    swapped: bool = False,
    offset: int = 0,
    steps: int = 0,
    beta: float = 0.0,
    base: Tensor | None = None,
) -> None:
    """Pack and unpack x [A, B, n], and compare every byte with the reference.

    Args:
        implementation: module to compare with the reference.
        x: [A, B, n] on the CPU.
        layout: message layout of one row.
        device: device on which the implementation runs.
        dtype: dtype of exact segments in the message.
        swapped: whether the messages' two leading dims are swapped in memory.
        offset: number of elements before each row in its buffer.
        steps: number of times to pack with error feedback; 0 packs once without it.
        beta: share of the earlier error in the stored error.
        base: [A, B, n], whose difference from x is quantized; its rows start one element later than the rows of x.
    """
    lead, table = x.shape[:2], range_table(layout, dtype)

    def run(module: ModuleType, place: str) -> Iterator[Tensor]:
        source_buffer, source = placed(x, place, offset)
        base_buffer, subtracted = placed(x if base is None else base, place, offset + 1)
        sent = messages(lead, layout, place, swapped=swapped)
        errors = Feedback(messages(lead, table.of_errors.layout, place, swapped=not swapped), table.of_errors)
        for part in (part for segment in errors.segments() for part in segment):
            part.zero_()
        for _ in range(max(steps, 1)):
            module.pack(source, table, sent, errors if steps else None, None if base is None else subtracted, beta)
            yield same_nans(sent, layout, dtype)
            yield errors.messages
        yield source_buffer  # must be unchanged
        yield base_buffer
        for onto in (False, True):
            buffer, out = placed(x, place, offset)
            module.unpack_sum(sent.unsqueeze(0), table, out, onto_quantized=onto, onto_exact=False)
            yield buffer

    compare(run, implementation, device, f"{layout.fmt}, n {layout.size}, {x.dtype}")


def unpack_both(
    implementation: ModuleType,
    parts: Tensor,
    layout: MessageLayout,
    device: str,
    dtype: torch.dtype,
    exact: torch.dtype,
) -> None:
    """Sum parts [K, M, n] into `dtype`, with and without accumulation, and compare every byte."""
    lead, table = parts.shape[:2], range_table(layout, exact)
    received = messages(lead, layout, "cpu", swapped=True)
    reference.pack(parts, table, received)

    def run(module: ModuleType, place: str) -> Iterator[Tensor]:
        sent = messages(lead, layout, place, swapped=True).copy_(received)
        buffer, out = placed(torch.full((1, *parts.shape[1:]), torch.nan, dtype=dtype), place, 3)
        for onto in (False, True, True):
            module.unpack_sum(sent.unsqueeze(1), table, out, onto_quantized=onto, onto_exact=onto)  # [K, 1, M, ..]
            yield buffer

    compare(run, implementation, device, f"{len(parts)} x {layout.fmt}, n {layout.size}, {dtype}")
