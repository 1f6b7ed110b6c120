"""Lossless deltas of 16-bit weights: encode and decode how weights have changed since they were last sent.

Between two optimizer steps most 16-bit weights are unchanged, and the others change by few units in the last place.
Sender and receiver hold the same old weights. From the message the receiver restores the new weights bit for bit.

    message [M] uint8: | bytes needed, elements left out: int64 each | kinds [B] | halves [B] | bodies [C] |

The S weights of a message of M bytes are cut into B blocks of 256 elements, regardless of parameter boundaries. A
block's body holds the encoded changes of its elements, and its kind says in which way they are encoded. `halves` has
half of each body's size in bytes, and `kinds` and `halves` together are padded to a multiple of 16 bytes. The bodies of
all blocks share a capacity of C bytes. A block whose body would end beyond the capacity is left out. Its weights then
stay unchanged at every receiver and in the sender's copy of what receivers hold, so the next delta contains these
changes.

Two implementations agree bit for bit: `native` (C, for CPU tensors) and `triton` (for CUDA tensors). format.py defines
the bodies. There is no implementation for CPUs without a C compiler: in PyTorch alone, encoding takes 40,000 times as
long. The functions assert that shapes, dtypes, strides and devices of their arguments match.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

import megazpp.kernels.weight_delta.native as native
from megazpp.kernels.formats import align
from megazpp.kernels.triton_module import triton_module
from megazpp.kernels.weight_delta.format import BLOCK, EXPONENTS

TRITON = triton_module(__name__)

__all__ = ["decode", "encode", "message_bytes", "missing", "numbers"]

NUMBERS = 16  # bytes of the two int64 counters at the start of a message; see the function `numbers`


def message_bytes(size: int, capacity: int | None = None) -> int:
    """Return the number of bytes of a message with the lossless delta of `size` weights.

    Args:
        size: number of weights.
        capacity: bytes for the encoded changes; None reserves 2 bytes per weight, which suffices for any change.
    """
    return NUMBERS + align(2 * _num_blocks(size)) + align(2 * size if capacity is None else capacity)


def encode(new: Tensor, old: Tensor, message: Tensor) -> None:
    """Encode the lossless delta from `old` to `new` weights into a message.

    Blocks whose changes do not fit into the message are left out. `numbers` returns how many changed elements these
    blocks have.

    Args:
        new: [S] bf16 or fp16, contiguous, the S new weights.
        old: [S] of the same dtype, contiguous, the weights that the receivers hold.
        message: [M] uint8, with M bytes from `message_bytes`; all bytes are written.
    """
    _check("old", old, new.dtype, new.shape, new.device)
    kinds, halves, body = _parts(message.unsqueeze(0), new)
    implementation = _implementation(new)
    if new.numel() == 0:
        message.zero_()
    if implementation is not None:
        implementation.encode(new, old, kinds[0], halves[0], body[0], message[:NUMBERS].view(torch.int64))


def decode(messages: Tensor, weights: Tensor) -> None:
    """Apply the lossless deltas of N senders to their old weights, which become the new weights in place.

    Args:
        messages: [N, M] uint8, one message of M bytes from each of N senders, written by `encode`.
        weights: [N, S] bf16 or fp16, a row of S old weights for each sender, with the bits of `old` in the sender's
            call of `encode`; updated in place.
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
    """Return a view [N, 2] int64 of the two counters at the start of each of N messages with lossless deltas.

    The first counter is the number of bytes that the encoded changes of all blocks needed. The second is the number of
    changed elements that the message left out for lack of capacity.
    """
    return messages[:, :NUMBERS].view(torch.int64)


def _num_blocks(size: int) -> int:
    """Return the number of blocks of 256 elements that `size` elements are cut into."""
    return -(-size // BLOCK)


def _parts(messages: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return views of three parts of messages [N, M]: `kinds` [N, B], `halves` [N, B] and the bodies [N, C].

    `kinds` has the kind of the body of each of B blocks, `halves` half of the body's size in bytes, and the C bytes of
    the bodies have the encoded changes. The top of this file describes them.

    Args:
        messages: [N, M] uint8, N messages of M bytes with lossless deltas.
        weights: [..., S] the S weights of each message; S determines B, and the messages must be on the same device.
    """
    num_blocks = _num_blocks(weights.shape[-1])
    start = NUMBERS + align(2 * num_blocks)
    _check("messages", messages, torch.uint8, messages.shape, weights.device)
    places = (messages.shape[-1], messages.stride(0), messages.storage_offset())
    assert places[0] >= start, f"messages have {places[0]} bytes each, and at least {start} are needed"
    is_aligned = not any(place % 16 for place in places)
    assert is_aligned, f"size, stride and offset {places} of messages must be multiples of 16 bytes"
    kinds, halves = (messages[:, NUMBERS + i * num_blocks :][:, :num_blocks] for i in (0, 1))
    return kinds, halves, messages[:, start:]


def _check(name: str, x: Tensor, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device) -> None:
    """Assert that a tensor has this dtype, shape and device, and a contiguous last dim.

    `name` is the tensor's argument name for the error message. Weights must be bf16 or fp16, and messages uint8.
    """
    assert x.dtype in (*EXPONENTS, torch.uint8), f"{name} is {x.dtype}; expected bf16, fp16 or, for messages, uint8"
    found, expected = (x.dtype, x.shape, x.device), (dtype, shape, device)
    assert found == expected, f"{name} is {found}; expected {expected}"
    is_contiguous = x.shape[-1] < 2 or x.stride(-1) == 1
    assert is_contiguous, f"{name} {tuple(x.shape)} has stride {x.stride(-1)} in its last dim instead of 1"


def missing(device_type: str) -> str:
    """Return why this process cannot encode deltas on devices of a type, "cpu" or "cuda"; "" if it can."""
    if device_type == "cpu":
        return native.library().missing
    return "" if TRITON is not None else "Triton is not installed: pip install triton"


def _implementation(tensor: Tensor) -> ModuleType | None:
    """Return the module that encodes deltas on this tensor's device: native (C) or triton.

    None for a FakeTensor and for an empty tensor, for which nothing is computed.
    """
    if isinstance(tensor, FakeTensor) or tensor.numel() == 0:
        return None
    device_type = tensor.device.type
    if problem := missing(device_type):
        raise ValueError(f"lossless deltas of {device_type} tensors cannot be computed: {problem}")
    return native if device_type == "cpu" else TRITON
