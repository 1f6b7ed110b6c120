"""The watchdog: ends a job that hangs in any phase, and reports which ranks are missing from which collective.

`worker_process` starts two threads in each rank before the process group exists. They run until the process exits:

    judge     decides whether the job hangs, from data in this process alone; it never waits for the store
    exchange  reads and writes the store every few seconds, and may block there

The judge ends the job for one of four reasons:

    1. A thread of this rank is inside a span of the timeline, and has neither begun nor ended a span for longer than
       the limit. Spans are the collectives of the mesh axes, the optimizer step around them, and the files of a
       checkpoint. The step also covers work outside the axes, such as FSDP2's all-reduce between replicas or a wait for
       the GPU.
    2. The heartbeat of the next rank (rank + 1, or rank 0 for the last rank) has not changed for longer than the limit.
       A heartbeat is a counter in the store. That rank was stopped, or its machine is down. This reason does not depend
       on spans, so it covers a process from its start to its end.
    3. Another rank has raised the alarm in the store.
    4. The store has not answered for longer than the limit: the store's machine, or the link to it, is down.

For reasons 1 and 2 the rank raises the alarm. Each rank then writes its open spans and Python stacks to the store. The
rank that raised the alarm collects them and prints a report, the first rank of each other host prints the report too,
and all ranks exit. For reason 4 each rank decides and exits alone, and can print only its own open spans and stacks.

Ranks that do not answer within ANSWER_SECONDS are stopped, have ended, or have a thread that holds Python's
interpreter lock.

Only time in which this process runs counts, so a job that was suspended as a whole and continues later does not count
as hung. Torch's own time limit of collectives would end such a job, so worker.py sets it to 30 days.

On CUDA the host launches collectives ahead of the device and blocks only when it next waits for the device. The report
then names the ranks that have launched fewer collectives than the others, because the others wait for these ranks.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from megazpp.base.address import store_address
from megazpp.base.files import cause
from megazpp.base.program import EXIT_HANG, leave, say
from megazpp.parallel.config import LaunchConfig
from megazpp.parallel.dims import ParallelDims
from megazpp.parallel.store import FirstFailure, RankInfo, store_of, wait_until
from megazpp.parallel.timeline import COMPUTE, FILES, STEP, WAIT, Activity, Doing
from megazpp.topology.layout import Layout

ANSWER_SECONDS = 5.0  # time for the other ranks to answer an alarm with their open spans and stacks
# Longest interval between two checks by the judge, and between two exchanges with the store. If the judge wakes up this
# much later than planned, the process counts as suspended meanwhile.
POLL_SECONDS = 5.0
# Keys of the watchdog in the store. ALARM counts alarms, FOLDER has the path of the folder for the ranks' stacks. With
# a rank in place of {}, STATE has the rank's open spans and stacks, and BEAT is a counter, the rank's heartbeat.
ALARM, FOLDER, STATE, BEAT = "alarm", "folder", "state/{}", "beat/{}"


class RankState(NamedTuple):
    """The activity of one rank at the moment when it noticed the watchdog's alarm."""

    host: str  # name of the rank's host
    doing: list[Doing]  # the innermost open span of each thread of the rank
    entered: Mapping[str, int]  # number of spans that have begun on each track of the rank's timeline
    stacks: str  # formatted stacks of the rank's Python threads

    @property
    def collectives(self) -> list[Doing]:
        """The collectives among the rank's open spans, in which the rank waits for other ranks."""
        return [doing for doing in self.doing if doing.track not in (COMPUTE, FILES, WAIT, STEP)]

    def describe(self) -> str:
        """Return the rank's open spans in words, for example "cross all_gather for 61 s"."""
        return ", ".join(f"{d.track} {d.name} for {d.seconds:.0f} s" for d in self.doing) or "outside the step"


class Watchdog:
    """Two threads that end this process if the job hangs.

    Args:
        store: store of the default process group.
        place: this process's rank, its index on its node, and the number of ranks.
        config: flags with the limits, see `LaunchConfig.hang_seconds`.
    """

    def __init__(self, store: Any, place: RankInfo, config: LaunchConfig) -> None:
        self._place = place
        self._first, self._later = config.hang_seconds
        own = store.clone()  # a second connection, because a thread may be blocked in a call on the first one
        self._store, self._failure = store_of(own, "hang"), FirstFailure(own, place)
        self._activity = Activity()
        self._layout: Layout | None = None  # layout of the ranks, set by `watch`; None before process groups exist
        # At least four checks within the limit of later steps, even if a flag sets this limit to a few seconds
        self._poll_seconds = min(POLL_SECONDS, self._later / 4)
        # Time at which this object was created, or at which the judge last noticed that this process was suspended
        self._since = time.monotonic()
        # Times of the store's last answer, and of the last change of the heartbeat that this rank checks
        self._answered = self._beat_moved = self._since
        self._next = (place.rank + 1) % place.world_size  # rank whose heartbeat this rank checks
        # Either thread sets this event if the job hangs. The exchange thread then ends this process after the report.
        self._alarm = threading.Event()

    def start(self) -> Watchdog:
        """Start the watchdog's two threads, which run until the process exits, and return self."""
        for work in (self._judge, self._exchange):
            threading.Thread(target=work, name=f"megazpp-watchdog-{work.__name__}", daemon=True).start()
        return self

    def watch(self, dims: ParallelDims) -> None:
        """Start to watch the spans of `dims.timeline`: the collectives of the mesh axes, steps and checkpoints."""
        self._layout = dims.layout
        dims.timeline.attach(self._activity)

    def span(self, name: str) -> AbstractContextManager[None]:
        """Return a context manager for code that waits for all other ranks by other means than the mesh axes.

        The watchdog sees the wait as the open span `name` on the track "world".
        """
        return self._activity.span("world", name)

    def write_to(self, folder: Path) -> None:
        """Set the folder to which the rank that raises an alarm writes the stacks of all ranks. Rank 0 calls this."""
        self._store.set(FOLDER, str(folder.resolve()))

    @property
    def _limit(self) -> float:
        """The seconds without progress after which the job counts as hung.

        One limit holds up to the end of the first step, when kernels are compiled and ranks are connected. A second
        limit holds for later steps.
        """
        return self._later if self._activity.entered[STEP] > 1 else self._first

    def _judge(self) -> None:
        """Check every few seconds whether the job hangs, and if so raise the alarm.

        This is the body of the watchdog's judge thread.
        """
        last = time.monotonic()
        while not self._alarm.wait(self._poll_seconds):
            now = time.monotonic()
            if now - last > self._poll_seconds + POLL_SECONDS:
                # The wait took longer than requested, so this process was suspended or hardly ran. Only the time from
                # now on counts as time without progress.
                self._since = now
            last, limit = now, self._limit
            doing = self._activity.now()
            if doing and min(doing[0].seconds, now - self._since) > limit:
                break
            if now - max(self._answered, self._since) > limit:
                self._end_alone(f"the store of rank 0 has not answered for {limit:g} s")
            if now - max(self._beat_moved, self._since) > limit:
                break
        self._alarm.set()
        # If the store answers, the exchange thread ends this process during this sleep, because `_end_job` waits for at
        # most 2 * ANSWER_SECONDS. Otherwise end the process below.
        time.sleep(5 * ANSWER_SECONDS)
        self._end_alone(f"the job has made no progress for {self._limit:g} s, and the store of rank 0 does not answer")

    def _exchange(self) -> None:
        """Send this rank's heartbeat, read the next rank's heartbeat, and end the job after an alarm.

        This is the body of the watchdog's exchange thread, which runs until the process exits.
        """
        beat = -1
        while True:
            try:
                if self._alarm.wait(self._poll_seconds) or self._store.check([ALARM]):
                    self._alarm.set()
                    self._end_job()
                self._store.add(BEAT.format(self._place.rank), 1)
                before, beat = beat, self._store.add(BEAT.format(self._next), 0)
                self._answered = time.monotonic()
                if beat != before or self._next == self._place.rank:
                    self._beat_moved = self._answered
            # The process that hosts the store has ended. Keep trying: the judge thread ends this rank if the store does
            # not answer for longer than the limit.
            except dist.DistError:
                time.sleep(self._poll_seconds)

    def _end_job(self) -> None:
        """End this process because of an alarm: write this rank's open spans and stacks to the store, and exit.

        The first rank that raises the alarm also collects and prints the report about all ranks.
        """
        store, rank, limit = self._store, self._place.rank, self._limit
        raised_it = store.add(ALARM, 1) == 1
        state = self._state()
        store.set(STATE.format(rank), json.dumps(state))
        if not raised_it:
            # The rank that raised the alarm collects answers for up to ANSWER_SECONDS before it writes the report.
            wait_until(lambda: self._failure.is_known, 2 * ANSWER_SECONDS)
            leave(self._failure.show_elsewhere())
        first = self._failure.claim()  # ranks whose collectives break from now on exit silently
        keys = [STATE.format(r) for r in range(self._place.world_size)]
        wait_until(lambda: store.check(keys), ANSWER_SECONDS)
        answers = {r: json.loads(store.get(key)) for r, key in enumerate(keys) if store.check([key])}
        states = {
            r: RankState(host, [Doing(*each) for each in doing], *rest) for r, (host, doing, *rest) in answers.items()
        }
        report = describe_hang(states, self._layout, limit, world_size=self._place.world_size)
        if first:
            self._failure.write(report)
        text = report + "".join(f"\n==== rank {r}\n{states[r].stacks}" for r in sorted(states))
        where = f"the stacks of all ranks:\n{text}"
        if store.check([FOLDER]):
            file = Path(store.get(FOLDER).decode()) / f"hang-{time.strftime('%Y%m%d-%H%M%S')}.txt"
            try:
                file.write_text(text, encoding="utf-8", errors="backslashreplace")
                where = f"the stacks of all ranks are in {file}"
            except OSError as error:  # the folder may exist only on the host of rank 0: print the stacks instead
                where = f"(the stacks of all ranks could not be written to a file: {cause(error)})\n{text}"
        say(f"\n{report}\n{where}")
        leave(EXIT_HANG)

    def _state(self) -> RankState:
        """Return this rank's open spans and current Python stacks."""
        return RankState(socket.gethostname(), self._activity.now(), self._activity.entered, python_stacks())

    def _end_alone(self, reason: str) -> None:
        """End this process without using the store, because the store does not answer.

        On the first rank of each host, first print `reason`, and this rank's open spans and Python stacks.
        """
        state = self._state()
        if self._place.local_rank == 0:
            say(
                f"\nwatchdog: {reason} ({store_address()}): that machine, or the link to it, is down\n"
                f"  rank {self._place.rank} on {state.host}: {state.describe()}\n{state.stacks}"
            )
        else:
            # A launcher kills all ranks of a host when one exits. So give the host's first rank time to print `reason`.
            time.sleep(1.0)
        leave(EXIT_HANG)


def describe_hang(states: Mapping[int, RankState], layout: Layout | None, limit: float, *, world_size: int) -> str:
    """Return the watchdog's report about a job that hangs.

    The report lists the collectives in which ranks wait, the ranks that are missing from each collective, the ranks
    that have not answered, and the Python stacks of missing ranks that are in no other collective. If no rank waits in
    a collective and all ranks have answered, the report has the stacks of all ranks.

    Args:
        states: open spans and stacks of the ranks that have answered, by rank.
        layout: layout of the ranks, which gives the members of each axis; None if the job hangs before it is known.
        limit: seconds without progress after which the job counted as hung.
        world_size: number of ranks in the job.
    """
    everyone = tuple(range(world_size))
    lines = [f"watchdog: the job has made no progress for {limit:g} s"]
    waiting: dict[tuple[str, tuple[int, ...], int, str], list[int]] = {}
    for rank, state in sorted(states.items()):
        for doing in state.collectives:
            if layout is None or doing.track in ("world", "checkpoint"):
                members = everyone
            else:
                members = layout.axis_ranks(doing.track, rank)
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
    culprits = [r for r in sorted(absent - silent) if not states[r].collectives]
    if not (culprits or waiting or silent):
        culprits = list(states)
    for rank in culprits:
        lines.append(f"  rank {rank} on {states[rank].host}: {states[rank].describe()}\n{states[rank].stacks}")
    return "\n".join(lines)


def _behind(states: Mapping[int, RankState]) -> list[str]:
    """Return a line for the watchdog's report about each track on which some ranks have begun fewer spans than others.

    The line names these ranks, and gives the largest number of spans that a rank has begun on the track. The other
    ranks wait for the named ranks.

    The report has these lines only if no rank is inside a collective of a mesh axis. This happens on CUDA, where the
    host only launches collectives, and in FSDP2's own collectives, which use no mesh axis.

    Args:
        states: open spans and numbers of begun spans of the ranks that have answered the alarm, by rank.
    """
    lines = []
    for track in sorted({track for state in states.values() for track in state.entered} - {COMPUTE, FILES, WAIT}):
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


def _ranks(ranks: set[int] | list[int]) -> str:
    """Return ranks as text for the watchdog's report: "rank 3" or "ranks 1, 2", with at most 16 numbers."""
    numbers = sorted(ranks)
    shown = ", ".join(map(str, numbers[:16])) + (", ..." if len(numbers) > 16 else "")
    return f"rank{'s' * (len(numbers) > 1)} {shown}"
