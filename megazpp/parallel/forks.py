"""CPU workers as forks of the launching process, which has already imported torch and all other modules.

Imports take 3.4 CPU-seconds in each new Python process, and none in a fork. A fork calls the program's main function in
the same state as a new process: in a separate session, with default signal handlers, and with a single thread.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Collection, Mapping
from typing import NoReturn

import psutil
import torch

from megazpp.base.program import EXIT_ERROR, ignored, leave


class Fork:
    """A forked worker process, with those methods of `subprocess.Popen` that the launcher uses.

    SIGINT stays blocked in the fork until `worker_process` unblocks it, as in workers that are new processes.

    Args:
        main: main function of the program, which returns its exit status.
        env: variables that are added to the fork's environment.
        handled: signals for which the launching process may have handlers. The fork gets the default handlers.
    """

    def __init__(self, main: Callable[[], int], env: Mapping[str, str], *, handled: Collection[int]) -> None:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # a fork inherits unwritten output, and would print it a second time
        self._code: int | None = None
        # Signals stay blocked until the fork has replaced the launcher's handlers, which must not run in the fork.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, handled)
        try:
            self.pid = os.fork()
            if self.pid == 0:
                _be_new(main, env, handled, blocked=before | {signal.SIGINT})
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def poll(self) -> int | None:
        """Return the exit code of the forked process, -n if signal n has killed it; None while the process runs."""
        return self._exit_code(os.WNOHANG)

    def wait(self) -> int | None:
        """Wait until the forked process ends, and return its exit code, -n if signal n has killed it."""
        return self._exit_code(0)

    def send_signal(self, signum: int) -> None:
        """Send the signal `signum` to the forked process, unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, signum)

    def _exit_code(self, options: int) -> int | None:
        """Return the exit code of the forked process.

        Args:
            options: options of `os.waitpid`: 0 waits until the process ends; WNOHANG returns None if it still runs.
        """
        if self._code is None:
            pid, status = os.waitpid(self.pid, options)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code


def _be_new(
    main: Callable[[], int], env: Mapping[str, str], handled: Collection[int], *, blocked: Collection[int]
) -> NoReturn:
    """Give this fork the state of a new process, call `main`, and exit with its exit status.

    The state is a separate session, default handlers for the signals `handled`, the signal mask `blocked`, and the
    variables `env` in the environment. SIGHUP stays ignored in a job that nohup has started.
    """
    code = EXIT_ERROR
    try:
        os.setsid()
        for signum in handled:
            if not ignored(signum):
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
    """Return True if this launching process can fork its workers instead of starting new Python processes.

    CUDA cannot be used after a fork, and neither can the threads of OpenMP or of a tokenizer. The machine must
    therefore have no GPU, and no thread may have started since the imports. numpy's threads survive a fork.
    """
    return not torch.cuda.is_available() and psutil.Process().num_threads() == IDLE_THREADS


# Number of threads when this module is imported: after torch and numpy, before any work
IDLE_THREADS = psutil.Process().num_threads()
