"""Run pretrain_gpt.py for benchmark_elastic.py, with emulated slow steps and links, or with a kill at a chosen point.

    python tools/benchmarks/benchmark_elastic_job.py '{"step_seconds": 0.2, "kill_at": "commit applied"}' FLAGS

FLAGS are the flags of pretrain_gpt.py. That program has no option to be slow or to fail on request. This file therefore
replaces a few functions of elastic DiLoCo before it starts the program.
"""

from __future__ import annotations

import functools
import json
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2]))  # finds megazpp in a checkout that is not installed

import pretrain_gpt
from megazpp.base.files import write_whole
from megazpp.base.program import LAUNCHER_PID
from megazpp.diloco.rows import WholeRows
from megazpp.elastic import agent
from megazpp.elastic.agent import Agent
from megazpp.elastic.loop import ElasticLoop, LeasedLoader
from megazpp.elastic.outer import WholeOuter
from megazpp.elastic.wire import Channel

# Points of a DiLoCo round at which a job can be killed: a class, a method, and "before" or "after" a call of the method
POINTS: dict[str, tuple[type, str, str]] = {
    "before the first step": (LeasedLoader, "step", "before"),
    "in the middle of the interval": (ElasticLoop, "_count_step", "after"),
    "before packing its contribution": (WholeOuter, "pack", "before"),
    "contribution packed": (WholeOuter, "pack", "after"),
    "contribution published": (Agent, "publish", "after"),
    "another group asks for it": (Agent, "_serve", "before"),
    "half of it is sent": (Channel, "send_data", "before"),
    "it is sent to one group": (Agent, "_serve", "after"),
    "before applying the commit": (WholeOuter, "apply", "before"),
    "one unit applied": (WholeRows, "apply", "after"),
    "commit applied": (WholeOuter, "apply", "after"),
    "before asking for samples": (ElasticLoop, "_ask", "before"),
}
FIRST_WINDOW = 14_600  # bytes that TCP sends before the first acknowledgement: 10 segments
UNDISTURBED = 2  # number of rounds that a group completes before it is killed


@dataclass(frozen=True, kw_only=True)
class Emulation:
    """The emulated delays of a job, and the point at which the job is killed.

    Attributes:
        step_seconds: shortest duration of a training step; the job waits before it reads the samples.
        uplink_seconds: additional duration of sending a message to another group.
        bits_per_second: rate at which a rank sends messages to other groups.
        round_trip_seconds: round-trip time between groups, and to the coordinator; 0 emulates no network.
        network_file: path; rate and latency apply only while this file exists. "" applies them always.
        kill_at: point in POINTS at which the job is killed; "" never kills.
        killed_file: file to which the time of the kill is written.
    """

    step_seconds: float = 0.0
    uplink_seconds: float = 0.0
    bits_per_second: float = 0.0
    round_trip_seconds: float = 0.0
    network_file: str = ""
    kill_at: str = ""
    killed_file: str = ""


def around(owner: Any, name: str, *, before: Callable[..., Any] | None = None, after: Any = None) -> None:
    """Replace the function `name` of the class or module `owner` by one that also calls `before` and `after`.

    Both get the positional arguments of the call. `before` runs before the replaced function, and `after` after it.
    """
    inner = getattr(owner, name)

    @functools.wraps(inner)
    def outer(*args: Any, **kwargs: Any) -> Any:
        if before is not None:
            before(*args)
        result = inner(*args, **kwargs)
        if after is not None:
            after(*args)
        return result

    setattr(owner, name, outer)


def slow_down_steps(seconds: float) -> None:
    """Delay training steps, so that each takes at least `seconds`.

    A step begins at least `seconds` after the previous step has begun. An interval is the time from one contribution of
    the group to the next. Its first step begins at least `seconds` after the group has got samples (`_await_cell`).
    """
    began = 0.0

    def begin(*_: object) -> None:
        nonlocal began
        began = time.monotonic()

    def wait(*_: object) -> None:
        time.sleep(max(0.0, began + seconds - time.monotonic()))
        begin()

    around(ElasticLoop, "_await_cell", after=begin)
    around(LeasedLoader, "step", before=wait)


def slow_down_network(emulation: Emulation) -> None:
    """Emulate the bandwidth and latency of a network inside the process.

    Receiving a frame takes half a round trip longer. Sending a message takes as long as its bytes at the given rate, or
    as TCP's slow start if that is longer. Connecting takes two more round trips, one of TCP and one of the handshake.
    """
    round_trip, uplink = emulation.round_trip_seconds, threading.Lock()

    def wait(seconds: float) -> None:
        if not emulation.network_file or Path(emulation.network_file).exists():
            time.sleep(seconds)

    def send(channel: Channel, message: dict[str, Any], data: bytes) -> None:
        with uplink:
            slow_start = round_trip * math.log2(1 + len(data) / FIRST_WINDOW)
            wait(max(8 * len(data) / emulation.bits_per_second, slow_start))

    around(Channel, "send_data", before=send)
    around(agent, "connect", before=lambda *_: wait(2 * round_trip))
    around(Channel, "receive", after=lambda *_: wait(0.5 * round_trip))


class Kill:
    """The kill of all processes of a job at the chosen point of the job's third or a later DiLoCo round."""

    def __init__(self, emulation: Emulation) -> None:
        self._file, self._rounds, self._in_round = Path(emulation.killed_file), 0, False
        owner, self._method, when = POINTS[emulation.kill_at]
        around(ElasticLoop, "_publish", before=self._enter)
        around(ElasticLoop, "_merge", after=self._leave)
        around(owner, self._method, **{when: self._reach})

    def _enter(self, *_: object) -> None:
        self._in_round = True

    def _leave(self, *_: object) -> None:
        self._in_round, self._rounds = False, self._rounds + 1

    def _reach(self, owner: Any, *args: Any) -> None:
        """Kill the job at its point of a round, unless the job has reached the point too early.

        Every point is too early in the first UNDISTURBED rounds. The point "in the middle of the interval" is also too
        early before this middle. A point of sending is also too early outside of a round, because the message may then
        be for a group that joins. `owner` and `args` are the arguments of the method at the point.
        """
        if self._rounds < UNDISTURBED or (self._method in ("_serve", "send_data") and not self._in_round):
            return
        if self._method == "_count_step" and 2 * owner._steps <= owner._rules.interval:
            return
        if self._method == "send_data":
            message, data = args
            owner.send(message | {"bytes": len(data), "sha256": ""})
            owner._sock.sendall(data[: len(data) // 2])
        write_whole(self._file, str(time.time()).encode())  # atomic: the benchmark reads the file once it exists
        # Kill the launcher, whose end makes the kernel kill all workers. Without a launcher, this is the only process.
        os.kill(int(os.environ.get(LAUNCHER_PID, os.getpid())), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    given = Emulation(**json.loads(sys.argv[1]))
    if given.step_seconds:
        slow_down_steps(given.step_seconds)
    if given.uplink_seconds:
        around(Channel, "send_data", before=lambda *_: time.sleep(given.uplink_seconds))
    if given.round_trip_seconds:
        slow_down_network(given)
    if given.kill_at:
        Kill(given)
    # Remove the JSON object from sys.argv, because workers parse sys.argv again, as flags of pretrain_gpt.py.
    sys.argv = [pretrain_gpt.__file__, *sys.argv[2:]]
    raise SystemExit(pretrain_gpt.main(sys.argv[1:]))
