"""The end of programs: exit codes, which they read of each other, and errors that a user reads without a traceback.

Needs no torch, because what only starts programs uses it too.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

EXIT_ERROR, EXIT_USER_ERROR, EXIT_SECONDARY, EXIT_HANG = 1, 2, 3, 4  # secondary: some other rank failed first
EXIT_INTERRUPTED = 128 + signal.SIGINT  # this and the next as a shell has it
EXIT_READER_GONE = 128 + signal.SIGPIPE
SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of <linux/prctl.h>


class JobError(Exception):
    """Something that ends the job, found by all ranks together; the message says it all, and no traceback helps."""

    exit_code = EXIT_ERROR

    def show(self, program: str = "") -> None:
        """Print it to stderr, one line per problem; `program` is the running one where no name is given."""
        for line in str(self).splitlines():
            print(f"{program or Path(sys.argv[0]).name}: error: {line}", file=sys.stderr)


class UserError(JobError):
    """Something the user asked for cannot be done; starting again would not help either."""

    exit_code = EXIT_USER_ERROR


def in_words(error: BaseException, command_line: Sequence[str] | None = None) -> str:
    """Say an error to a user, where its own text is about Python.

    An error about a file begins with the flag whose value is that file, a folder around it or one in it; flags are
    looked for in `command_line` (without the program; None: this program's).
    """
    if isinstance(error, UnicodeEncodeError):
        return f"{error.object[error.start : error.end]!r} is half of a surrogate pair, and no text"
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if type(error) is ValueError and "set_int_max_str_digits" in str(error):
        return "an integer has more digits than are read"
    if not isinstance(error, OSError) or not isinstance(error.filename, str):
        return str(error)
    path, flag = Path(error.filename), ""
    for word in sys.argv[1:] if command_line is None else command_line:
        if word.startswith("--"):
            flag, _, word = word.partition("=")
        value = Path(word).expanduser() if flag and word else None
        if value is not None and (value == path or value in path.parents or path in value.parents):
            return f"{flag} {word}: {path}: {error.strerror}"
    return f"{path}: {error.strerror}"


@contextlib.contextmanager
def user_errors() -> Iterator[None]:
    """Check flags and files inside: a ValueError becomes a UserError."""
    try:
        yield
    except ValueError as error:
        raise UserError(in_words(error)) from error


def end_with(launcher: int) -> None:
    """Have the kernel kill this process when its launcher dies, `kill -9` included; elsewhere than on Linux nothing."""
    with contextlib.suppress(OSError, AttributeError):  # other systems have no prctl
        ctypes.CDLL(None).prctl(SET_PARENT_DEATH_SIGNAL, int(signal.SIGKILL))
    if os.getppid() != launcher:  # it died before the line above
        os._exit(EXIT_ERROR)
