"""How programs end: exit codes, which they read of each other, and errors that a user reads without a traceback.

Needs no torch, because what only starts programs uses it too.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

EXIT_ERROR, EXIT_USER_ERROR, EXIT_SECONDARY, EXIT_HANG = 1, 2, 3, 4  # secondary: some other rank failed first
EXIT_INTERRUPTED = 128 + signal.SIGINT  # this and the next as a shell has it
EXIT_READER_GONE = 128 + signal.SIGPIPE


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


@contextlib.contextmanager
def user_errors() -> Iterator[None]:
    """Check flags and files inside: a ValueError becomes a UserError."""
    try:
        yield
    except ValueError as error:
        raise UserError(str(error)) from error
