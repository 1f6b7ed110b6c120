"""`--profile` and `--record-memory-history`: record iterations with torch's profiler, and the latest CUDA allocations.

A profiled rank writes a Chrome trace to the run folder, for ui.perfetto.dev. The trace shows the operators, kernels and
timeline spans of all threads. The name of a span starts with the span's track ("cross all_gather layers.3"). Profiling
costs no time on ranks and in iterations that are not profiled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, _ExperimentalConfig, profile, record_function

from megazpp.base.files import cause, first_free, renamed_when_done
from megazpp.base.program import say
from megazpp.training.config import MOST_ALLOCATIONS, ProfilerConfig
from megazpp.training.context import RunContext


class Profiler(AbstractContextManager["Profiler"]):
    """A context manager around training that records a trace and CUDA allocations, as the profiling flags request.

    Every rank constructs one. CUDA allocations are recorded from the construction on, so that they include the model.
    When the context ends without an error, a trace that is not written yet and the snapshot of the allocations are
    written. If the GPU runs out of memory, only the snapshot is written. Other errors write neither.

    Args:
        config: flags for profiling.
        run: process groups, log and run folder.
    """

    def __init__(self, config: ProfilerConfig, run: RunContext) -> None:
        self._config, self._dims, self._log = config, run.dims, run.log
        self._folder = Path()
        self._trace: profile | None = None
        self._first, self._done = config.profile_step_start + 1, False
        self._last: int | None = None  # last iteration that is recorded so far; None outside of a recording
        if config.profile or config.record_memory_history:
            folder = None if run.folder is None else str(run.folder.path.resolve())
            self._folder = Path(self._dims.world.share_object(folder))
        mine = self._dims.world.rank in config.profile_ranks
        self._profiles, self._remembers = config.profile and mine, config.record_memory_history and mine
        if self._remembers:
            torch.cuda.memory._record_memory_history(max_entries=MOST_ALLOCATIONS)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None and self._trace is not None:
            self._write_trace()
        if error is None and self._config.profile and not self._done:
            steps = f"iterations {self._first} to {self._config.profile_step_end}"
            self._log(f"--profile: this run took none of {steps}, so nothing was recorded")
        if self._remembers and (error is None or isinstance(error, torch.OutOfMemoryError)):
            snapshot = self._folder / Path(self._config.memory_snapshot_path).expanduser()
            path = _named_for(snapshot, f"rank{self._dims.world.rank}")
            _write(path, torch.cuda.memory._dump_snapshot)
            torch.cuda.memory._record_memory_history(enabled=None)
            self._log(f"memory snapshot: {path}")

    @contextmanager
    def step(self, iteration: int) -> Iterator[None]:
        """Return a context around the training step of `iteration`, which is recorded if --profile selects it."""
        if not (self._config.profile and self._first <= iteration <= self._config.profile_step_end):
            yield
            return
        if self._last is None:
            # The first recorded iteration, for log and file name. A resumed run may start after --profile-step-start.
            self._first = iteration
        if self._profiles and self._trace is None:
            cuda = [ProfilerActivity.CUDA] if self._dims.timeline.device_type == "cuda" else []
            # By default the profiler ignores threads that were started before it, such as the communication queues'.
            threads = _ExperimentalConfig(profile_all_threads=True)
            self._trace = profile(activities=[ProfilerActivity.CPU, *cuda], experimental_config=threads)
            self._trace.start()
            self._dims.timeline.attach(self)
        yield
        self._done, self._last = True, iteration
        if iteration == self._config.profile_step_end:
            if self._trace is not None:
                self._write_trace()
            ranks = " ".join(map(str, self._config.profile_ranks))
            self._log(f"profile of iterations {self._first} to {iteration}, rank {ranks}: {self._folder}")
            self._last = None

    def span(self, track: str, name: str) -> AbstractContextManager[Any]:
        """Return a context manager that records a timeline span in the profiler's trace; the timeline calls this."""
        return record_function(f"{track} {name}")

    def _write_trace(self) -> None:
        """Stop torch's profiler, and write its trace to the run folder."""
        assert self._trace is not None
        self._dims.timeline.detach(self)
        self._trace.stop()
        what = f"rank{self._dims.world.rank}-iterations{self._first}-{self._last}"
        _write(_named_for(self._folder / "profile.json.gz", what), self._trace.export_chrome_trace)
        self._trace = None


def _named_for(path: Path, what: str) -> Path:
    """Insert `what` into the file name of `path`, and also a number if such a file exists. Return the new path.

    For "profile.json.gz" and "rank0" the name is "profile-rank0.json.gz", or "profile-rank0-2.json.gz".
    """
    stem, dot, suffix = path.name.partition(".")
    return first_free(lambda n: path.with_name(f"{stem}-{what}{'' if n == 1 else f'-{n}'}{dot}{suffix}"))


def _write(path: Path, write: Callable[[str], object]) -> None:
    """Write the profiler's file `path`: call `write` with a temporary name, then rename the file.

    If this fails, a warning is printed, and training continues.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)  # other nodes than rank 0's may not have the run folder yet
        with renamed_when_done(path.with_name(f".unfinished-{path.name}"), path, synced=False) as unfinished:
            write(str(unfinished))
    except OSError as error:
        say(f"warning: {path} cannot be written: {cause(error)}")
