"""Error feedback: what the last quantization lost, kept as int8 and added back before the next one.

The buffer is itself block-quantized (int8, the same block size as the message), so it costs about one byte per element;
against an fp32 buffer that loses nothing measurable. A block that was not finite leaves no error behind (scale 0,
payload 0), so one bad step cannot poison the steps after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from kernels.formats import BlockFormat


class Feedback(NamedTuple):
    """The error of segments in int8 format: payload uint8 [..., payload_bytes], scales bf16 [..., num_blocks]."""

    payload: torch.Tensor
    scales: torch.Tensor

    @classmethod
    def zeros(cls, lead: tuple[int, ...], n: int, fmt: BlockFormat, device: torch.device | str = "cpu") -> Feedback:
        """A buffer without error for segments of n elements that are sent in `fmt`."""
        stored = feedback_format(fmt)
        return cls(
            torch.zeros(*lead, stored.payload_bytes(n), dtype=torch.uint8, device=device),
            torch.zeros(*lead, stored.num_blocks(n), dtype=torch.bfloat16, device=device),
        )


def rescale_(errors: Sequence[Feedback], factor: torch.Tensor | float) -> None:
    """Multiply errors by `factor`, in one pass over their scales that waits for nothing.

    Args:
        errors: on one device.
        factor: a scalar on that device, finite; it and each product are rounded to bf16.
    """
    scales = [error.scales for error in errors]
    if scales:
        torch._foreach_mul_(scales, factor.to(torch.bfloat16) if isinstance(factor, torch.Tensor) else factor)


def feedback_format(fmt: BlockFormat) -> BlockFormat:
    """The format in which the error of a message in `fmt` is kept."""
    return BlockFormat(8, fmt.block_size)
