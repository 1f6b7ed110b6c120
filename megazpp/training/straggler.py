"""Slow ranks are named (--log-straggler).

One step per log interval is recorded on all ranks, as the timeline does it: a rank's compute time is its forward,
backward, norm and update without its waits and without the collectives that it stood in. Ranks that wait for a slow one
do not look slow themselves. On CUDA the times are the device's, and reading them waits for the device once.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from megazpp.flags import flag
from megazpp.parallel.timeline import COMPUTE, track_seconds
from megazpp.training.context import RunContext

SLOW = 1.2  # times the median
SHOWN = 8  # ranks


@dataclass(frozen=True, kw_only=True)
class StragglerConfig:
    """Stragglers: slow ranks are named."""

    log_straggler: bool = flag(
        False, f"measure one step per log interval and name the ranks that compute {SLOW} times as long as the median"
    )


class Straggler:
    """Records steps and compares ranks; every rank calls it.

    Args:
        config: whether to do anything.
        run: its timeline records, its world axis compares.
        interval: steps between two comparisons.
    """

    def __init__(self, config: StragglerConfig, run: RunContext, *, interval: int) -> None:
        self._interval = interval if config.log_straggler else None
        self._dims, self._log = run.dims, run.log

    @contextmanager
    def step(self, iteration: int) -> Iterator[None]:
        """Around iteration `iteration`."""
        timeline = self._dims.timeline
        if self._interval is None or iteration % self._interval:
            yield
            return
        recording = timeline.start()
        try:
            yield
        finally:
            spans = timeline.stop(recording)
        seconds = torch.tensor([track_seconds(spans)[COMPUTE]], dtype=torch.float64, device=self._dims.mesh.device_type)
        self._log(describe(iteration, self._dims.world.all_gather(seconds).tolist()))


def describe(iteration: int, seconds: Sequence[float]) -> str:
    """The line for compute seconds by rank."""
    median = statistics.median_low(seconds)  # of two ranks the faster one
    by_time = sorted(range(len(seconds)), key=lambda rank: -seconds[rank])
    slow = [rank for rank in by_time if seconds[rank] > SLOW * median]
    shown = ", ".join(f"rank {rank} {seconds[rank] / median:.2f} x" for rank in slow[:SHOWN])
    more = f" and {len(slow) - SHOWN} more" if len(slow) > SHOWN else ""
    fastest, slowest = by_time[-1], by_time[0]
    return (
        f"compute seconds of iteration {iteration}: median {median:.4f}, "
        f"fastest {seconds[fastest]:.4f} (rank {fastest}), slowest {seconds[slowest]:.4f} (rank {slowest}); "
        + (f"slow: {shown}{more}" if slow else "no slow rank")
    )
