"""Ends a job that hangs, and says who did not arrive, where, and what every rank was doing.

A thread in each rank looks at what the rank's other threads are doing: collectives of the axes, and the step around
them, which covers what does not pass through an axis (FSDP2's all-reduce between replicas, the wait for a GPU). When
nothing has moved for longer than the limit, it raises an alarm in the store, which all look at every few seconds. Every
rank's thread then puts its activity and its Python stacks there; the one that raised the alarm collects them, reports,
and all leave. Ranks that do not answer within ANSWER_SECONDS are stopped, gone, or hold Python's interpreter lock.

On CUDA the host runs ahead of the collectives: it stands still where it next waits for the device, and the rank that
has launched fewer collectives than the others is the one that they wait for.
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
ALARM, REPORTED, FOLDER, STATE = "alarm", "reported", "folder", "state/{}"  # in the store


class RankState(NamedTuple):
    """The activity of one rank when the alarm reached it."""

    doing: list[Doing]  # the innermost open span of each of its threads
    entered: Mapping[str, int]  # how many spans each track has had
    stacks: str  # of its Python threads

    @property
    def collectives(self) -> list[Doing]:
        return [doing for doing in self.doing if doing.track not in (COMPUTE, WAIT, STEP)]


class Watchdog:
    """Watches the timeline of `dims` while it is entered, with the limits of `config`.

    Args:
        folder: where rank 0 keeps the run's records; whoever raises the alarm tries to write its report there.
    """

    def __init__(self, worker: Worker, dims: ParallelDims, config: LaunchConfig, folder: Path | None) -> None:
        self._worker, self._dims, self._folder = worker, dims, folder
        self._first, self._later = config.hang_seconds
        store: Any = worker.store
        self._root = store.clone()  # the original may be blocked in another thread
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
        while not self._over.wait(min(POLL_SECONDS, self._later / 4)):
            limit = self._later if self._activity.entered[STEP] > 1 else self._first
            doing = self._activity.now()
            stuck = bool(doing) and doing[0].seconds > limit
            try:
                if stuck or self._store.check([ALARM]):
                    self._end_job(limit)
            except dist.DistError as error:  # the store's host has ended before us
                if stuck:
                    print(f"rank {self._worker.rank} hangs, and the store is gone: {error}", file=sys.stderr)
                    leave(EXIT_HANG)

    def _end_job(self, limit: float) -> None:
        store, rank = self._store, self._worker.rank
        raised_it = store.add(ALARM, 1) == 1
        state = RankState(self._activity.now(), self._activity.entered, python_stacks())
        store.set(STATE.format(rank), json.dumps(state))
        if not raised_it:
            _wait_for(store, [REPORTED], 2 * ANSWER_SECONDS)
            leave(EXIT_SECONDARY)
        self._root.add(FAILURES.format(self._worker.restarts), 1)  # what breaks from now on is an echo
        keys = [STATE.format(r) for r in range(self._worker.world_size)]
        _wait_for(store, keys, ANSWER_SECONDS)
        answers = {r: json.loads(store.get(key)) for r, key in enumerate(keys) if store.check([key])}
        states = {r: RankState([Doing(*each) for each in doing], *rest) for r, (doing, *rest) in answers.items()}
        report = describe_hang(states, self._dims.layout, limit)
        text = report + "".join(f"\n==== rank {r}\n{states[r].stacks}" for r in sorted(states))
        try:
            file = Path(store.get(FOLDER).decode()) / f"hang-{time.strftime('%Y%m%d-%H%M%S')}.txt"
            file.write_text(text)
            where = f"the stacks of all ranks: {file}"
        except (OSError, dist.DistError) as error:
            where = f"(no file with the stacks of all ranks: {error})\n{text}"
        print(f"\n{report}\n{where}", file=sys.stderr, flush=True)
        store.set(REPORTED, "")
        leave(EXIT_HANG)


def describe_hang(states: Mapping[int, RankState], layout: Layout, limit: float) -> str:
    """Name the collectives that ranks wait for, who has not arrived, and the stacks of those who keep others waiting.

    `states` are those of the ranks that have answered, `limit` the seconds without movement.
    """
    everyone = tuple(range(layout.cluster.world_size))
    lines = [f"watchdog: the job has not moved for {limit:g} s"]
    waiting: dict[tuple[str, tuple[int, ...], int, str], list[int]] = {}
    for rank, state in sorted(states.items()):
        for doing in state.collectives:
            members = everyone if doing.track == "world" else layout.axis_ranks(doing.track, rank)
            waiting.setdefault((doing.track, members, doing.number, doing.name), []).append(rank)
    absent: set[int] = set()
    for (axis, members, number, name), arrived in waiting.items():
        missing = [r for r in members if r not in states or states[r].entered.get(axis, 0) < number]
        absent.update(missing)
        end = f"{_ranks(missing)} did not arrive" if missing else "all ranks are in it, and it does not finish"
        lines.append(f"  {name} number {number} on axis {axis}: {_ranks(arrived)} waiting, {end}")
    if not waiting:
        lines += _behind(states)
    silent = set(everyone) - states.keys()
    if silent:
        lines.append(f"  {_ranks(silent)} did not answer: stopped, gone, or stuck outside Python")
    culprits = [r for r in sorted(absent - silent) if not states[r].collectives] or [r for r in states if not waiting]
    for rank in culprits:
        state = states[rank]
        doing_now = ", ".join(f"{d.track} {d.name} for {d.seconds:.0f} s" for d in state.doing) or "outside the step"
        lines.append(f"  rank {rank}: {doing_now}\n{state.stacks}")
    return "\n".join(lines)


def _behind(states: Mapping[int, RankState]) -> list[str]:
    """Name who has started fewer spans than others; for CUDA, and for collectives that pass through no axis."""
    lines = []
    for track in sorted({track for state in states.values() for track in state.entered} - {COMPUTE, WAIT}):
        counts = {rank: state.entered.get(track, 0) for rank, state in states.items()}
        most = max(counts.values())
        if behind := [rank for rank, count in counts.items() if count < most]:
            lines.append(f"  {track}: {_ranks(behind)} started fewer than the others' {most}")
    return lines


def python_stacks() -> str:
    """The stacks of this process's Python threads but the caller's, the main thread first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main, me = threading.main_thread().ident, threading.get_ident()
    frames = sorted(sys._current_frames().items(), key=lambda item: item[0] != main)
    return "".join(
        f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in frames
        if ident != me
    )


def _wait_for(store: dist.Store, keys: list[str], seconds: float) -> None:
    """Wait until all keys are there, at most `seconds`."""
    deadline = time.monotonic() + seconds
    while not store.check(keys) and time.monotonic() < deadline:
        time.sleep(0.05)


def _ranks(ranks: set[int] | list[int]) -> str:
    numbers = sorted(ranks)
    shown = ", ".join(map(str, numbers[:16])) + (", ..." if len(numbers) > 16 else "")
    return f"rank{'s' * (len(numbers) > 1)} {shown}"
