"""The codec that packs shards into messages and unpacks them: the only file between the hops and the kernels.

A, B: leading dims (peers), in any order of memory; S: elements of a shard; M: bytes of a message.
"""

from __future__ import annotations

import torch

from kernels.block_quant import (
    Feedback,
    dequantize_blockwise,
    dequantize_sum,
    quantize_blockwise,
)
from megazpp.zero.layout import ByteRange, MessageLayout

Errors = list[Feedback]


class Codec:
    """Packs and unpacks the shards of one unit.

    Args:
        layout: where the elements of a shard lie in its message.
        dtype: dtype of the elements that are not quantized.
    """

    def __init__(self, layout: MessageLayout, dtype: torch.dtype) -> None:
        self.layout, self.dtype = layout, dtype

    def empty(self, *peers: int, device: torch.device) -> torch.Tensor:
        """Messages to pack into, [*peers, M] uint8: zeros, so that the padding between parts compares equal."""
        return torch.zeros(*peers, self.layout.message_bytes, dtype=torch.uint8, device=device)

    def pack(
        self,
        shards: torch.Tensor,
        messages: torch.Tensor,
        *,
        errors: Errors | None = None,
        beta: float = 0.0,
        base: torch.Tensor | None = None,
    ) -> None:
        """shards [A, B, S] (any strides) -> messages [A, B, M].

        Args:
            errors: quantization errors of earlier packs, see `new_errors`; they are added first, and replaced.
            beta: share of the earlier errors in those that replace them (LoCo's moving average).
            base: [A, B, S] what the receivers have: quantized runs are differences from it, the others whole as ever.
        """
        quantized = 0
        for part in self.layout.ranges:
            values = shards[..., part.start : part.stop]
            if part.scales is None:
                self._exact(messages, part).copy_(values)
                continue
            assert self.layout.fmt is not None
            quantize_blockwise(
                values,
                self.layout.fmt,
                payload=_bytes(messages, part.payload),
                scales=_scales(messages, part),
                feedback=None if errors is None else errors[quantized],
                beta=beta,
                base=None if base is None else base[..., part.start : part.stop],
            )
            quantized += 1

    def new_errors(self, *peers: int, device: torch.device) -> Errors:
        """Zero quantization errors for messages [*peers, M]: int8 blocks, one byte per quantized element."""
        fmt = self.layout.fmt
        if fmt is None:
            return []
        runs = [part.stop - part.start for part in self.layout.ranges if part.scales is not None]
        return [Feedback.zeros(peers, run, fmt, device) for run in runs]

    def unpack(self, messages: torch.Tensor, shards: torch.Tensor) -> None:
        """messages [A, B, M] -> shards [A, B, S] (any strides)."""
        for part in self.layout.ranges:
            out = shards[..., part.start : part.stop]
            if part.scales is None:
                out.copy_(self._exact(messages, part))
                continue
            assert self.layout.fmt is not None
            dequantize_blockwise(_bytes(messages, part.payload), _scales(messages, part), self.layout.fmt, out=out)

    def unpack_onto(self, messages: torch.Tensor, base: torch.Tensor) -> None:
        """messages [B, M] -> base [B, S]: differences are added, each sum rounded once; what travels exact replaces."""
        for part in self.layout.ranges:
            out = base[..., part.start : part.stop]
            if part.scales is None:
                out.copy_(self._exact(messages, part))
                continue
            assert self.layout.fmt is not None
            payload, scales = _bytes(messages, part.payload).unsqueeze(0), _scales(messages, part).unsqueeze(0)
            dequantize_sum(payload, scales, self.layout.fmt, out=out, accumulate=True)

    def elements(self, messages: torch.Tensor) -> torch.Tensor:
        """A view of the elements [B, S] in messages [B, M] of which nothing is quantized."""
        (whole,) = self.layout.ranges
        return self._exact(messages, whole)

    def unpack_sum(self, messages: torch.Tensor, out: torch.Tensor, *, accumulate: bool) -> None:
        """The sum over peers: messages [K, B, M] -> out [B, S] fp32, added to what is there with `accumulate`."""
        for part in self.layout.ranges:
            target = out[..., part.start : part.stop]
            if part.scales is None:
                _sum_exact(self._exact(messages, part), target, accumulate=accumulate)
                continue
            assert self.layout.fmt is not None
            dequantize_sum(
                _bytes(messages, part.payload),
                _scales(messages, part),
                self.layout.fmt,
                out=target,
                accumulate=accumulate,
            )

    def _exact(self, messages: torch.Tensor, part: ByteRange) -> torch.Tensor:
        return _bytes(messages, part.payload).view(self.dtype)


def _bytes(messages: torch.Tensor, span: tuple[int, int]) -> torch.Tensor:
    return messages[..., span[0] : span[0] + span[1]]


def _scales(messages: torch.Tensor, part: ByteRange) -> torch.Tensor:
    assert part.scales is not None
    return _bytes(messages, part.scales).view(torch.bfloat16)


def _sum_exact(parts: torch.Tensor, out: torch.Tensor, *, accumulate: bool) -> None:
    """parts [K, B, n] summed in order in fp32."""
    if accumulate:
        out.add_(parts[0])
    else:
        out.copy_(parts[0])
    for part in parts[1:]:
        out.add_(part)
