"""The console writes to a real pseudo-terminal here: what a user's terminal would receive."""

from __future__ import annotations

import fcntl
import io
import math
import os
import pty
import re
import struct
import termios
from collections.abc import Callable

import pytest
import torch
from helpers.metrics import meter, step

from megazpp.training.console import Console, log_line, memory_line, perplexity, validation_lines
from megazpp.training.metrics import SentBytes


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


MEGATRON_PART = (
    " iteration       10/     500 | consumed samples:           80 | elapsed time per iteration (ms): 500.0 |"
    " learning rate: 1.500E-04 | global batch size:     8 | lm loss: 1.043287E+01 | loss scale: 1.0 |"
    " grad norm: 2.718 | number of skipped iterations:   0 | number of nan iterations:   0 |"
)


def test_the_line_begins_with_megatrons_line_byte_for_byte():
    line = log_line(meter(step(10, loss=10.43287, grad_norm=2.71828)).interval())
    assert line == (MEGATRON_PART + " tokens/s per rank: 400.0 | model TFLOP/s per rank: 0.8000 | eta: 0:04:05 |")


def test_optional_fields_stand_where_megatron_puts_them():
    line = log_line(meter(step(1, num_zeros=12.0, params_norm=345.6789, loss_scale=65536.0)).interval())
    assert (
        " loss scale: 65536.0 | grad norm: 1.000 | num zeros: 12.0 | params norm: 345.679 |"
        " number of skipped iterations:   0 |"
    ) in line
    assert " grad norm" not in log_line(meter(step(1, grad_norm=None)).interval())


def test_our_fields_follow_and_silent_wires_are_left_out():
    sent = SentBytes(tp=2_500_000, cross=0, local=1_250_000)
    interval = meter(step(1, sent_bytes=sent), peak_flops=1.6e12).interval(peak_memory_bytes=3_210_000_000)
    assert log_line(interval).endswith(
        "| tokens/s per rank: 400.0 | model TFLOP/s per rank: 0.8000 | MFU: 50.0% | max memory (GB): 3.21 |"
        " tp MB per step: 2.500 | local MB per step: 1.250 | eta: 0:04:10 |"
    )


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_printed(loss: float):
    line = log_line(meter(step(1, loss=loss, grad_norm=math.nan, skipped=True)).interval())
    assert f" lm loss: {str(loss).upper()} |" in line
    assert " grad norm: nan | number of skipped iterations:   1 | number of nan iterations:   1 |" in line


def test_validation_is_printed_as_megatron_prints_it():
    rule, line, again = validation_lines("iteration 100", 2.5)
    assert line == " validation loss at iteration 100 | lm loss value: 2.500000E+00 | lm loss PPL: 1.218249E+01 | "
    assert rule == again == "-" * (len(line) + 1)


def test_perplexity_is_capped_and_keeps_nan():
    assert perplexity(100.0) == math.exp(20)
    assert math.isnan(perplexity(math.nan))


CPU = torch.device("cpu")


def test_without_a_gpu_there_is_no_memory_line():
    assert memory_line(0, 10, CPU) is None


@pytest.mark.gpu
def test_the_memory_line_is_megatrons():
    line = memory_line(3, 10, torch.device("cuda"))
    number = r"\d+\.\d\d"
    assert re.fullmatch(
        rf"\[Rank 3\] \(after 10 iterations\) memory \(MB\) \| allocated: {number} \| max allocated: {number}"
        rf" \| reserved: {number} \| max reserved: {number}",
        str(line),
    )
