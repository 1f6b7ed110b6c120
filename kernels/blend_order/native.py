"""The order of a blend's samples in C: compiles native.c at first use, and calls its function through ctypes.

A call releases Python's global interpreter lock.
"""

from __future__ import annotations

from ctypes import c_int64, c_void_p
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from megazpp.kernels.c_library import find_c_library

library = partial(find_c_library, Path(__file__).with_name("native.c"))
AT_ONCE = 16  # number of datasets that native.c compares at once (the macro AT_ONCE)


def plan(
    shares: npt.NDArray[np.float64],
    taken: npt.NDArray[np.float64],
    first: int,
    datasets: npt.NDArray[np.int16],
    numbers: npt.NDArray[np.int64],
) -> None:
    """Choose the datasets of the blend's next n samples in C; see `reference.plan`.

    `library()` must have loaded the compiled C code. The number of datasets, D, must be a multiple of AT_ONCE.
    """
    shares_at, taken_at, *written = (c_void_p(x.ctypes.data) for x in (shares, taken, datasets, numbers))
    sizes = map(c_int64, (len(shares), first, len(datasets)))
    library().functions.megazpp_blend_order(shares_at, taken_at, *sizes, *written)
