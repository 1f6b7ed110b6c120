"""The frame of every program: it reads flags, reports a mistake of the user and ends. Nothing here needs torch.

    @program
    def main(argv: list[str]) -> int | None: ...

    if __name__ == "__main__":
        raise SystemExit(main())

Where the flags are fields of configs, `@program_of(Config, ...)` stands over a function that takes the configs.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from megazpp.base.command_line import FlagParser, MegatronFlag
from megazpp.base.errors import EXIT_INTERRUPTED, EXIT_READER_GONE, JobError, UserError, in_words


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

    --help begins with `description` (default: the docstring of the program). `megatron_flags` are further flags of
    Megatron's tool of that name, which have no effect or are refused.
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


def exit_on_signals() -> None:
    """Have SIGTERM and SIGHUP leave through `finally` and `with`, as Ctrl-C does."""

    def leave(number: int, frame: object) -> NoReturn:
        raise SystemExit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, leave)


def say(line: Any) -> None:
    """Print a line of progress, where it does not mix with results."""
    print(line, file=sys.stderr, flush=True)
