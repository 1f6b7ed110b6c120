"""The codec that packs shards into messages and unpacks them: the only file between the hops and the kernels.

A, B: leading dims (peers), in any order of memory; S: elements of a shard; M: bytes of a message. Every method but
`elements` is one call of a kernel, whatever the number of parameters and peers.
"""

from __future__ import annotations

import torch

from kernels.block_quant import Feedback, pack, range_table, unpack, unpack_onto, unpack_sum
from kernels.formats import MessageLayout


class Codec:
    """Packs and unpacks the shards of one unit; elements that are not quantized travel in `dtype`."""

    def __init__(self, layout: MessageLayout, dtype: torch.dtype) -> None:
        self.layout, self.dtype = layout, dtype
        self._table = range_table(layout, dtype)

    def empty(self, *peers: int, device: torch.device) -> torch.Tensor:
        """Messages to pack into, [*peers, M] uint8: zeros, so that the padding between parts compares equal."""
        return torch.zeros(*peers, self.layout.message_bytes, dtype=torch.uint8, device=device)

    def pack(
        self,
        shards: torch.Tensor,
        messages: torch.Tensor,
        *,
        errors: Feedback | None = None,
        beta: float = 0.0,
        base: torch.Tensor | None = None,
    ) -> None:
        """shards [A, B, S] (any strides) -> messages [A, B, M].

        Args:
            errors: quantization errors of earlier packs, see `new_errors`; they are added first, and replaced.
            beta: share of the earlier errors in those that replace them (LoCo's moving average).
            base: [A, B, S] what the receivers have: quantized runs are differences from it, the others whole as ever.
        """
        pack(shards, self._table, messages=messages, errors=errors, beta=beta, base=base)

    def new_errors(self, *peers: int, device: torch.device) -> Feedback | None:
        """Zero quantization errors for messages [*peers, M]: int8 blocks, one byte per quantized element.

        None where nothing is quantized.
        """
        is_exact = all(part.scales is None for part in self.layout.ranges)
        return None if is_exact else Feedback.zeros(peers, self._table, device)

    def unpack(self, messages: torch.Tensor, shards: torch.Tensor) -> None:
        """messages [A, B, M] -> shards [A, B, S] (any strides)."""
        unpack(messages, self._table, out=shards)

    def unpack_onto(self, messages: torch.Tensor, base: torch.Tensor) -> None:
        """messages [B, M] -> base [B, S]: differences are added, each sum rounded once; what travels exact replaces."""
        unpack_onto(messages, self._table, out=base)

    def elements(self, messages: torch.Tensor) -> torch.Tensor:
        """A view of the elements [B, S] in messages [B, M] of which nothing is quantized."""
        (whole,) = self.layout.ranges
        start, num_bytes = whole.payload
        return messages[..., start : start + num_bytes].view(self.dtype)

    def unpack_sum(self, messages: torch.Tensor, out: torch.Tensor, *, accumulate: bool) -> None:
        """The sum over peers, in fp32: messages [K, B, M] -> out [B, S], onto what is there with `accumulate`."""
        unpack_sum(messages, self._table, out=out, accumulate=accumulate)
