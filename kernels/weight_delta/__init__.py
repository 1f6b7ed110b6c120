"""Lossless differences of 16-bit weights: what has changed since a step, in fewer bits than the change has states.

Between two optimizer steps most 16-bit weights stay as they are and the others move by few units of their last place.
Sender and receiver hold the same old weights; the message says which new ones follow, bit for bit.

    message [M] uint8: | bytes wanted, elements left out: int64 each | kinds [B] | halves [B], to 16 | bodies [C] |

B blocks of 256 elements, whatever parameters they are of; C is the message's capacity. Blocks whose body ends beyond it
are left out whole: their weights stay old at every receiver, the sender's own copy too, so they are part of the next
difference. Three implementations agree bit for bit: `native` (C, on the CPU), `triton` (CUDA) and `reference` (which
says what a body is, and also computes on a CPU without a C compiler).
"""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

import megazpp.kernels.weight_delta.native as native
import megazpp.kernels.weight_delta.reference as reference
from megazpp.kernels.c_library import CLibraryError
from megazpp.kernels.formats import align
from megazpp.kernels.weight_delta.reference import BLOCK, EXPONENTS

HAS_TRITON = importlib.util.find_spec("triton") is not None
TRITON: ModuleType | None = importlib.import_module("megazpp.kernels.weight_delta.triton") if HAS_TRITON else None

__all__ = ["decode", "encode", "message_bytes", "numbers"]

NUMBERS = 16  # bytes of the two numbers in front


def message_bytes(size: int, capacity: int | None = None) -> int:
    """Bytes of a message for `size` elements; `capacity` bytes of bodies, by default enough for whatever changes."""
    return NUMBERS + align(2 * _num_blocks(size)) + align(2 * size if capacity is None else capacity)


def encode(new: Tensor, old: Tensor, message: Tensor) -> None:
    """Write the difference of [S] weights into a message.

    Args:
        new, old: [S] bf16 or fp16, contiguous.
        message: [M] uint8, M of `message_bytes`; all of it is written.
    Raises:
        ValueError: a shape, dtype, stride or device does not fit.
    """
    _check("old", old, new.dtype, new.shape, new.device)
    kinds, halves, body = _parts(message.unsqueeze(0), new)
    implementation = _implementation(new)
    if new.numel() == 0:
        message.zero_()
    if implementation is not None:
        implementation.encode(new, old, kinds[0], halves[0], body[0], message[:NUMBERS].view(torch.int64))


def decode(messages: Tensor, weights: Tensor) -> None:
    """Turn old weights into new ones, in place.

    Args:
        messages: [N, M] uint8 of N senders.
        weights: [N, S] what each sender's `old` was, bit for bit.
    Raises:
        ValueError: a shape, dtype, stride or device does not fit.
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
    """[N, M] -> [N, 2] int64: bytes that all bodies of a sender wanted, changed elements that it left out."""
    return messages[:, :NUMBERS].view(torch.int64)


def _num_blocks(size: int) -> int:
    return -(-size // BLOCK)


def _parts(messages: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[N, M] -> kinds [N, B], halves [N, B], bodies [N, C]."""
    num_blocks = _num_blocks(weights.shape[-1])
    start = NUMBERS + align(2 * num_blocks)
    _check("messages", messages, torch.uint8, messages.shape, weights.device)
    places = (messages.shape[-1], messages.stride(0), messages.storage_offset())
    if messages.shape[-1] < start or any(place % 16 for place in places):
        size = weights.shape[-1]
        raise ValueError(
            f"messages {tuple(messages.shape)} for {size} elements need multiples of 16 bytes from {start} on"
        )
    kinds, halves = (messages[:, NUMBERS + i * num_blocks :][:, :num_blocks] for i in (0, 1))
    return kinds, halves, messages[:, start:]


def _check(name: str, x: Tensor, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device) -> None:
    if x.dtype not in (*EXPONENTS, torch.uint8) or x.dtype != dtype or x.shape != shape or x.device != device:
        raise ValueError(
            f"{name} is {x.dtype} {tuple(x.shape)} on {x.device}; expected {dtype} {tuple(shape)} on {device}"
        )
    if x.shape[-1] > 1 and x.stride(-1) != 1:
        raise ValueError(f"{name} {tuple(x.shape)} has stride {x.stride(-1)} in its last dim; it must be contiguous")


def _implementation(tensor: Tensor) -> ModuleType | None:
    """The module that computes on the tensor's device; None for tensors without memory, and where there are none."""
    if isinstance(tensor, FakeTensor) or tensor.numel() == 0:
        return None
    if tensor.device.type == "cpu":
        return reference if isinstance(native.library(), CLibraryError) else native
    if TRITON is None:
        raise ValueError(f"differences of {tensor.device.type} weights need Triton: pip install triton")
    return TRITON
