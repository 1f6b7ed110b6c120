"""How a tool ends: with its main's status, one line for a mistake, quietly where its reader has gone (`| head`)."""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, ParamSpec

from megazpp.errors import EXIT_READER_GONE, EXIT_USER_ERROR

P = ParamSpec("P")


def one_line_errors(main: Callable[P, None]) -> Callable[P, int]:
    """A main that returns the exit status: a file or a flag that is wrong is said in one line."""

    @functools.wraps(main)
    def run(*args: P.args, **kwargs: P.kwargs) -> int:
        try:
            main(*args, **kwargs)
        except BrokenPipeError:
            raise  # `leave_with` knows it
        except (OSError, ValueError) as error:
            print(f"{Path(inspect.getfile(main)).name}: error: {error}", file=sys.stderr)
            return EXIT_USER_ERROR
        return 0

    return run


def leave_with(main: Callable[[], int | None]) -> NoReturn:
    """Run `main` and end the program with the status that it returns; None is 0."""
    try:
        try:
            status = main()
        finally:
            sys.stdout.flush()  # what is still in the buffer meets the closed pipe here, not in the interpreter's exit
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = EXIT_READER_GONE
    sys.exit(status)
