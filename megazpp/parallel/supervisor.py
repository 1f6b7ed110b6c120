"""Starts the workers of one machine, watches them, and starts them again when one has failed.

Our own rather than torch's elastic agent (which torchrun is), because that ends workers by SIGTERM and takes up to 30
seconds about it: a signal that means "finish your step and save" to ours, and that has to reach them when it is sent to
the launcher. What is torch's here is the store, in this process, so that it outlives every worker: the ranks that are
left can say in it who failed first.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType

from megazpp.errors import EXIT_ERROR, EXIT_HANG, EXIT_READER_GONE, EXIT_SECONDARY, EXIT_USER_ERROR
from megazpp.parallel.launch import LAUNCHER_PID, RESTART_COUNT, STOP_SIGNALS
from megazpp.parallel.rendezvous import agent_variables, loopback_store

POLL_SECONDS = 0.05
GRACE_SECONDS = 3.0  # for the rank that failed first, when all that is seen is that another rank's collective broke


def launch_workers(command: Sequence[str], nproc: int, *, max_restarts: int = 0) -> int:
    """Run `command` in `nproc` local worker processes.

    When one fails the others are ended, and all are started again up to `max_restarts` times; what the user has to mend
    is not tried again. Ctrl-C ends all at once. SIGTERM and SIGUSR1 are passed on, and whatever the workers make of
    them, nothing is started any more.

    Returns:
        The exit code for this process: 0, 2 for a user error, 128 + n after signal n or a closed pipe, else 1.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // nproc)))
    workers: list[subprocess.Popen[bytes]] = []
    try:
        with _passing_signals_to(workers) as passed:
            for attempt in range(max_restarts + 1):
                store = loopback_store()
                env = {LAUNCHER_PID: str(os.getpid()), RESTART_COUNT: str(attempt), **agent_variables(store)}
                failures = _run(command, nproc, env, workers)
                if not failures:
                    return 0
                if passed:
                    return _ended_by(passed[0])
                for final in (EXIT_USER_ERROR, EXIT_READER_GONE):  # not tried again, and nothing to add
                    if final in failures.values():
                        return final
                what_next = f"restart {attempt + 1} of {max_restarts}" if attempt < max_restarts else "the job is over"
                print(f"{_reason(failures)}; {what_next}", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        return _ended_by(signal.SIGINT)
    return EXIT_ERROR


def _run(
    command: Sequence[str], nproc: int, env: Mapping[str, str], workers: list[subprocess.Popen[bytes]]
) -> dict[int, int]:
    """Start the workers into the list `workers` and wait for their end.

    Returns:
        The exit codes, by rank, of those that failed before the rest was ended; empty if all went well.
    """
    workers.clear()
    try:
        for rank in range(nproc):
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": nproc, "LOCAL_WORLD_SIZE": nproc}
            own = {name: str(value) for name, value in place.items()}
            # a session of its own: Ctrl-C reaches only the launcher, which then ends all
            workers.append(subprocess.Popen(command, env={**os.environ, **env, **own}, start_new_session=True))
        deadline: float | None = None
        while True:
            codes = {rank: code for rank, worker in enumerate(workers) if (code := worker.poll()) is not None}
            failures = {rank: code for rank, code in codes.items() if code != 0}
            if failures and deadline is None:
                deadline = time.monotonic() + GRACE_SECONDS
            over = deadline is not None and time.monotonic() > deadline
            if len(codes) == nproc or over or any(code != EXIT_SECONDARY for code in failures.values()):
                return failures
            time.sleep(POLL_SECONDS)
    finally:
        for worker in workers:
            worker.kill()
        for worker in workers:
            worker.wait()


@contextmanager
def _passing_signals_to(workers: list[subprocess.Popen[bytes]]) -> Iterator[list[signal.Signals]]:
    """Send the signals that end a run in good order on to the workers; yields those that came."""
    passed: list[signal.Signals] = []

    def pass_on(signum: int, frame: FrameType | None) -> None:
        passed.append(signal.Signals(signum))
        for worker in workers:
            worker.send_signal(signum)

    before = {signum: signal.signal(signum, pass_on) for signum in STOP_SIGNALS}
    try:
        yield passed
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _ended_by(signum: signal.Signals) -> int:
    print(f"\nended by {signum.name}", file=sys.stderr)  # on a line of its own after a progress bar or the ^C
    return 128 + signum


def _reason(failures: Mapping[int, int]) -> str:
    """Which rank ended the job: one that was killed, else one that reported."""
    rank, code = min(failures.items(), key=lambda item: (item[1] == EXIT_SECONDARY, item[1] >= 0))
    if code == EXIT_HANG:
        return "the job hung, see above"
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return f"rank {rank} {how}"
