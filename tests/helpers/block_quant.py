"""Messages of segments in awkward places, and the comparison of two implementations of block quantization on them.

Every byte that a function may write lies in a buffer of 0xFF bytes (NaN in every float dtype): an element that was not
written, or a byte beside it that was, shows in the comparison.
"""

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from kernels.block_quant import Feedback, range_table, reference
from kernels.formats import BlockFormat, ByteRange, MessageLayout, align

GUARD_BYTES = 32


def one_segment(n: int, fmt: BlockFormat) -> MessageLayout:
    """Messages guard | payload | scales | guard of one segment."""
    payload, scales = (GUARD_BYTES, fmt.payload_bytes(n)), (GUARD_BYTES + fmt.payload_bytes(n), fmt.scale_bytes(n))
    segment = ByteRange(start=0, stop=n, payload=payload, scales=scales)
    return MessageLayout(size=n, message_bytes=align(sum(scales) + GUARD_BYTES), ranges=(segment,), fmt=fmt)


def many_segments(sizes: list[tuple[int, bool]], fmt: BlockFormat, itemsize: int) -> MessageLayout:
    """Messages of segments (elements, whether they are quantized), which lie side by side, with guards between them."""
    ranges, offset, start = [], GUARD_BYTES, 0
    for size, is_quantized in sizes:
        payload = offset, fmt.payload_bytes(size) if is_quantized else size * itemsize
        scales = (align(sum(payload)) + 2, fmt.scale_bytes(size)) if is_quantized else None
        ranges.append(ByteRange(start=start, stop=start + size, payload=payload, scales=scales))
        offset, start = align(sum(scales or payload) + 1), start + size
    ranges.sort(key=lambda part: part.scales is None)
    return MessageLayout(size=start, message_bytes=offset, ranges=tuple(ranges), fmt=fmt)


def messages(lead: tuple[int, ...], layout: MessageLayout, device: str, *, swapped: bool = False) -> Tensor:
    """Messages [A, B, M] of 0xFF bytes; they lie as [B, A, M] if `swapped`."""
    order = lead[::-1] if swapped else lead
    made = torch.full((*order, layout.message_bytes), 0xFF, dtype=torch.uint8, device=device)
    return made.transpose(0, 1) if swapped else made


def segments(messages: Tensor, layout: MessageLayout) -> list[tuple[Tensor, Tensor]]:
    """Views of every quantized segment: payload [..., bytes] uint8 and scales [..., blocks] bf16."""
    spans = [(part.payload, part.scales) for part in layout.ranges if part.scales is not None]
    return [
        (messages[..., a : a + num_bytes], messages[..., b : b + scale_bytes].view(torch.bfloat16))
        for (a, num_bytes), (b, scale_bytes) in spans
    ]


def same_nans(messages: Tensor, layout: MessageLayout, dtype: torch.dtype) -> Tensor:
    """A copy in which every NaN that travels as it is has the same bits: its conversion has a choice of them."""
    copied = messages.clone()
    for (start, num_bytes), scales in ((part.payload, part.scales) for part in layout.ranges):
        if scales is None:
            values = copied[..., start : start + num_bytes].view(dtype)
            values[values.isnan()] = torch.nan
    return copied


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
        if kind == 0:
            row[n // 2 :] = row[n // 2 :].sign() * torch.where(row[n // 2 :] > 1, 0.29, 0.3)  # of one size
        elif kind == 1:
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
    """Pack and unpack x [A, B, n]; compare every byte with the reference.

    Args:
        dtype: of what is not quantized.
        steps: > 0: so many times, with feedback.
        beta: share of the earlier error in it.
        base: [A, B, n], whose difference from x is quantized; it lies one element further from the rows' starts.
    """
    lead, n, table = (x.shape[0], x.shape[1]), x.shape[2], range_table(layout, dtype)
    results = []
    for module, place in ((reference, "cpu"), (implementation, device)):
        source_buffer, source = data(lead, n, x.dtype, place, offset=offset)
        source.copy_(x)
        base_buffer, subtracted = data(lead, n, (x if base is None else base).dtype, place, offset=offset + 1)
        if base is not None:
            subtracted.copy_(base)
        before = source_buffer.clone(), base_buffer.clone()
        sent = messages(lead, layout, place, swapped=swapped)
        kept = table.of_errors
        errors = Feedback(messages(lead, kept.layout, place, swapped=not swapped), kept)
        for part in (part for segment in errors.segments() for part in segment):
            part.zero_()
        history = []
        for _ in range(max(steps, 1)):
            module.pack(source, table, sent, errors if steps else None, None if base is None else subtracted, beta)
            history += [same_nans(sent, layout, dtype), errors.messages.clone()]
        for onto in (False, True):
            out_buffer, out = data(lead, n, x.dtype, place, offset=offset)
            out.copy_(x)
            module.unpack_sum(sent.unsqueeze(0), table, out, onto_quantized=onto, onto_exact=False)
            history.append(out_buffer)
        assert_same("the input", source_buffer, before[0])
        assert_same("the base", base_buffer, before[1])
        results.append(history)
    _compare(results, f"{layout.fmt}, n {n}, {x.dtype}")


def quantize_both(
    implementation: ModuleType, x: Tensor, fmt: BlockFormat, device: str, *, swapped: bool, offset: int, **how: Any
) -> None:
    """`pack_both` of one segment."""
    pack_both(implementation, x, one_segment(x.shape[2], fmt), device, swapped=swapped, offset=offset, **how)


def unpack_both(
    implementation: ModuleType,
    parts: Tensor,
    layout: MessageLayout,
    device: str,
    dtype: torch.dtype,
    exact: torch.dtype,
) -> None:
    """Sum parts [K, M, n] into `dtype`, with and without accumulation; compare every byte."""
    num_parts, num_rows, n = parts.shape
    table = range_table(layout, exact)
    received = messages((num_parts, num_rows), layout, "cpu", swapped=True)
    reference.pack(parts, table, received)
    results = []
    for module, place in ((reference, "cpu"), (implementation, device)):
        sent = messages((num_parts, num_rows), layout, place, swapped=True)
        sent.copy_(received)
        history = []
        buffer, out = data((1, num_rows), n, dtype, place, offset=3)
        for onto in (False, True, True):
            module.unpack_sum(sent.unsqueeze(1), table, out, onto_quantized=onto, onto_exact=onto)  # [K, 1, M, ..]
            history.append(buffer.clone())
        results.append(history)
    _compare(results, f"{num_parts} x {layout.fmt}, n {n}, {dtype}")


def _compare(results: list[list[Tensor]], what: str) -> None:
    for step, (expected, got) in enumerate(zip(*results, strict=True)):
        assert_same(f"result {step} of {what}", got, expected)
