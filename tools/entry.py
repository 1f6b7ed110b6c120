"""How every tool reads its flags, reports a mistake of the user and ends; nothing here needs torch."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, ParamSpec

from megazpp.command_line import FlagParser, MegatronFlag
from megazpp.errors import EXIT_INTERRUPTED, EXIT_READER_GONE, JobError, UserError

P = ParamSpec("P")


def run_tool(
    program: str,
    description: str,
    configs: Sequence[type],
    work: Callable[..., None],
    argv: Sequence[str],
    *,
    megatron_flags: Mapping[str, MegatronFlag] | None = None,
) -> int:
    """Read the command line into frozen configs, work, and return the exit status.

    Args:
        configs: config classes whose fields are the flags.
        work: called with one config of each.
        megatron_flags: further flags of Megatron's tool of that name, which have no effect or are refused.
    """
    parser = FlagParser(configs, program=program, description=description)

    def read_and_work() -> None:
        parsed = parser.read(argv, Path.cwd(), megatron_flags or {})
        for notice in parsed.notices:
            say(notice)
        work(*parsed.configs)

    try:
        return _reporting(program, read_and_work)
    except KeyboardInterrupt:
        say(f"{program}: interrupted; nothing was written")
        return EXIT_INTERRUPTED


def one_line_errors(main: Callable[P, int | None]) -> Callable[P, int]:
    """Make a main return the exit status: a file or a flag that is wrong is reported in one line."""

    @functools.wraps(main)
    def run(*args: P.args, **kwargs: P.kwargs) -> int:
        return _reporting(Path(inspect.getfile(main)).name, functools.partial(main, *args, **kwargs))

    return run


def _reporting(program: str, work: Callable[[], int | None]) -> int:
    try:
        return work() or 0
    except BrokenPipeError:
        raise  # `leave_with` knows it
    except (OSError, ValueError, JobError) as error:
        failure = error if isinstance(error, JobError) else UserError(str(error))
        failure.show(program)
        return failure.exit_code


def leave_with(main: Callable[[], int | None]) -> NoReturn:
    """Run `main` and end the program with the status that it returns; None is 0. Quietly where its reader has gone."""
    try:
        try:
            status = main()
        finally:
            sys.stdout.flush()  # what is still in the buffer meets the closed pipe here, not in the interpreter's exit
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = EXIT_READER_GONE
    sys.exit(status)


def exit_on_signals() -> None:
    """Have SIGTERM and SIGHUP leave through `finally` and `with`, as Ctrl-C does."""

    def leave(number: int, frame: object) -> NoReturn:
        raise SystemExit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, leave)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Clean up without being interrupted; the commands it runs inherit that."""
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, signal.SIG_IGN) for number in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def say(line: Any) -> None:
    """Print a line of progress, where it does not mix with results."""
    print(line, file=sys.stderr, flush=True)
