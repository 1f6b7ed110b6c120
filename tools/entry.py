"""How a tool ends: with the status of its main, and quietly where whoever read its output has gone (`| head`)."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import NoReturn

from megazpp.exit_codes import EXIT_READER_GONE


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
