"""Lossless deltas of CPU tensors in C: compiles native.c at first use, and calls its functions through ctypes.

A call runs on one thread and releases Python's global interpreter lock. Concurrent calls share no state.
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
    """Encode the lossless delta from old to new weights, in C; see `reference.encode`."""
    data, table = ([c_void_p(x.data_ptr()) for x in group] for group in ((new, old), (kinds, halves, body)))
    size, capacity, fp16 = c_int64(len(new)), c_int64(len(body)), c_int64(new.dtype == torch.float16)
    library().functions.megazpp_encode(*data, size, fp16, *table, capacity, c_void_p(numbers.data_ptr()))


def decode(kinds: Tensor, halves: Tensor, body: Tensor, weights: Tensor) -> None:
    """Apply a lossless delta to old weights in place, in C; see `reference.decode`."""
    places = [c_void_p(x.data_ptr()) for x in (kinds, halves, body)]
    size, capacity, fp16 = c_int64(len(weights)), c_int64(len(body)), c_int64(weights.dtype == torch.float16)
    library().functions.megazpp_decode(*places, capacity, size, fp16, c_void_p(weights.data_ptr()))
