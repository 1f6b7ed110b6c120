"""Processes that are forks of this one, which has already imported everything that they need.

Importing takes 3.4 CPU-seconds of each process that is started anew. A fork runs a function from its beginning, in the
same state as a new process: its own session, default signal handlers, and no thread besides the first.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import NoReturn

import torch

from megazpp.base.program import EXIT_ERROR, leave


class Fork:
    """Forked process that runs a program, with the part of `subprocess.Popen` that launchers use.

    SIGINT is blocked in the new process, as in other workers.

    Args:
        main: main function of the program, which returns its exit status.
        env: variables that are added to the environment.
        handled: signals for which this process may have handlers; they get their default ones.
    """

    def __init__(self, main: Callable[[], int], env: Mapping[str, str], *, handled: Collection[int]) -> None:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # or the fork would print the same text again
        self._code: int | None = None
        before = signal.pthread_sigmask(signal.SIG_BLOCK, handled)  # until the fork has its own handlers
        try:
            self.pid = os.fork()
            if self.pid == 0:
                _be_new(main, env, handled, blocked=before | {signal.SIGINT})
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while the process runs."""
        return self._code if self._code is not None else self._reap(os.WNOHANG)

    def wait(self) -> int | None:
        """Wait for the end of the process, and return its exit code."""
        return self._code if self._code is not None else self._reap(0)

    def send_signal(self, signum: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, signum)

    def _reap(self, options: int) -> int | None:
        pid, status = os.waitpid(self.pid, options)
        self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code


def _be_new(
    main: Callable[[], int], env: Mapping[str, str], handled: Collection[int], *, blocked: Collection[int]
) -> NoReturn:
    """Make this forked process like a new one, run the program, and exit."""
    code = EXIT_ERROR
    try:
        os.setsid()
        for signum in handled:
            signal.signal(signum, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        os.environ.update(env)
        code = main()
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        leave(code)


def can_fork() -> bool:
    """Return True if forks of this process can be workers.

    CUDA cannot be used after a fork. Neither can the threads of OpenMP or of a tokenizer, so no thread may have started
    since the imports; numpy's own threads survive a fork.
    """
    return not torch.cuda.is_available() and 0 < _num_threads() == IDLE_THREADS


def _num_threads() -> int:
    """Return the number of this process's threads, 0 if the system does not tell."""
    tasks = Path("/proc/self/task")
    return len(os.listdir(tasks)) if tasks.is_dir() else 0


IDLE_THREADS = _num_threads()  # after the import of torch, which imports numpy
