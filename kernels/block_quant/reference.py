"""Block quantization in plain torch: the definition that the other implementations must match bit for bit.

`pack` and `unpack_sum` loop over the segments of a message. The functions below them pad a segment to whole blocks,
view it as [.., blocks, block_size] in fp32, and write their results into the given tensors. This code is written to be
read, not to be fast.

Letters in shapes: "..": leading dims of data and messages; K: number of messages that are summed per row; n: elements
of a row or of a segment; M: bytes of a message.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megazpp.kernels.block_quant.range_table import Feedback, RangeTable, span_of
from megazpp.kernels.formats import BlockFormat, feedback_format

SMALLEST_NORMAL = torch.finfo(torch.float32).tiny


def pack(
    x: Tensor,
    table: RangeTable,
    messages: Tensor,
    errors: Feedback | None = None,
    base: Tensor | None = None,
    beta: float = 0.0,
) -> None:
    """Quantize rows x [.., n] into messages [.., M] with torch; see `megazpp.kernels.block_quant.pack`."""
    lost = [] if errors is None else errors.segments()
    for index, part in enumerate(table.layout.ranges):
        if part.start == part.stop:
            continue
        values = x[..., part.start : part.stop]
        if part.scales is None:
            span_of(messages, part.payload).view(table.dtype).copy_(values)
            continue
        assert table.layout.fmt is not None
        quantize(
            values,
            table.layout.fmt,
            span_of(messages, part.payload),
            span_of(messages, part.scales).view(torch.bfloat16),
            lost[index] if lost else None,
            None if base is None else base[..., part.start : part.stop],
            beta,
        )


def unpack_sum(messages: Tensor, table: RangeTable, out: Tensor, *, onto_quantized: bool, onto_exact: bool) -> None:
    """Dequantize K messages per row, and sum them in fp32 in the order 0..K-1 into the rows of `out`.

    Args:
        messages: [K, .., M] uint8, for each row K messages of M bytes, one from each of K ranks.
        table: list of the segments of a row and of their bytes in a message.
        out: [.., n], rows of n elements, written; the sums are rounded once to the dtype of `out`.
        onto_quantized: True if sums of quantized elements start with the values in `out`; False overwrites them.
        onto_exact: True if sums of unquantized elements start with the values in `out`; False overwrites them.
    """
    for part in table.layout.ranges:
        if part.start == part.stop:
            continue
        target, payload = out[..., part.start : part.stop], span_of(messages, part.payload)
        if part.scales is not None:
            assert table.layout.fmt is not None
            scales = span_of(messages, part.scales).view(torch.bfloat16)
            dequantize_sum(payload, scales, table.layout.fmt, target, onto_quantized)
            continue
        rows = payload.view(table.dtype)
        if len(rows) == 1 and not onto_exact:
            target.copy_(rows[0])
            continue
        total = target.float() + rows[0].float() if onto_exact else rows[0].float()
        for row in rows[1:]:
            total = total + row.float()
        target.copy_(total)


def quantize(
    x: Tensor,
    fmt: BlockFormat,
    payload: Tensor,
    scales: Tensor,
    error: tuple[Tensor, Tensor] | None = None,
    base: Tensor | None = None,
    beta: float = 0.0,
) -> None:
    """Quantize one segment of a message in blocks, with error feedback or minus a base if they are given.

    Args:
        x: [.., n] the n elements of the segment, weights or gradients.
        fmt: format with the bits and the block size.
        payload: [.., bytes] uint8, receives the integers.
        scales: [.., blocks] bf16, receives the blocks' scales.
        error: (payload, scales) of the segment in error feedback's buffer, in int8. The error is added to the elements
            and then replaced by the new quantization error. None without error feedback.
        base: [.., n] values that the receivers hold, subtracted from the elements; None subtracts nothing.
        beta: weight of the earlier error in the error that replaces it (LoCo's moving average); 0 <= beta < 1.
    """
    values = _to_blocks(x, fmt) if base is None else _to_blocks(x, fmt) - _to_blocks(base, fmt)
    if error is not None:
        stored = feedback_format(fmt)
        earlier = _dequantize_blocks(*error, stored)
        values = values + earlier
    integers, scale = _integers_and_scale(values, fmt)
    payload.copy_(_pack(integers, fmt))
    _store_scales(scales, scale)
    if error is not None:
        lost = values - integers * scale.unsqueeze(-1)
        if beta > 0:
            lost = lost * (1 - beta) + earlier * beta
        integers, scale = _integers_and_scale(lost, stored)
        error[0].copy_(_pack(integers, stored))
        _store_scales(error[1], torch.where(scale.isnan(), 0.0, scale))


def dequantize_sum(payload: Tensor, scales: Tensor, fmt: BlockFormat, out: Tensor, accumulate: bool) -> None:
    """Dequantize one segment of K messages, and sum the K results in fp32 in the order 0..K-1 into out [.., n].

    Args:
        payload: [K, .., bytes] uint8, integers of the segment in each message.
        scales: [K, .., blocks] bf16, scales of the segment in each message.
        fmt: format with the bits and the block size.
        out: [.., n], written; the sums are rounded once to its dtype.
        accumulate: True if the sums start with the values in `out`; False overwrites them.
    """
    parts = list(_dequantize_blocks(payload, scales, fmt))
    if accumulate:
        parts.insert(0, _to_blocks(out, fmt))
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    out.copy_(total.flatten(-2)[..., : out.shape[-1]])


def _integers_and_scale(values: Tensor, fmt: BlockFormat) -> tuple[Tensor, Tensor]:
    """Quantize fp32 blocks [.., blocks, block_size] without packing the integers into bytes.

    Returns:
        The integers in fp32, in the shape of `values`, and the scales of the blocks, [.., blocks] in fp32 but exact in
        bf16.
    """
    scale = _scale(values, fmt)
    usable = scale.isfinite() & (scale != 0)
    inverse = torch.where(usable, 1 / scale, 0.0).unsqueeze(-1)
    quotient = torch.where(usable.unsqueeze(-1), values, 0.0) * inverse
    beyond = 1 << (fmt.bits - 1)
    # `round` rounds half to even. Only int4 needs the clamp, because int8's scale is rounded up and clips nothing.
    return quotient.round().clamp(-beyond, beyond - 1), scale


def _scale(values: Tensor, fmt: BlockFormat) -> Tensor:
    """Return the scales [.., blocks] of fp32 blocks [.., blocks, block_size], in fp32 that is exact in bf16.

    The scale is NaN if the block contains NaN or Inf, and 0 if it would be subnormal. `BlockFormat` has the formulas.
    """
    peak = values.abs().amax(-1)  # the largest magnitude of each block; NaN if the block contains NaN
    if fmt.bits == 8:
        scale = _round_up_to_bf16(peak * _constant(1 / 127, peak))
    else:
        lowest = -values.amin(-1)
        opposite = torch.minimum(values.amax(-1), lowest).clamp(min=0)
        scale = torch.maximum(peak * _constant(1 / 8.4375, peak), opposite * _constant(1 / 7.4375, peak))
        scale = peak * _constant(1 / 9, peak) if fmt.clip else scale
        near = (values.abs() >= (peak * 0.9375).unsqueeze(-1)).sum(-1)
        scale = torch.where(near * 2 >= fmt.block_size, peak * _constant(1 / 7, peak), scale).bfloat16().float()
        # The scale's sign makes the integer of the element with the largest absolute value negative, because int4
        # reaches from -8 to 7.
        scale = torch.where(lowest == peak, scale, -scale)
    scale = torch.where(scale.abs() < SMALLEST_NORMAL, 0.0, scale)
    return torch.where(peak.isfinite(), scale, torch.nan)


def _constant(value: float, like: Tensor) -> Tensor:
    """Return `value` as an fp32 scalar tensor on the device of `like`, independent of torch's default dtype."""
    return torch.tensor(value, dtype=torch.float32, device=like.device)


def _round_up_to_bf16(x: Tensor) -> Tensor:
    """Round x >= 0 up to the next number that is exact in bf16, and return it in fp32.

    Rounding int8's scales up ensures that quantization clips nothing.
    """
    return ((x.view(torch.int32) + 0xFFFF) & ~0xFFFF).view(torch.float32)


def _store_scales(scales: Tensor, scale: Tensor) -> None:
    """Write blocks' scales into `scales`, a bf16 view of a message, by copying their upper 16 bits.

    torch's conversion to bf16 produces two different NaN bit patterns, so messages would not be reproducible.

    Args:
        scales: [.., blocks] bf16, written.
        scale: [.., blocks] fp32, exact in bf16.
    """
    scales.view(torch.int16).copy_(scale.view(torch.int32) >> 16)


def _pack(integers: Tensor, fmt: BlockFormat) -> Tensor:
    """Pack integers [.., blocks, block_size], given in fp32, into a message's bytes [.., blocks * block_bytes] uint8.

    Byte j of an int4 block holds element j in its low half and element j + block_size / 2 in its high half.
    """
    if fmt.bits == 8:
        return integers.to(torch.int8).view(torch.uint8).flatten(-2)
    low, high = (integers + 8).to(torch.uint8).chunk(2, dim=-1)
    return (low | (high << 4)).flatten(-2)


def _dequantize_blocks(payload: Tensor, scales: Tensor, fmt: BlockFormat) -> Tensor:
    """Dequantize a segment's bytes [.., bytes] and bf16 scales [.., blocks] into fp32 [.., blocks, block_size].

    Each result is integer times scale, which fp32 represents exactly.
    """
    packed = payload.unflatten(-1, (-1, fmt.block_bytes)) if payload.shape[-1] else payload.unsqueeze(-1)
    if fmt.bits == 8:
        integers = packed.view(torch.int8).float()
    else:
        integers = torch.cat([packed & 15, packed >> 4], dim=-1).float() - 8
    return integers * scales.float().unsqueeze(-1)


def _to_blocks(x: Tensor, fmt: BlockFormat) -> Tensor:
    """Copy n elements, x [.., n], into fp32 blocks [.., blocks, block_size], and fill the last block with zeros."""
    num_blocks = fmt.num_blocks(x.shape[-1])
    padded = torch.zeros(*x.shape[:-1], num_blocks * fmt.block_size, dtype=torch.float32, device=x.device)
    padded[..., : x.shape[-1]] = x
    return padded.unflatten(-1, (num_blocks, fmt.block_size))
