"""Functions that all programs share: entry point, flags, exit codes, error messages, and text output.

    begin(__name__)  # before slow imports

    @program
    def main(argv: list[str]) -> int | None: ...

    if __name__ == "__main__":
        raise SystemExit(main())

A program whose flags are config dataclasses decorates a function of these configs with `@program_of(Config, ...)`.
This file does not import torch, because programs call its functions before the slow import of torch.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import errno
import functools
import inspect
import io
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TextIO, TypeVar

import megazpp
from megazpp.base.command_line import FlagParser, HelpFormatter
from megazpp.base.files import cause, encoding_problem
from megazpp.base.flag_tables import MegatronFlag
from megazpp.base.flags import check_existing
from megazpp.base.launcher import find_launcher

T = TypeVar("T")
# Exit codes of programs. A rank that ends because another rank has failed ends with EXIT_SECONDARY. The watchdog ends a
# rank without progress with EXIT_HANG. If a worker still runs long after the others have ended, the launcher treats it
# as ended with EXIT_LATE.
EXIT_ERROR, EXIT_USER_ERROR, EXIT_SECONDARY, EXIT_HANG, EXIT_LATE = 1, 2, 3, 4, 5
EXIT_INTERRUPTED = 128 + signal.SIGINT  # shells report death by signal n as 128 + n
EXIT_READER_GONE = 128 + signal.SIGPIPE
# Environment variable of workers that a launching process of MegaZ++ starts: the process id of the launching process
LAUNCHER_PID = "MEGAZPP_LAUNCHER_PID"
# Environment variable of workers that a launching process of MegaZ++ starts: `time.monotonic()` when that process began
BEGAN = "MEGAZPP_BEGAN"
_SET_PARENT_DEATH_SIGNAL = 1  # option PR_SET_PDEATHSIG of Linux's prctl
# Ends of the messages about an OSError of a full disk, by the error's number, that say what the user can do about it
REMEDIES = dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "; free disk space, or choose another disk")
MEGA, GIGA, TERA = 1e6, 1e9, 1e12


def program(main: Callable[[list[str]], int | None]) -> Callable[..., int]:
    """Turn a `main` function into a program's entry point, which returns the exit status.

    The entry point takes the arguments from its parameter `argv`; without `argv`, from the command line. It prints
    OSError, ValueError and JobError as one line per problem, without a traceback. If the reader of stdout has exited,
    as in `program | head`, the program ends silently. If the terminal is closed, the program continues without output.

    Args:
        main: function that takes the arguments without the program name, and returns the exit status or, for 0, None.
    """
    name = Path(inspect.getfile(inspect.unwrap(main))).name

    @functools.wraps(main)
    def run(argv: Sequence[str] | None = None) -> int:
        words = sys.argv[1:] if argv is None else list(argv)
        # In a worker that a launching process of MegaZ++ has started, `_leave_on_ctrl_c` stays the handler until
        # `worker_process` (parallel/worker.py) sets another one. In a worker, `_leave_on_ctrl_c` prints nothing,
        # because the launching process reports Ctrl-C.
        begun = signal.getsignal(signal.SIGINT) is _leave_on_ctrl_c and LAUNCHER_PID not in os.environ
        if begun:  # during `main`, Ctrl-C must run `finally` blocks
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
            # Printed texts may have characters that stdout's encoding lacks, such as a path with bytes that are not
            # UTF-8. They are printed as escape sequences, as print would otherwise raise UnicodeEncodeError.
            sys.stdout.reconfigure(errors="backslashreplace")
        with lasting_output():
            try:
                try:
                    return main(words) or 0
                finally:
                    # If the reader of stdout has exited, this flush raises the BrokenPipeError that is caught below.
                    # The interpreter's own flush at exit would print a traceback.
                    sys.stdout.flush()
            except BrokenPipeError:
                return EXIT_READER_GONE
            except (OSError, ValueError, JobError) as error:
                failure = error if isinstance(error, JobError) else UserError(in_words(error, words))
                failure.show(name)
                return failure.exit_code
            except KeyboardInterrupt as interrupt:
                say(f"{name}: interrupted{interrupt}")
                return EXIT_INTERRUPTED
            finally:
                if begun:
                    signal.signal(signal.SIGINT, _leave_on_ctrl_c)

    return run


def program_of(
    *configs: type, description: str | None = None, megatron_flags: Mapping[str, MegatronFlag] | None = None
) -> Callable[[Callable[..., None]], Callable[..., int]]:
    """Return a decorator that turns a function of configs into a program's entry point.

    SIGTERM and SIGHUP raise SystemExit in the function, so that the function can remove incomplete output.

    Args:
        *configs: config classes. The function receives one config of each class, parsed from the command line.
        description: first lines of --help; None for the docstring of the function's module.
        megatron_flags: flags of the Megatron-LM program of the same name that this program ignores or rejects, by
            name.
    """

    def decorate(work: Callable[..., None]) -> Callable[..., int]:
        @functools.wraps(work)
        def main(argv: list[str]) -> None:
            text = description or sys.modules[work.__module__].__doc__ or ""
            parser = FlagParser(configs, program=Path(inspect.getfile(work)).name, description=text)
            parsed = parser.read(argv, Path.cwd(), megatron_flags or {})
            say_notices(parsed.notices)
            check_existing(parsed.configs)
            exit_on_signals()  # a signal then runs the `finally` blocks of `work`, which remove incomplete output
            try:
                work(*parsed.configs)
            except KeyboardInterrupt:
                raise KeyboardInterrupt("; nothing was written") from None

        return program(main)

    return decorate


def flags_of(description: str | None) -> argparse.ArgumentParser:
    """Return an argparse parser without flags, whose --help begins with the unformatted `description`."""
    return argparse.ArgumentParser(description=description, formatter_class=HelpFormatter, allow_abbrev=False)


# ---- start and end of a program -----------------------------------------------------------------------------------


def begin(module: str) -> None:
    """Prepare this process for the slow imports of a program; the program calls this before the imports.

    Until the entry point of `program` runs, Ctrl-C ends the process with one line and no traceback. torch's C++ parts
    print only errors. Their warnings about a lost connection have dozens of C++ frames, which would hide the line that
    names the lost host. A value of TORCH_CPP_LOG_LEVEL that the user has set is kept.

    Args:
        module: `__name__` of the program's module. Unless it is "__main__", another file has imported the program, and
            nothing happens.
    """
    if module != "__main__":
        return
    _open_standard_streams()
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # A shell starts background jobs with SIGINT ignored, so Python has not set its handler. SIGINT then stays ignored.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave_on_ctrl_c)
    # MegaZ++'s launcher has blocked SIGINT for the start of a worker's interpreter, so unblock it now.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _open_standard_streams() -> None:
    """Open /dev/null for each of stdin, stdout and stderr that the caller of this program has closed (`2>&-`).

    Otherwise the next file or socket would get the descriptor of the stream, and torch's C++ parts would write their
    messages into it.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is the number of the stream
            os.set_inheritable(descriptor, True)
            setattr(sys, name, os.fdopen(descriptor, mode))


def _leave_on_ctrl_c(number: int, frame: FrameType | None) -> NoReturn:
    """Handle SIGINT during the imports of a program: print one line, and exit the process at once.

    Only one process of a job prints the line: rank 0, or the process that has launched the workers.
    """
    if launched_rank() == 0 and LAUNCHER_PID not in os.environ:
        with contextlib.suppress(OSError):  # the terminal may be closed
            say(f"{Path(sys.argv[0]).name}: interrupted")
    os._exit(EXIT_INTERRUPTED)


def announce(module: str) -> None:
    """Print on a terminal that the program starts, because the following import of torch takes seconds.

    Nothing is printed in a worker, and on other ranks than rank 0.

    Args:
        module: `__name__` of the program's module. Unless it is "__main__", another file has imported the program, and
            nothing is printed.
    """
    if module == "__main__" and launched_rank() == 0 and LAUNCHER_PID not in os.environ:
        say_at_terminal(f"MegaZ++ {megazpp.__version__} starts: importing torch")


def answer_flags(
    module: str, parse: Callable[[list[str]], T], answers: Callable[[T], bool] = lambda parsed: False
) -> None:
    """End the program at once if its flags are wrong or ask only for information, such as --help.

    A program calls this before imports that take seconds. Ranks of a job and launching processes with --nnodes skip
    this check. Their `main` checks the flags, because an error in `main` is also reported to the other hosts.

    Args:
        module: `__name__` of the program's module. Unless it is "__main__", another file has imported the program, and
            nothing happens.
        parse: function that parses the arguments without the program name. It raises ValueError or OSError if they are
            wrong.
        answers: function that gets the result of `parse`. If flags ask for information instead of the program's work,
            the function prints the information and returns True.
    """
    try:
        is_one_of_many = LAUNCHER_PID in os.environ or "RANK" in os.environ or find_launcher(os.environ) is not None
        is_one_of_many |= any(word.partition("=")[0] == "--nnodes" for word in sys.argv)
    except ValueError:  # a variable is wrong, which parallel/launch.py reports later
        return

    @program
    @functools.wraps(parse)
    def run(argv: list[str]) -> None:
        if answers(parse(argv)):
            raise SystemExit(0)

    if module == "__main__" and not is_one_of_many and (status := run()):
        raise SystemExit(status)


def launched_rank(env: Mapping[str, str] = os.environ) -> int:
    """Return this process's rank from its launcher's environment variables, so that only rank 0 prints a line.

    The rank is 0 if no launcher has started this process, or if the variables are not numbers.
    """
    try:
        if "RANK" in env:
            return int(env["RANK"])
        launched = find_launcher(env)
    except ValueError:  # a variable is wrong, which parallel/launch.py reports later
        return 0
    return 0 if launched is None else launched.rank


def exit_on_signals() -> None:
    """Make SIGTERM and SIGHUP raise SystemExit, so that `finally` and `with` blocks run as after Ctrl-C."""

    def leave(number: int, frame: object) -> NoReturn:
        raise SystemExit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        if not ignored(number):
            signal.signal(number, leave)


def ignored(number: int) -> bool:
    """Return True if the signal is SIGHUP and nohup has made this program ignore it, so that no handler may be set."""
    return number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN


@contextlib.contextmanager
def handling(
    signals: Iterable[signal.Signals], handler: Callable[[int, FrameType | None], None] | signal.Handlers
) -> Iterator[None]:
    """Let `handler` handle the signals during the block. At its end the previous handlers are restored.

    With `signal.SIG_DFL` a signal ends the process at once, also in C++ code that runs for minutes. Python's own
    handlers would run only after this code. SIGHUP stays ignored in a program that nohup has started.
    """
    before = {signum: signal.signal(signum, handler) for signum in signals if not ignored(signum)}
    try:
        yield
    finally:
        for signum, earlier in before.items():
            signal.signal(signum, earlier)


def leave(code: int) -> NoReturn:
    """Flush stdout and stderr, and exit the process immediately with `os._exit(code)`.

    `sys.exit` would race with gloo's threads, and would take seconds on a busy machine.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # the reader of stdout may have exited, which must not change the exit code
            stream.flush()
    os._exit(code)


def end_with(launcher: int) -> None:
    """Make the kernel kill this process when its launching process dies for any reason.

    Only Linux supports this. On other systems, the function only checks once that the launching process still runs.

    Args:
        launcher: process id of the launching process, which is the parent of this process.
    """
    with contextlib.suppress(OSError, AttributeError):  # systems other than Linux have no prctl
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, int(signal.SIGKILL))
    if os.getppid() != launcher:  # the launching process died before prctl, so the kernel would not kill this process
        os._exit(EXIT_ERROR)


# ---- errors that a user reads without a traceback -----------------------------------------------------------------


class JobError(Exception):
    """Error that ends the job. A program in which this error is raised prints the error's text without a traceback."""

    exit_code = EXIT_ERROR

    def show(self, program: str = "") -> None:
        """Print the error to stderr, one line per problem, each with the name of the program.

        Args:
            program: name of the program; "" for the file name of the running script.
        """
        for line in str(self).splitlines():
            say(f"{program or Path(sys.argv[0]).name}: error: {line}")


class UserError(JobError):
    """Error in the user's flags or files. A restart of the job would fail again, so --max-restarts does not apply."""

    exit_code = EXIT_USER_ERROR


@contextlib.contextmanager
def user_errors() -> Iterator[None]:
    """Convert a ValueError of a block that checks flags or files to a UserError, which is printed without traceback."""
    try:
        yield
    except ValueError as error:
        raise UserError(in_words(error)) from error


def in_words(error: BaseException, command_line: Sequence[str] | None = None) -> str:
    """Return a message for users about an error, which a program prints in place of a traceback.

    For an OSError about a file or folder, the message also names the flag whose value is this path, a folder that
    contains it, or a path inside of it.

    Args:
        error: the error.
        command_line: arguments in which to search for the flag; None for the arguments of this program.
    """
    if isinstance(error, UnicodeEncodeError):
        if (problem := encoding_problem(error.object)) and error.encoding != "utf-8":
            return problem
        return f"{error.object[error.start : error.end]!r} is half of a surrogate pair, which is not valid text"
    remedy = REMEDIES.get(error.errno or 0, "") if isinstance(error, OSError) else ""
    if not isinstance(error, OSError) or not isinstance(error.filename, str):
        return f"{cause(error)}{remedy}"
    path, flag = Path(error.filename), ""
    for word in sys.argv[1:] if command_line is None else command_line:
        if word.startswith("--"):
            flag, _, word = word.partition("=")
        value = Path(os.path.expanduser(word)) if flag and word else None
        if value is not None and (value == path or value in path.parents or path in value.parents):
            return f"{flag} {word}: {path}: {error.strerror}{remedy}"
    return f"{path}: {error.strerror}{remedy}"


class Problems:
    """Collector of the errors of independent checks, so that the user sees all of them at once.

    Each check is a `with` block of this object, which suppresses an OSError or ValueError and keeps its text.
    `raise_all` then raises one ValueError with all texts. The object is true if any check has failed.
    """

    def __init__(self) -> None:
        self._lines: list[str] = []

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if isinstance(error, (OSError, ValueError)):
            self._lines += in_words(error).splitlines()
        return isinstance(error, (OSError, ValueError))

    def __bool__(self) -> bool:
        return bool(self._lines)

    def raise_all(self) -> None:
        """Raise a ValueError with one line for each different problem; do nothing if no check has failed."""
        if self._lines:
            raise ValueError("\n".join(dict.fromkeys(self._lines)))


# ---- print and format lines of text -------------------------------------------------------------------------------


class Output:
    """stdout or stderr, which drops text after its reader has gone, so that a failing print does not end the program.

    A write fails with EIO after the terminal has been closed, and with EPIPE after the reader of a pipe has exited, for
    example when an ssh connection ends. It fails with ENOSPC if the output goes to a file on a full disk. The first
    failure redirects the stream to /dev/null.

    Args:
        stream: the original stream.
        dropped: error numbers after which text is dropped. Other errors are raised.
        lost: function that is called after the first failure.
    """

    def __init__(self, stream: TextIO, dropped: Sequence[int], lost: Callable[[], None]) -> None:
        self.stream, self._dropped, self._lost = stream, dropped, lost

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        """Write `text` to the stream, or drop it if the stream has no reader; return its number of characters."""
        with self._dropping():
            self.stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Write or drop the buffered text."""
        with self._dropping():
            self.stream.flush()

    @contextlib.contextmanager
    def _dropping(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            _discard(self.stream)
            if error.errno not in self._dropped:
                error.filename = self.stream.name
                raise
            self._lost()


@contextlib.contextmanager
def lasting_output(lost: Callable[[], None] | None = None) -> Iterator[None]:
    """Make prints to stdout and stderr succeed during the block, even after the terminal has been closed.

    Args:
        lost: function that is called once per stream that has lost its reader or its disk space. None: a closed pipe
            or a full disk at stdout raises an OSError, so that `program | head` ends, and no result is incomplete.
    """
    before = sys.stdout, sys.stderr
    out, err = (stream.stream if isinstance(stream, Output) else stream for stream in before)
    gone = lost or (lambda: None)
    dropped = [errno.EIO, errno.EPIPE, *REMEDIES]
    sys.stdout = Output(out, [errno.EIO] if lost is None else dropped, gone)
    sys.stderr = Output(err, dropped, gone)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def _discard(stream: Any) -> None:
    """Redirect the file descriptor of stdout or stderr to /dev/null, also for text that is still buffered."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)


def say(line: Any) -> None:
    """Print a line to stderr, where the line does not mix with results on stdout.

    One write includes the line's end, so that lines of several processes or threads do not run into each other.
    """
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def say_notices(notices: Iterable[str]) -> None:
    """Print notices to stderr as lines "note: ...", for example about ignored flags."""
    for notice in notices:
        say(f"note: {notice}")


def say_at_terminal(line: str) -> None:
    """Print a line to stderr if stderr is a terminal."""
    if sys.stderr.isatty():
        say(line)


def times_fewer(sent_bytes: float, other_bytes: float) -> str:
    """Return text such as "7.7 x fewer", which says how many times fewer `sent_bytes` are than `other_bytes`.

    The text is "" if `sent_bytes` is 0, or if `other_bytes` is less than 5 % larger.
    """
    return f"{other_bytes / sent_bytes:.1f} x fewer" if sent_bytes and other_bytes > 1.05 * sent_bytes else ""


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table, from the cells of its header and of its other rows."""
    return [f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *rows)]


def aligned(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    """Yield the lines of a text table, one per row, with each column padded to the width of its widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
