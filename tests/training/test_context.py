"""The console writes to a real pseudo-terminal here: what a user's terminal would receive."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import struct
import termios
from collections.abc import Callable
from pathlib import Path

import pytest

from megazpp.training.context import Console


def run_three_steps(console: Console) -> None:
    console.log("before")
    console.start_bar(3, 0)
    for index in range(3):
        console.advance(float(10 - index))
        console.log(f" iteration {index + 1}/3 | lm loss: {10 - index} |")
    console.stop_bar()
    console.log("after")


LINES = ["before", *(f" iteration {n}/3 | lm loss: {11 - n} |" for n in (1, 2, 3)), "after"]


def on_a_terminal(use: Callable[[Console], None], *, enabled: bool = True) -> str:
    """What a terminal of 80 columns receives."""
    reader, writer = pty.openpty()
    fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    with open(writer, "w") as out:
        use(Console(enabled=enabled, out=out))
        out.write("\0")
        out.flush()
        received = b""
        while not received.endswith(b"\0"):
            received += os.read(reader, 65536)
    os.close(reader)
    return received[:-1].decode()


def on_screen(received: str) -> list[str]:
    """The lines that a terminal shows in the end: a carriage return lets the line be written over."""
    lines = []
    for line in received.split("\n"):
        shown = ""
        for part in line.split("\r"):
            shown = part + shown[len(part) :]
        lines.append(shown.rstrip())
    return lines


def test_a_terminal_shows_the_log_lines_whole_above_a_bar_with_the_time_left():
    received = on_a_terminal(run_three_steps)
    assert " 33%|" in received
    assert "<00:0" in received  # time left
    assert "loss 9.0000" in received
    shown = [line for line in on_screen(received) if line]
    assert [line for line in shown if "%|" not in line] == LINES
    (bar,) = (line for line in shown if "%|" in line)
    assert "3/3" in bar
    assert shown.index(bar) == len(shown) - 2  # only the final state stays, above what is said after it


def test_a_file_receives_the_lines_alone():
    out = io.StringIO()
    run_three_steps(Console(enabled=True, out=out))
    assert out.getvalue().splitlines() == LINES


@pytest.mark.parametrize("terminal", [True, False])
def test_a_rank_that_does_not_print_is_silent(terminal: bool):
    if terminal:
        assert on_a_terminal(run_three_steps, enabled=False) == ""
    else:
        out = io.StringIO()
        run_three_steps(Console(enabled=False, out=out))
        assert out.getvalue() == ""


def test_a_resumed_bar_begins_where_training_stands():
    def resume(console: Console) -> None:
        console.start_bar(10, 4)
        console.stop_bar()

    assert "4/10" in on_a_terminal(resume)


def test_a_log_file_that_cannot_be_written_to_is_named_once_and_ends_nothing():
    out = io.StringIO()
    console = Console(enabled=True, out=out)
    console.keep(Path("/dev/full"))
    console.log("first")
    console.log("second")
    assert out.getvalue().splitlines()[1:] == ["first", "second"]
    assert out.getvalue().startswith("warning: /dev/full: [Errno 28] No space left on device; it gets no more lines")
