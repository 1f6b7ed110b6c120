"""The watchdog: ends a job that hangs, and reports which ranks are missing from which collective.

A thread in each rank watches the spans that the rank's other threads have open in the timeline. These are the
collectives of the mesh axes, and the optimizer step around them. The step also covers work outside the axes, such as
FSDP2's all-reduce between replicas or a wait for the GPU.

    1. If no span of a rank has begun or ended for longer than the limit, its watchdog raises an alarm in the store.
       All watchdogs poll the store every few seconds.
    2. Each watchdog writes its rank's open spans and Python stacks to the store.
    3. The watchdog that raised the alarm collects them and prints a report. Then all ranks exit.

Ranks that do not answer within ANSWER_SECONDS are stopped, have ended, or have a thread that holds Python's
interpreter lock.

On CUDA the host launches collectives ahead of the device and blocks only when it next waits for the device. The report
then names the ranks that have launched fewer collectives than the others, because the others wait for these ranks.
"""

from __future__ import annotations

import json
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from megazpp.base.program import EXIT_HANG, EXIT_SECONDARY
from megazpp.parallel.dims import ParallelDims
from megazpp.parallel.launch import LaunchConfig
from megazpp.parallel.timeline import COMPUTE, STEP, WAIT, Activity, Doing
from megazpp.parallel.worker import FAILURES, Worker, leave
from megazpp.topology.layout import Layout

ANSWER_SECONDS = 5.0
POLL_SECONDS = 5.0
ALARM, REPORTED, FOLDER, STATE = "alarm", "reported", "folder", "state/{}"  # keys in the store


class RankState(NamedTuple):
    """The activity of one rank at the moment when it noticed the alarm."""

    doing: list[Doing]  # the innermost open span of each of its threads
    entered: Mapping[str, int]  # number of spans that each track has had
    stacks: str  # formatted stacks of its Python threads

    @property
    def collectives(self) -> list[Doing]:
        """The open spans of this rank that are collectives."""
        return [doing for doing in self.doing if doing.track not in (COMPUTE, WAIT, STEP)]


class Watchdog:
    """A context manager during which a thread watches this rank's timeline and ends the job if it hangs.

    Args:
        worker: this rank.
        dims: axes whose timeline is watched.
        config: limits, see `LaunchConfig.hang_seconds`.
        folder: on rank 0 the run's folder, on other ranks None. The rank that raises the alarm writes the report there.
    """

    def __init__(self, worker: Worker, dims: ParallelDims, config: LaunchConfig, folder: Path | None) -> None:
        self._worker, self._dims, self._folder = worker, dims, folder
        self._first, self._later = config.hang_seconds
        store: Any = worker.store
        self._root = store.clone()  # another thread may be blocked in a call on the original connection
        self._store = dist.PrefixStore(f"megazpp/hang/{worker.restarts}", self._root)
        self._activity = Activity()
        dims.timeline.attach(self._activity)
        self._over = threading.Event()

    def __enter__(self) -> Watchdog:
        if self._folder is not None:
            self._store.set(FOLDER, str(self._folder.resolve()))
        threading.Thread(target=self._watch, name="megazpp-watchdog", daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._dims.timeline.detach(self._activity)

    def _watch(self) -> None:
        """Poll this rank's activity and the alarm until the context ends. Runs in the watchdog's thread."""
        while not self._over.wait(min(POLL_SECONDS, self._later / 4)):
            limit = self._later if self._activity.entered[STEP] > 1 else self._first
            doing = self._activity.now()
            stuck = bool(doing) and doing[0].seconds > limit
            try:
                if stuck or self._store.check([ALARM]):
                    self._end_job(limit)
            except dist.DistError as error:  # the process that hosts the store has ended
                if stuck:
                    print(f"rank {self._worker.rank} hangs, and the store cannot be reached: {error}", file=sys.stderr)
                    leave(EXIT_HANG)

    def _end_job(self, limit: float) -> None:
        """Write this rank's state to the store, report if this rank is the first to raise the alarm, and exit.

        Args:
            limit: seconds without progress after which the job counts as hung, for the report.
        """
        store, rank = self._store, self._worker.rank
        raised_it = store.add(ALARM, 1) == 1
        state = RankState(self._activity.now(), self._activity.entered, python_stacks())
        store.set(STATE.format(rank), json.dumps(state))
        if not raised_it:
            _wait_for(store, [REPORTED], 2 * ANSWER_SECONDS)
            leave(EXIT_SECONDARY)
        # Claim the failure, so that ranks whose collectives break from now on stay silent.
        self._root.add(FAILURES.format(self._worker.restarts), 1)
        keys = [STATE.format(r) for r in range(self._worker.world_size)]
        _wait_for(store, keys, ANSWER_SECONDS)
        answers = {r: json.loads(store.get(key)) for r, key in enumerate(keys) if store.check([key])}
        states = {r: RankState([Doing(*each) for each in doing], *rest) for r, (doing, *rest) in answers.items()}
        report = describe_hang(states, self._dims.layout, limit)
        text = report + "".join(f"\n==== rank {r}\n{states[r].stacks}" for r in sorted(states))
        try:
            file = Path(store.get(FOLDER).decode()) / f"hang-{time.strftime('%Y%m%d-%H%M%S')}.txt"
            file.write_text(text)
            where = f"the stacks of all ranks are in {file}"
        except (OSError, dist.DistError) as error:
            where = f"(the stacks of all ranks could not be written to a file: {error})\n{text}"
        print(f"\n{report}\n{where}", file=sys.stderr, flush=True)
        store.set(REPORTED, "")
        leave(EXIT_HANG)


def describe_hang(states: Mapping[int, RankState], layout: Layout, limit: float) -> str:
    """Return the report about a hang.

    It lists the collectives in which ranks wait, the ranks that are missing from each, and the stacks of the missing
    ranks that are in no collective themselves.

    Args:
        states: states of the ranks that have answered, by rank.
        layout: layout that gives the members of each collective.
        limit: seconds without progress.
    """
    everyone = tuple(range(layout.cluster.world_size))
    lines = [f"watchdog: the job has made no progress for {limit:g} s"]
    waiting: dict[tuple[str, tuple[int, ...], int, str], list[int]] = {}
    for rank, state in sorted(states.items()):
        for doing in state.collectives:
            members = everyone if doing.track == "world" else layout.axis_ranks(doing.track, rank)
            waiting.setdefault((doing.track, members, doing.number, doing.name), []).append(rank)
    absent: set[int] = set()
    for (axis, members, number, name), arrived in waiting.items():
        missing = [r for r in members if r not in states or states[r].entered.get(axis, 0) < number]
        absent.update(missing)
        end = f"{_ranks(missing)} did not arrive" if missing else "all ranks are in it, but it does not finish"
        lines.append(f"  {name} number {number} on axis {axis}: {_ranks(arrived)} waiting, {end}")
    if not waiting:
        lines += _behind(states)
    silent = set(everyone) - states.keys()
    if silent:
        lines.append(f"  {_ranks(silent)} did not answer: stopped, ended, or stuck outside Python")
    culprits = [r for r in sorted(absent - silent) if not states[r].collectives] or [r for r in states if not waiting]
    for rank in culprits:
        state = states[rank]
        doing_now = ", ".join(f"{d.track} {d.name} for {d.seconds:.0f} s" for d in state.doing) or "outside the step"
        lines.append(f"  rank {rank}: {doing_now}\n{state.stacks}")
    return "\n".join(lines)


def _behind(states: Mapping[int, RankState]) -> list[str]:
    """Return a line for each track in which some ranks have started fewer spans than others.

    This finds the missing ranks if no rank is inside a collective of an axis. On CUDA the host only launches
    collectives, and FSDP2's own collectives use no axis.
    """
    lines = []
    for track in sorted({track for state in states.values() for track in state.entered} - {COMPUTE, WAIT}):
        counts = {rank: state.entered.get(track, 0) for rank, state in states.items()}
        most = max(counts.values())
        if behind := [rank for rank, count in counts.items() if count < most]:
            lines.append(f"  {track}: {_ranks(behind)} started fewer than the others' {most}")
    return lines


def python_stacks() -> str:
    """Return the formatted stacks of all Python threads except the calling one, the main thread first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main, me = threading.main_thread().ident, threading.get_ident()
    frames = sorted(sys._current_frames().items(), key=lambda item: item[0] != main)
    return "".join(
        f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in frames
        if ident != me
    )


def _wait_for(store: dist.Store, keys: list[str], seconds: float) -> None:
    """Wait until all keys are in the store, but at most `seconds`."""
    deadline = time.monotonic() + seconds
    while not store.check(keys) and time.monotonic() < deadline:
        time.sleep(0.05)


def _ranks(ranks: set[int] | list[int]) -> str:
    """Return "rank 3" or "ranks 1, 2", with at most 16 numbers."""
    numbers = sorted(ranks)
    shown = ", ".join(map(str, numbers[:16])) + (", ..." if len(numbers) > 16 else "")
    return f"rank{'s' * (len(numbers) > 1)} {shown}"
