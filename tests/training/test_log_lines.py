"""The log line byte for byte."""

from __future__ import annotations

import math

import pytest
from helpers.metrics import meter, step

from megazpp.training.log_lines import log_line, perplexity, validation_lines
from megazpp.training.metrics import SentBytes

MEGATRON_PART = (
    " iteration       10/     500 | consumed samples:           80 | elapsed time per iteration (ms): 500.0 |"
    " learning rate: 1.500E-04 | global batch size:     8 | lm loss: 1.043287E+01 | loss scale: 1.0 |"
    " grad norm: 2.718 | number of skipped iterations:   0 | number of nan iterations:   0 |"
)


def test_the_line_begins_with_megatrons_line_byte_for_byte():
    line = log_line(meter(step(10, lm_loss=10.43287, grad_norm=2.71828)).interval())
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
    line = log_line(meter(step(1, lm_loss=loss, grad_norm=math.nan, skipped=True)).interval())
    assert f" lm loss: {str(loss).upper()} |" in line
    assert " grad norm: nan | number of skipped iterations:   1 | number of nan iterations:   1 |" in line


def test_validation_is_printed_as_megatron_prints_it():
    rule, line, again = validation_lines("iteration 100", 2.5)
    assert line == " validation loss at iteration 100 | lm loss value: 2.500000E+00 | lm loss PPL: 1.218249E+01 | "
    assert rule == again == "-" * (len(line) + 1)


def test_perplexity_is_capped_and_keeps_nan():
    assert perplexity(100.0) == math.exp(20)
    assert math.isnan(perplexity(math.nan))
