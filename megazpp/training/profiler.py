"""`--profile`: torch's profiler over some iterations of some ranks; `--record-memory-history`: CUDA's allocations.

A profiled rank leaves a Chrome trace in the run folder, for ui.perfetto.dev: operators, kernels, and the timeline's
spans under their track and name ("cross all_gather layers.3"), of all threads. Other ranks and iterations pay nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, _ExperimentalConfig, profile, record_function

from megazpp.base.files import first_free
from megazpp.base.flags import flag
from megazpp.training.context import RunContext

MOST_ALLOCATIONS = 100_000  # that a snapshot looks back on; Megatron's number


@dataclass(frozen=True, kw_only=True)
class ProfilerConfig:
    """Profiling.

    torch's profiler and the history of CUDA allocations.
    """

    profile: bool = flag(
        False, "record operators, kernels and hops with torch.profiler: a trace for ui.perfetto.dev in the run folder"
    )
    profile_step_start: int = flag(10, "begin to record when this many iterations are done")
    profile_step_end: int = flag(12, "the last iteration that is recorded")
    profile_ranks: tuple[int, ...] = flag(
        (0,), "ranks that --profile and --record-memory-history record", nargs="+", metavar="RANK"
    )
    record_memory_history: bool = flag(
        False,
        f"on CUDA: remember the last {MOST_ALLOCATIONS} allocations with their stacks, see --memory-snapshot-path",
    )
    memory_snapshot_path: str = flag(
        "snapshot.pickle",
        "file for --record-memory-history, written when training ends or runs out of memory, for "
        "pytorch.org/memory_viz; relative to the run folder, the rank is put behind its name",
    )

    def __post_init__(self) -> None:
        start, end = self.profile_step_start, self.profile_step_end
        if self.profile and not 0 <= start < end:
            raise ValueError(f"--profile-step-start {start} is not below --profile-step-end {end}, or negative")


class Profiler(AbstractContextManager["Profiler"]):
    """Records what the flags ask for; every rank makes one. CUDA's allocations are recorded from its making on.

    While it is entered the job trains; what is not written yet is written at the end.
    """

    def __init__(self, config: ProfilerConfig, run: RunContext) -> None:
        self._config, self._dims, self._log = config, run.dims, run.log
        self._folder = Path()
        self._trace: profile | None = None
        self._first, self._done = config.profile_step_start + 1, False
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
            self._log(f"--profile: iteration {self._first} was not reached here, nothing was recorded")
        if self._remembers and (error is None or isinstance(error, torch.OutOfMemoryError)):
            snapshot = self._folder / Path(self._config.memory_snapshot_path).expanduser()
            path = _named_for(snapshot, f"rank{self._dims.world.rank}")
            _write(path, torch.cuda.memory._dump_snapshot)
            torch.cuda.memory._record_memory_history(enabled=None)
            self._log(f"memory snapshot: {path}")

    @contextmanager
    def step(self, iteration: int) -> Iterator[None]:
        """Around iteration `iteration`."""
        if not (self._config.profile and self._first <= iteration <= self._config.profile_step_end):
            yield
            return
        if self._profiles and self._trace is None:
            self._first = iteration  # later than asked for where the run continues one
            self._start()
        yield
        self._done, self._last = True, iteration
        if iteration == self._config.profile_step_end:
            if self._trace is not None:
                self._write_trace()
            ranks = " ".join(map(str, self._config.profile_ranks))
            self._log(f"profile of iterations {self._first} to {iteration}, rank {ranks}: {self._folder}")

    def span(self, track: str, name: str) -> AbstractContextManager[Any]:
        """For the timeline."""
        return record_function(f"{track} {name}")

    def _start(self) -> None:
        activities = [ProfilerActivity.CPU]
        if self._dims.timeline.device_type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        # a queue's thread is older than the profiler, which would leave it out
        self._trace = profile(activities=activities, experimental_config=_ExperimentalConfig(profile_all_threads=True))
        self._trace.start()
        self._dims.timeline.attach(self)

    def _write_trace(self) -> None:
        assert self._trace is not None
        self._dims.timeline.detach(self)
        self._trace.stop()
        what = f"rank{self._dims.world.rank}-iterations{self._first}-{self._last}"
        _write(_named_for(self._folder / "profile.json.gz", what), self._trace.export_chrome_trace)
        self._trace = None


def _named_for(path: Path, what: str) -> Path:
    """`path` with `what` in its name, and a number where that is taken."""
    stem, dot, suffix = path.name.partition(".")
    return first_free(lambda n: path.with_name(f"{stem}-{what}{'' if n == 1 else f'-{n}'}{dot}{suffix}"))


def _write(path: Path, write: Callable[[str], object]) -> None:
    """Have a file written beside its place, then renamed; a record that cannot be kept ends no training."""
    unfinished = path.with_name(f".unfinished-{path.name}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)  # a run folder that no other node shares
        write(str(unfinished))
        unfinished.replace(path)
    except OSError as error:
        print(f"warning: {path} cannot be written: {error}", file=sys.stderr)
        unfinished.unlink(missing_ok=True)
