"""Lossless deltas of 16-bit weights: an encoding of the changes since the last step, bit for bit.

Between two optimizer steps most 16-bit weights are unchanged, and the others change by few units in the last place.
Sender and receiver hold the same old weights. The message determines the new weights bit for bit.

    message [M] uint8: | bytes needed, elements left out: int64 each | kinds [B] | halves [B], to 16 | bodies [C] |

There are B blocks of 256 elements, regardless of parameter boundaries, and C bytes of capacity for their bodies. A
block's body encodes its changes in one of several ways, its kind; `halves` are the lengths of the bodies / 2. A block
whose body would end beyond the capacity is left out. Its weights then stay unchanged at every receiver and in the
sender's own copy, so the next difference contains them.

Three implementations agree bit for bit: `native` (C, for CPU tensors), `triton` (for CUDA tensors) and `reference`
(which defines the bodies, and serves CPUs without a C compiler).
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

import megazpp.kernels.weight_delta.native as native
import megazpp.kernels.weight_delta.reference as reference
from megazpp.kernels.formats import align
from megazpp.kernels.triton_module import triton_module
from megazpp.kernels.weight_delta.reference import BLOCK, EXPONENTS

TRITON = triton_module(__name__)

__all__ = ["decode", "encode", "message_bytes", "numbers"]

NUMBERS = 16  # bytes of the two counters at the start of a message


def message_bytes(size: int, capacity: int | None = None) -> int:
    """Return the bytes of a message for `size` elements.

    Args:
        size: number of elements.
        capacity: bytes for the bodies; None is enough for any change.
    """
    return NUMBERS + align(2 * _num_blocks(size)) + align(2 * size if capacity is None else capacity)


def encode(new: Tensor, old: Tensor, message: Tensor) -> None:
    """Encode how weights have changed, as a message.

    Args:
        new: [S] bf16 or fp16, contiguous, the new weights.
        old: [S] of the same dtype, contiguous, the weights that the receivers hold.
        message: [M] uint8, with M from `message_bytes`; all of it is written.
    Raises:
        ValueError: a shape, dtype, stride or device does not match.
    """
    _check("old", old, new.dtype, new.shape, new.device)
    kinds, halves, body = _parts(message.unsqueeze(0), new)
    implementation = _implementation(new)
    if new.numel() == 0:
        message.zero_()
    if implementation is not None:
        implementation.encode(new, old, kinds[0], halves[0], body[0], message[:NUMBERS].view(torch.int64))


def decode(messages: Tensor, weights: Tensor) -> None:
    """Turn the senders' old weights into their new ones, in place.

    Args:
        messages: [N, M] uint8, one message of each sender.
        weights: [N, S] each sender's old weights, bit for bit; updated.
    Raises:
        ValueError: a shape, dtype, stride or device does not match.
    """
    _check("weights", weights, weights.dtype, (len(messages), weights.shape[-1]), messages.device)
    parts = _parts(messages, weights)
    implementation = _implementation(weights)
    if implementation is TRITON and implementation is not None:
        implementation.decode(*parts, weights)
    elif implementation is not None:
        for row in zip(*parts, weights, strict=True):
            implementation.decode(*row)


def numbers(messages: Tensor) -> Tensor:
    """Return a view [N, 2] int64 of the two counters at the start of each of N messages.

    The first is the number of bytes that the encoded changes of all blocks needed. The second is the number of changed
    elements that had no room in the message.
    """
    return messages[:, :NUMBERS].view(torch.int64)


def _num_blocks(size: int) -> int:
    """Return the number of blocks of `size` elements."""
    return -(-size // BLOCK)


def _parts(messages: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return views of the parts of messages [N, M]: kinds [N, B], halves [N, B], bodies [N, C]."""
    num_blocks = _num_blocks(weights.shape[-1])
    start = NUMBERS + align(2 * num_blocks)
    _check("messages", messages, torch.uint8, messages.shape, weights.device)
    places = (messages.shape[-1], messages.stride(0), messages.storage_offset())
    if messages.shape[-1] < start or any(place % 16 for place in places):
        size = weights.shape[-1]
        raise ValueError(
            f"messages {tuple(messages.shape)} for {size} elements must have at least {start} bytes each, and sizes, "
            "strides and offsets that are multiples of 16 bytes"
        )
    kinds, halves = (messages[:, NUMBERS + i * num_blocks :][:, :num_blocks] for i in (0, 1))
    return kinds, halves, messages[:, start:]


def _check(name: str, x: Tensor, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device) -> None:
    """Raise ValueError unless a tensor has this dtype, shape and device, and a contiguous last dim."""
    if x.dtype not in (*EXPONENTS, torch.uint8) or x.dtype != dtype or x.shape != shape or x.device != device:
        raise ValueError(
            f"{name} is {x.dtype} {tuple(x.shape)} on {x.device}; expected {dtype} {tuple(shape)} on {device}"
        )
    if x.shape[-1] > 1 and x.stride(-1) != 1:
        raise ValueError(f"{name} {tuple(x.shape)} has stride {x.stride(-1)} in its last dim; it must be contiguous")


def _implementation(tensor: Tensor) -> ModuleType | None:
    """Return the module of kernels for the tensor's device; None for a meta tensor and for an empty one."""
    if isinstance(tensor, FakeTensor) or tensor.numel() == 0:
        return None
    if tensor.device.type == "cpu":
        return reference if native.library().missing else native
    if TRITON is None:
        raise ValueError(f"weight deltas of {tensor.device.type} tensors need Triton: pip install triton")
    return TRITON
