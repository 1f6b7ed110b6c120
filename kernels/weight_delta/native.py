"""Lossless deltas of CPU tensors in C: compiles native.c at first use, and calls its functions through ctypes.

A call runs on one thread and releases Python's global interpreter lock. Concurrent calls share no state.

Letters in shapes, as in format.py: S: number of weights; B: number of blocks of 256 weights; C: bytes of all bodies
together.
"""

from __future__ import annotations

from ctypes import c_int64, c_void_p
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from megazpp.kernels.c_library import find_c_library

library = partial(find_c_library, Path(__file__).with_name("native.c"))


def encode(new: Tensor, old: Tensor, kinds: Tensor, halves: Tensor, body: Tensor, numbers: Tensor) -> None:
    """Encode the lossless delta from old to new weights, in C.

    Args:
        new: [S] bf16 or fp16, new weights.
        old: [S] of the same dtype, old weights, which the receivers hold.
        kinds: [B] uint8, receives the kind of each block's body, which holds the block's encoded changes.
        halves: [B] uint8, receives half of each body's size in bytes. Half the size of a complete raw body, 256, does
            not fit into uint8 and becomes 0; `decode` knows the size of a raw body from its kind.
        body: [C] uint8, receives the bodies one after another, without bodies that would end beyond these C bytes.
        numbers: [2] int64, receives the bytes that the bodies of all blocks need, and the number of changed elements in
            the blocks that were left out.
    """
    data, table = ([c_void_p(x.data_ptr()) for x in group] for group in ((new, old), (kinds, halves, body)))
    size, capacity, fp16 = c_int64(len(new)), c_int64(len(body)), c_int64(new.dtype == torch.float16)
    library().functions.megazpp_encode(*data, size, fp16, *table, capacity, c_void_p(numbers.data_ptr()))


def decode(kinds: Tensor, halves: Tensor, body: Tensor, weights: Tensor) -> None:
    """Apply a lossless delta to old weights in place, in C.

    Args:
        kinds: [B] uint8, kinds of the bodies, from `encode`.
        halves: [B] uint8, halves of the bodies' sizes in bytes.
        body: [C] uint8, the bodies.
        weights: [S] bf16 or fp16, old weights, which become the new weights.
    """
    places = [c_void_p(x.data_ptr()) for x in (kinds, halves, body)]
    size, capacity, fp16 = c_int64(len(weights)), c_int64(len(body)), c_int64(weights.dtype == torch.float16)
    library().functions.megazpp_decode(*places, capacity, size, fp16, c_void_p(weights.data_ptr()))
