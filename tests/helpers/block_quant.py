"""Build messages with awkward layouts, and compare two implementations of block quantization on them.

The functions fill every buffer that an implementation may write with 0xFF bytes (NaN in every float dtype). The
comparison then fails if the implementation misses an element, or writes a byte outside the elements.
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
    """Return the layout of a message whose segments have guard bytes between them.

    Args:
        sizes: (number of elements, True if the segment is quantized) of each segment, in order.
        fmt: block format of the quantized segments.
        itemsize: bytes per element of the exact segments.
    """
    ranges, offset, start = [], GUARD_BYTES, 0
    for size, is_quantized in sizes:
        payload = offset, fmt.payload_bytes(size) if is_quantized else size * itemsize
        scales = (align(sum(payload)) + 2, fmt.scale_bytes(size)) if is_quantized else None
        ranges.append(ByteRange(start=start, stop=start + size, payload=payload, scales=scales))
        offset, start = align(sum(scales or payload) + 1), start + size
    ranges.sort(key=lambda part: part.scales is None)
    return MessageLayout(size=start, message_bytes=offset, ranges=tuple(ranges), fmt=fmt)


def messages(lead: tuple[int, ...], layout: MessageLayout, device: str, *, swapped: bool) -> Tensor:
    """Return uint8 messages [A, B, M] with 0xFF in all M bytes of each message; `lead` is (A, B).

    With `swapped`, their order in memory is [B, A, M].
    """
    order = lead[::-1] if swapped else lead
    made = torch.full((*order, layout.message_bytes), 0xFF, dtype=torch.uint8, device=device)
    return made.transpose(0, 1) if swapped else made


def same_nans(messages: Tensor, layout: MessageLayout, dtype: torch.dtype) -> Tensor:
    """Return a copy of the messages in which every NaN of an unquantized segment has the same bits.

    A conversion between dtypes may choose any bits for a NaN, so the NaNs of two correct implementations may differ.
    """
    copied = messages.clone()
    for part in layout.ranges:
        if part.scales is None:
            values = span_of(copied, part.payload).view(dtype)
            values[values.isnan()] = torch.nan
    return copied


def placed(x: Tensor, device: str, offset: int) -> tuple[Tensor, Tensor]:
    """Copy x [..., n] into a larger buffer of NaN, so that reads or writes outside the rows show.

    Args:
        x: rows to copy.
        device: device of the buffer.
        offset: number of NaN elements before each row; 16 more follow the row.

    Returns:
        (the whole buffer, the view of the buffer that holds x).
    """
    *lead, n = x.shape
    buffer = torch.full((*lead, offset + n + 16), torch.nan, dtype=x.dtype, device=device)
    return buffer, buffer[..., offset : offset + n].copy_(x)


def difficult(lead: tuple[int, ...], n: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Return [*lead, n] random rows on the CPU that are difficult for block quantization.

    Successive rows have nearly equal magnitudes, zeros, subnormals, huge values, ties of the largest magnitude, ties of
    rounding, a NaN, or an infinity.
    """
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*lead, n, generator=generator)
    for index, row in enumerate(x.flatten(0, -2) if n else ()):
        at = int(torch.randint(n, (1,), generator=generator))
        kind = (index + seed) % 8
        if kind == 0:
            # nearly equal magnitudes, one of which sets the block's scale
            row[n // 2 :] = row[n // 2 :].sign() * torch.where(row[n // 2 :] > 1, 0.29, 0.3)
        elif kind == 1:
            row.zero_()[at] = -0.0
        elif kind == 2:
            row.mul_(1e-38)  # the blocks' scales become smaller than the smallest normal number
        elif kind == 3:
            row.mul_(3e36).clamp_(-3.3e38, 3.3e38)
        elif kind == 4:
            row[at] = row[0] = 4.0
            # 4 and -4 have the largest magnitude of a block, so the sign of the block's scale must be chosen as in the
            # reference implementation
            row[(at + 1) % n] = -4.0
        elif kind == 5:
            # multiples of 0.5, many of which lie halfway between two quantized values, so that rounding has ties
            row.copy_(torch.randint(-8, 8, (n,), generator=generator) * 0.5)
        else:
            row[at] = torch.nan if kind == 6 else -torch.inf
    return x.to(dtype)


def assert_same(name: str, got: Tensor, expected: Tensor) -> None:
    """Assert that two tensors have the same bytes, where all bit patterns of NaN count as the same."""
    got, expected = (
        torch.where(x.isnan(), torch.nan, x) if x.is_floating_point() else x for x in (got.cpu(), expected)
    )
    wrong = got.contiguous().view(torch.uint8) != expected.contiguous().view(torch.uint8)
    assert not wrong.any(), f"{name}: {int(wrong.sum())} bytes differ, first at {wrong.nonzero()[0].tolist()}"


def compare(run: Callable[[ModuleType, str], Iterator[Tensor]], with_: ModuleType, device: str, what: str) -> None:
    """Assert that an implementation of block quantization yields the same bytes as the reference.

    Args:
        run: function that takes (module of kernels, device), and yields the tensors to compare.
        with_: implementation to compare with the reference.
        device: device of the implementation; the reference runs on the CPU.
        what: description of the case, for the message of a failed assertion.
    """
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
    """Pack x into messages and unpack them, and compare every byte with the reference implementation.

    Args:
        implementation: module of kernels to compare with the reference.
        x: [A, B, n] on the CPU: A * B rows, each of which becomes one message.
        layout: message layout of one row.
        device: device on which the implementation runs.
        dtype: dtype of the exact segments in a message.
        swapped: True to store the messages as [B, A, M] in memory instead of [A, B, M].
        offset: number of elements before each row in its buffer, which sets the row's alignment.
        steps: number of times to pack with error feedback; 0 packs once without error feedback.
        beta: fraction of the earlier error in the stored error; the new error has the fraction 1 - beta.
        base: [A, B, n], which is subtracted from x before quantization; None subtracts nothing. Its rows start one
            element later in their buffer than the rows of x, so their alignment differs.
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
        yield source_buffer  # packing must not change x or its surroundings
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
    """Sum the rows of K messages into `dtype`, and compare every byte with the reference implementation.

    The sum is written once over NaN, and then twice added to the values in the output.

    Args:
        implementation: module of kernels to compare with the reference.
        parts: [K, M, n]: the K addends of M sums of n elements.
        layout: message layout of one row of n elements.
        device: device on which the implementation runs.
        dtype: dtype of the sums.
        exact: dtype of the exact segments in a message.
    """
    lead, table = parts.shape[:2], range_table(layout, exact)
    received = messages(lead, layout, "cpu", swapped=True)
    reference.pack(parts, table, received)

    def run(module: ModuleType, place: str) -> Iterator[Tensor]:
        sent = messages(lead, layout, place, swapped=True).copy_(received)
        buffer, out = placed(torch.full((1, *parts.shape[1:]), torch.nan, dtype=dtype), place, 3)
        for onto in (False, True, True):
            # the K addends of each of the M sums are messages [K, 1, M, bytes]
            module.unpack_sum(sent.unsqueeze(1), table, out, onto_quantized=onto, onto_exact=onto)
            yield buffer

    compare(run, implementation, device, f"{len(parts)} x {layout.fmt}, n {layout.size}, {dtype}")
