"""The timeline of one optimizer step: recorded on all ranks, gathered, written to the run folder, and summed up.

Recording begins one step early, because what the step before leaves in flight (the cross gathers) runs under this one.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from megazpp.flags import flag
from megazpp.parallel.timeline import COMPUTE, STEP, WAIT, Recording, Span, align, clip, hidden_shares, track_seconds
from megazpp.training.chrome_trace import chrome_trace, sorted_tracks
from megazpp.training.context import RunContext


@dataclass(frozen=True, kw_only=True)
class TimelineConfig:
    """Timeline (trace) of one step on all ranks."""

    timeline_step: int | None = flag(
        None,
        "record what every rank does in this iteration (the first is 1): timeline.json in the run folder, "
        "for ui.perfetto.dev or tools/plot_timeline.py",
    )


def check_timeline(config: TimelineConfig, *, total_iterations: int, exit_interval: int | None, trains: bool) -> None:
    """Refuse a step that the run does not have.

    Raises:
        ValueError: names the flags and their values.
    """
    step = config.timeline_step
    if step is None:
        return
    if step < 1:
        raise ValueError(f"--timeline-step {step} is not positive: the first iteration is 1")
    if not trains:
        raise ValueError(f"--timeline-step {step}: --skip-train takes no step")
    if step > total_iterations:
        raise ValueError(f"--timeline-step {step} is beyond the run's {total_iterations} iterations")
    if exit_interval is not None and step > exit_interval:
        raise ValueError(f"--timeline-step {step} is beyond --exit-interval {exit_interval}, where the run ends")


class StepTimeline:
    """Records the step that the flags name; every rank calls it.

    Args:
        config: which step.
        run: its timeline is the one that records, its world axis gathers, and rank 0 writes to its folder.
    """

    def __init__(self, config: TimelineConfig, run: RunContext) -> None:
        self._step, self._dims, self._folder, self._log = config.timeline_step, run.dims, run.folder, run.log
        self._barrier_end = 0.0
        self._recording: Recording | None = None

    @contextmanager
    def step(self, iteration: int) -> Iterator[None]:
        """Around iteration `iteration`, data included."""
        timeline = self._dims.timeline
        if self._step is None or not self._step - 1 <= iteration <= self._step:
            with timeline.span(STEP, f"step {iteration}"):  # for the watchdog
                yield
            return
        if self._recording is None:
            self._barrier()
            self._recording = timeline.start()
        if iteration < self._step:
            yield
            return
        with timeline.span(STEP, f"step {iteration}"):
            yield
        self._finish(timeline.stop(self._recording))

    def _barrier(self) -> None:
        float(self._dims.world.all_reduce_(torch.zeros((), device=self._dims.mesh.device_type)))
        self._barrier_end = time.perf_counter()

    def _finish(self, spans: list[Span]) -> None:
        (whole,) = (span for span in spans if span.track == STEP)
        inside = clip(spans, whole.start_seconds, whole.end_seconds)
        gathered = self._dims.world.gather_objects((inside, _host(), self._barrier_end))
        if self._folder is None or not gathered:
            return
        spans_by_rank = align(*zip(*gathered, strict=True))
        cluster = self._dims.layout.cluster
        names = [f"rank {rank}, node {cluster.node_of(rank)}" for rank in range(len(spans_by_rank))]
        self._folder.write_timeline(chrome_trace(spans_by_rank, names))
        self._log(describe(whole.name, spans_by_rank))


def describe(name: str, spans_by_rank: Sequence[Sequence[Span]]) -> str:
    """Seconds of each track, mean over the ranks, and how much of each axis's time was hidden."""
    by_rank = [(spans, track_seconds(spans)) for spans in spans_by_rank]
    step_seconds = max(seconds[STEP] for _, seconds in by_rank)
    lines = [f"timeline of {name}: {step_seconds:.3f} s; busy seconds of each track, mean of {len(by_rank)} ranks:"]
    for track in sorted_tracks([span for spans in spans_by_rank for span in spans])[1:]:
        total = sum(seconds.get(track, 0.0) for _, seconds in by_rank)
        line = f"  {track:<10} {total / len(by_rank):9.4f} s"
        if track not in (COMPUTE, WAIT):
            shares = [(seconds[track], hidden_shares(spans, track)) for spans, seconds in by_rank if track in seconds]
            compute, work = (
                sum(weight * hidden[kind] for weight, hidden in shares if hidden) / total for kind in range(2)
            )
            line += f", {compute:.0%} hidden behind compute, {work:.0%} behind compute and other hops"
        lines.append(line)
    return "\n".join(lines)


def _host() -> str:
    """The same on all processes that share a monotonic clock, and nowhere else."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text().strip() if boot.exists() else platform.node()
