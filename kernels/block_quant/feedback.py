"""Error feedback: what the last quantization lost, kept as int8 and added back before the next one.

The buffer is itself a message (int8, the same block size as the message that was sent, of the quantized segments
alone), so it costs about one byte per element; against an fp32 buffer that loses nothing measurable. A block that was
not finite leaves no error behind (scale 0, payload 0), so one bad step cannot poison the steps after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from kernels.block_quant.range_table import RangeTable


class Feedback(NamedTuple):
    """The errors of messages of which something is quantized: [..., E] uint8, and where their segments lie."""

    messages: torch.Tensor
    table: RangeTable

    @classmethod
    def zeros(cls, lead: tuple[int, ...], table: RangeTable, device: torch.device | str = "cpu") -> Feedback:
        """A buffer without error for messages [*lead, M] of `table`."""
        kept = table.of_errors
        return cls(torch.zeros(*lead, kept.layout.message_bytes, dtype=torch.uint8, device=device), kept)

    def segments(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Views of every quantized segment's error: payload [..., bytes] uint8 and scales [..., blocks] bf16."""
        return [
            (self.messages[..., a : a + num_bytes], self.messages[..., b : b + scale_bytes].view(torch.bfloat16))
            for (a, num_bytes), (b, scale_bytes) in (
                (part.payload, part.scales) for part in self.table.layout.ranges if part.scales is not None
            )
        ]

    @property
    def scales(self) -> torch.Tensor:
        """A view of the scales of all segments, [..., blocks] bf16."""
        spans = [part.scales for part in self.table.layout.ranges if part.scales is not None]
        return self.messages[..., spans[0][0] : sum(spans[-1])].view(torch.bfloat16)


def rescale_(errors: Sequence[Feedback], factor: torch.Tensor | float) -> None:
    """Multiply errors by `factor`, in one pass over their scales that waits for nothing.

    Args:
        errors: on one device.
        factor: a scalar on that device, finite; it and each product are rounded to bf16.
    """
    scales = [error.scales for error in errors]
    if scales:
        torch._foreach_mul_(scales, factor.to(torch.bfloat16) if isinstance(factor, torch.Tensor) else factor)
