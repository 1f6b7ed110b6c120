"""Run pretrain_gpt.py for benchmark_elastic.py, with emulated slow steps and links, or with a kill at a chosen point.

    python tools/benchmarks/benchmark_elastic_job.py '{"step_seconds": 0.2, "kill_at": 5}' FLAGS OF pretrain_gpt.py

The program has no option to be slow or to fail on request. This file therefore replaces a few functions of elastic
DiLoCo before it starts the program.
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
from megazpp.base.program import LAUNCHER_PID
from megazpp.diloco.rows import WholeRows
from megazpp.elastic import agent, wire
from megazpp.elastic.agent import Agent
from megazpp.elastic.loop import ElasticLoop, LeasedLoader
from megazpp.elastic.outer import WholeOuter

POINTS = (  # points of a DiLoCo round at which a job can be killed
    "before the first step",
    "in the middle of the interval",
    "before packing its contribution",
    "contribution packed",
    "contribution published",
    "another group asks for it",
    "half of it is sent",
    "it is sent to one group",
    "before applying the commit",
    "one unit applied",
    "commit applied",
    "before asking for samples",
)
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
        kill_at: number, from 1, of the point in POINTS at which the job is killed; 0 never kills.
        killed_file: file to which the time of the kill is written.
        hold_file: path; the job waits for this file after its imports, before it starts. "" does not wait.
    """

    step_seconds: float = 0.0
    uplink_seconds: float = 0.0
    bits_per_second: float = 0.0
    round_trip_seconds: float = 0.0
    network_file: str = ""
    kill_at: int = 0
    killed_file: str = ""
    hold_file: str = ""


def around(owner: Any, name: str, *, before: Callable[[Any], Any] | None = None, after: Any = None) -> None:
    """Replace a method by one that calls `before(self)`, the method, and `after(self)`."""
    inner = getattr(owner, name)

    @functools.wraps(inner)
    def outer(self: Any, *args: Any, **kwargs: Any) -> Any:
        if before is not None:
            before(self)
        result = inner(self, *args, **kwargs)
        if after is not None:
            after(self)
        return result

    setattr(owner, name, outer)


class SlowSteps:
    """A delay of training steps: each begins at least `seconds` after the previous one or after the interval begins."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._began = seconds, 0.0
        around(ElasticLoop, "_await_cell", after=self._begin)
        around(LeasedLoader, "step", before=self._wait)

    def _begin(self, _: ElasticLoop) -> None:
        self._began = time.monotonic()

    def _wait(self, _: LeasedLoader) -> None:
        time.sleep(max(0.0, self._began + self._seconds - time.monotonic()))
        self._began = time.monotonic()


class SlowNetwork:
    """Emulates the bandwidth and latency of a network inside the process.

    Receiving a frame takes half a round trip longer. Sending a message takes as long as its bytes at the given rate, or
    as TCP's slow start if that is longer. Connecting takes two more round trips, one of TCP and one of the handshake.
    """

    def __init__(self, emulation: Emulation) -> None:
        self._emulation, self._round_trip, self._uplink = emulation, emulation.round_trip_seconds, threading.Lock()
        self._send_data, self._connect = wire.Channel.send_data, agent.connect
        setattr(wire.Channel, "send_data", functools.partialmethod(_calling, self._send))  # noqa: B010
        setattr(agent, "connect", self._open)  # noqa: B010
        around(wire.Channel, "receive", after=lambda _: self._wait(0.5 * self._round_trip))

    def _wait(self, seconds: float) -> None:
        if not self._emulation.network_file or Path(self._emulation.network_file).exists():
            time.sleep(seconds)

    def _send(self, channel: wire.Channel, message: dict[str, Any], data: bytes) -> None:
        with self._uplink:
            slow_start = self._round_trip * math.log2(1 + len(data) / FIRST_WINDOW)
            self._wait(max(8 * len(data) / self._emulation.bits_per_second, slow_start))
        self._send_data(channel, message, data)

    def _open(self, *args: Any, **kwargs: Any) -> wire.Channel:
        self._wait(2 * self._round_trip)
        return self._connect(*args, **kwargs)


class Kill:
    """The kill of all processes of a job at the chosen point of the job's third or a later DiLoCo round."""

    def __init__(self, emulation: Emulation) -> None:
        self._file, self._rounds, self._in_round = Path(emulation.killed_file), 0, False
        self._send_data = wire.Channel.send_data
        around(ElasticLoop, "_publish", before=self._enter)
        around(ElasticLoop, "_merge", after=self._leave)
        die, die_in_round, point = self._die, self._die_in_round, emulation.kill_at
        points: dict[int, tuple[Any, str, str, Callable[[Any], None]]] = {
            1: (LeasedLoader, "step", "before", die),
            2: (ElasticLoop, "_count_step", "after", self._die_in_the_middle),
            3: (WholeOuter, "pack", "before", die),
            4: (WholeOuter, "pack", "after", die),
            5: (Agent, "publish", "after", die),
            6: (Agent, "_serve", "before", die_in_round),
            8: (Agent, "_serve", "after", die_in_round),
            9: (WholeOuter, "apply", "before", die),
            10: (WholeRows, "apply", "after", die),
            11: (WholeOuter, "apply", "after", die),
            12: (ElasticLoop, "_ask", "before", die),
        }
        if point in points:
            owner, name, when, function = points[point]
            around(owner, name, **{when: function})
        else:
            setattr(wire.Channel, "send_data", functools.partialmethod(_calling, self._send_half))  # noqa: B010

    def _enter(self, _: ElasticLoop) -> None:
        self._in_round = True

    def _leave(self, _: ElasticLoop) -> None:
        self._in_round, self._rounds = False, self._rounds + 1

    def _die(self, _: Any) -> None:
        if self._rounds >= UNDISTURBED:
            self._file.write_text(str(time.time()))
            os.kill(int(os.environ.get(LAUNCHER_PID, os.getpid())), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)

    def _die_in_round(self, _: Agent) -> None:
        if self._in_round:
            self._die(None)

    def _die_in_the_middle(self, loop: ElasticLoop) -> None:
        if 2 * loop._steps > loop._rules.interval:
            self._die(None)

    def _send_half(self, channel: wire.Channel, message: dict[str, Any], data: bytes) -> None:
        if self._in_round and self._rounds >= UNDISTURBED:
            channel.send(message | {"bytes": len(data), "sha256": ""})
            channel._sock.sendall(data[: len(data) // 2])
            self._die(None)
        self._send_data(channel, message, data)


def _calling(channel: wire.Channel, function: Callable[..., None], *args: Any) -> None:
    function(channel, *args)


if __name__ == "__main__":
    given = Emulation(**json.loads(sys.argv[1]))
    if given.step_seconds:
        SlowSteps(given.step_seconds)
    if given.uplink_seconds:
        around(wire.Channel, "send_data", before=lambda _: time.sleep(given.uplink_seconds))
    if given.round_trip_seconds:
        SlowNetwork(given)
    if given.kill_at:
        Kill(given)
    while given.hold_file and not Path(given.hold_file).exists():
        time.sleep(0.02)
    sys.argv = [pretrain_gpt.__file__, *sys.argv[2:]]  # worker processes parse it again
    raise SystemExit(pretrain_gpt.main(sys.argv[1:]))
