"""The frame of every program: it starts, reads flags, prints figures, reports a mistake of the user and ends.

    @program
    def main(argv: list[str]) -> int | None: ...

    if __name__ == "__main__":
        raise SystemExit(main())

Where the flags are fields of configs, `@program_of(Config, ...)` stands over a function that takes the configs.
Nothing here needs torch: what only starts programs uses it too, and what prints before torch is imported.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import inspect
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import megazpp
from megazpp.base.command_line import FlagParser, MegatronFlag
from megazpp.base.launcher import find_launcher

EXIT_ERROR, EXIT_USER_ERROR, EXIT_SECONDARY, EXIT_HANG = 1, 2, 3, 4  # secondary: some other rank failed first
EXIT_INTERRUPTED = 128 + signal.SIGINT  # this and the next as a shell has it
EXIT_READER_GONE = 128 + signal.SIGPIPE
LAUNCHER_PID = "MEGAZPP_LAUNCHER_PID"  # set for the workers that we start
_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of <linux/prctl.h>
MEGA, GIGA, TERA = 1e6, 1e9, 1e12


def program(main: Callable[[list[str]], int | None]) -> Callable[..., int]:
    """Make a main take its words from the command line if none are given, and return the exit status.

    A file or a flag that is wrong is reported in one line. Where the reader of stdout has gone, it ends without a word.
    """
    name = Path(inspect.getfile(inspect.unwrap(main))).name

    @functools.wraps(main)
    def run(argv: Sequence[str] | None = None) -> int:
        words = sys.argv[1:] if argv is None else list(argv)
        try:
            try:
                return main(words) or 0
            finally:
                sys.stdout.flush()  # what is in the buffer meets the closed pipe here, not in the interpreter's exit
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return EXIT_READER_GONE
        except (OSError, ValueError, JobError) as error:
            failure = error if isinstance(error, JobError) else UserError(in_words(error, words))
            failure.show(name)
            return failure.exit_code
        except KeyboardInterrupt as interrupt:
            say(f"{name}: interrupted{interrupt}")
            return EXIT_INTERRUPTED

    return run


def program_of(
    *configs: type, description: str | None = None, megatron_flags: Mapping[str, MegatronFlag] | None = None
) -> Callable[[Callable[..., None]], Callable[..., int]]:
    """Make what takes one config of each class a main that reads them from the command line and writes all or nothing.

    --help begins with `description` (default: the program's docstring). `megatron_flags` are those of Megatron's tool
    of that name that have no effect or are refused.
    """

    def decorate(work: Callable[..., None]) -> Callable[..., int]:
        @functools.wraps(work)
        def main(argv: list[str]) -> None:
            text = description or sys.modules[work.__module__].__doc__ or ""
            parser = FlagParser(configs, program=Path(inspect.getfile(work)).name, description=text)
            parsed = parser.read(argv, Path.cwd(), megatron_flags or {})
            for notice in parsed.notices:
                say(notice)
            exit_on_signals()  # what is unfinished is removed on the way out
            try:
                work(*parsed.configs)
            except KeyboardInterrupt:
                raise KeyboardInterrupt("; nothing was written") from None

        return program(main)

    return decorate


def flags_of(description: str | None) -> argparse.ArgumentParser:
    """A parser, still without flags, whose --help begins with the program's docstring as it stands."""
    return argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )


# ---- start and end ------------------------------------------------------------------------------------------------


def announce(*names: str) -> None:
    """Print on a terminal that the program starts, where it is one of `names` and no worker of ours."""
    if Path(sys.argv[0]).name in names and launched_rank() == 0 and LAUNCHER_PID not in os.environ:
        say_at_terminal(f"MegaZ++ {megazpp.__version__} starts: importing torch")


def launched_rank(env: Mapping[str, str] = os.environ) -> int:
    """Return this process's rank as its launcher's environment has it, so that one process speaks; 0 if unclear."""
    if "RANK" in env:
        return int(env["RANK"])
    try:
        launched = find_launcher(env)
    except ValueError:  # which `detect_rank_info` reports
        return 0
    return 0 if launched is None else launched.rank


def exit_on_signals() -> None:
    """Have SIGTERM and SIGHUP leave through `finally` and `with`, as Ctrl-C does."""

    def leave(number: int, frame: object) -> NoReturn:
        raise SystemExit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, leave)


def end_with(launcher: int) -> None:
    """Have the kernel kill this process when its launcher dies, `kill -9` included; elsewhere than on Linux nothing."""
    with contextlib.suppress(OSError, AttributeError):  # other systems have no prctl
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, int(signal.SIGKILL))
    if os.getppid() != launcher:  # it died before the line above
        os._exit(EXIT_ERROR)


# ---- errors that a user reads without a traceback -----------------------------------------------------------------


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
        raise UserError(in_words(error)) from error


def in_words(error: BaseException, command_line: Sequence[str] | None = None) -> str:
    """Describe an error to a user, where its own text is about Python.

    An error about a file begins with the flag whose value is that file, a folder around it or one in it; flags are
    looked for in `command_line` (without the program; None: this program's).
    """
    if isinstance(error, UnicodeEncodeError):
        return f"{error.object[error.start : error.end]!r} is half of a surrogate pair, and no text"
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


# ---- lines of text ------------------------------------------------------------------------------------------------


def say(line: Any) -> None:
    """Print a line of progress, where it does not mix with results."""
    print(line, file=sys.stderr, flush=True)


def say_at_terminal(line: str) -> None:
    """Print a line about the start, if somebody waits at a terminal."""
    if sys.stderr.isatty():
        say(line)


def times_fewer(sent_bytes: float, other_bytes: float) -> str:
    """Write "7.7 x fewer" than `other_bytes`; nothing where nothing was sent, or less than 5 % was saved."""
    return f"{other_bytes / sent_bytes:.1f} x fewer" if sent_bytes and other_bytes > 1.05 * sent_bytes else ""


def aligned(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    """A line for each row; every column is as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
