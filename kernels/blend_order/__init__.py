"""The order of samples from a blend of datasets, as Megatron-Core's build_blending_indices computes it.

A dataset's share is its weight divided by the sum of all weights. Sample n comes from the dataset that is furthest
behind its share. This dataset has the largest share * max(n, 1) - taken, computed in fp64; in a tie, it is the first
dataset with this value. `taken` is the number of samples that a dataset has provided. Each choice depends on all
earlier ones. `native` (C) and `reference` (Python, for machines without a C compiler) make identical choices.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

import megazpp.kernels.blend_order.native as native
import megazpp.kernels.blend_order.reference as reference

__all__ = ["MOST_DATASETS", "blend_order"]

MOST_DATASETS = (1 << 15) - 1  # maximum number of datasets of a blend: int16 holds the number of a sample's dataset
SECONDS_BETWEEN_LINES = 3.0  # least time between two progress lines of `blend_order`
# Samples of the blend that `native` plans per call. A progress line can be printed only between calls. `reference` is
# slower, so it plans 16 times fewer samples per call.
_AT_ONCE = 1 << 20


def blend_order(
    weights: Sequence[float],
    num_samples: int,
    *,
    say: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
) -> tuple[npt.NDArray[np.int16], npt.NDArray[np.int64]]:
    """Determine from which dataset each sample of a blend comes.

    Args:
        weights: positive weights of up to MOST_DATASETS datasets; they need not sum to 1.
        num_samples: number of samples n of the blend.
        say: prints a progress line; called about every 3 seconds.
        clock: function that returns the time in seconds; tests replace it.
    Returns:
        [n] the index of each sample's dataset, and [n] the sample's number among the blend's samples from that dataset.
    """
    assert 0 < len(weights) <= MOST_DATASETS, f"a blend has 1 to {MOST_DATASETS} datasets, not {len(weights)}"
    # native.c compares AT_ONCE datasets at a time. So fill both arrays up to a multiple of AT_ONCE. The added datasets
    # have share 0 and an infinite `taken`, so they are never chosen.
    padding = (0, -len(weights) % native.AT_ONCE)
    shares = np.pad(np.array(weights) / np.sum(weights), padding)
    taken = np.pad(np.zeros(len(weights)), padding, constant_values=np.inf)
    plan, at_once, how = native.plan, _AT_ONCE, ""
    if missing := native.library().missing:
        plan, at_once, how = reference.plan, _AT_ONCE // 16, f" in Python ({missing})"
    datasets, numbers = np.empty(num_samples, dtype=np.int16), np.empty(num_samples, dtype=np.int64)
    started = said = clock()
    for first in range(0, num_samples, at_once):
        part = slice(first, first + at_once)
        plan(shares, taken, first, datasets[part], numbers[part])
        done, now = min(first + at_once, num_samples), clock()
        if now - said > SECONDS_BETWEEN_LINES and done < num_samples:
            said, left = now, (now - started) * (num_samples - done) / done
            say(f"blend of {len(weights)} datasets{how}: {done:,} of {num_samples:,} samples, {left:.0f} s left")
    return datasets, numbers
