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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from megazpp.errors import EXIT_ERROR, EXIT_READER_GONE, EXIT_USER_ERROR
from megazpp.parallel.launch import RESTART_COUNT, STOP_SIGNALS
from megazpp.parallel.rank_processes import POLL_SECONDS, RankProcesses, describe_failure
from megazpp.parallel.rendezvous import agent_variables, loopback_store


def launch_workers(command: Sequence[str], nproc: int, *, max_restarts: int = 0) -> int:
    """Run `command` in `nproc` local worker processes.

    When one fails the others are ended, and all are started again up to `max_restarts` times; what the user has to fix
    is not tried again. Ctrl-C ends all at once. SIGTERM and SIGUSR1 are passed on, and whatever the workers make of
    them, nothing is started any more.

    Returns:
        The exit code for this process: 0, 2 for a user error, 128 + n after signal n or a closed pipe, else 1.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // nproc)))
    workers = RankProcesses(command, nproc)
    try:
        with _passing_signals_to(workers.processes) as passed:
            for attempt in range(max_restarts + 1):
                store = loopback_store()
                try:
                    workers.start({RESTART_COUNT: str(attempt), **agent_variables(store)})
                    while (failures := workers.failures()) is None:
                        time.sleep(POLL_SECONDS)
                finally:
                    workers.stop()
                if not failures:
                    return 0
                if passed:
                    return _ended_by(passed[0])
                for final in (EXIT_USER_ERROR, EXIT_READER_GONE):  # not tried again, and nothing to add
                    if final in failures.values():
                        return final
                what_next = f"restart {attempt + 1} of {max_restarts}" if attempt < max_restarts else "the job is over"
                print(f"{describe_failure(failures)}; {what_next}", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        return _ended_by(signal.SIGINT)
    return EXIT_ERROR


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
