"""The means of an interval, what is written to metrics.jsonl and summary.json, and the lines of the log."""

import math
import re
from pathlib import Path

import pytest
import torch
from helpers.metrics import meter, step

from megazpp.training.flops import memory_line, peak_memory_bytes
from megazpp.training.metrics import (
    INNER_LOSS,
    NOTHING_SENT,
    closing_lines,
    perplexity,
    validation_lines,
)


def test_skipped_steps_do_not_count_in_the_loss_but_in_the_time():
    interval = meter(
        step(1, loss=4.0, seconds=1.0),
        step(2, loss=math.inf, seconds=2.0, skipped=True),
        step(3, loss=2.0, seconds=6.0, grad_norm=7.0),
    ).interval()
    fields = interval.fields
    assert (fields["lm_loss"], fields["step_seconds"], fields["skipped"], fields["grad_norm"]) == (3.0, 3.0, 1, 7.0)
    assert " number of nan iterations:   1 |" in interval.line
    assert fields["tokens_per_second"] == pytest.approx(2400 / 9)


def test_an_interval_starts_where_the_last_one_ended_and_the_time_left_follows_the_samples():
    filled = meter(step(1, loss=4.0), step(2, loss=2.0))
    filled.interval()
    filled.add(step(3, loss=1.0, global_batch_size=4, consumed_samples=1000))  # of 4000, in half a second
    interval = filled.interval()
    assert interval.fields["lm_loss"] == 1.0
    assert "eta: 0:06:15 |" in interval.line


def test_tokens_are_those_that_the_model_was_given_where_a_step_knows_them():
    filled = meter(step(1, tokens=90), step(2, tokens=210))
    assert filled.interval().fields["tokens_per_second"] == 300.0
    assert (filled.summary(cpu_seconds=1.5)["tokens"], filled.summary(cpu_seconds=1.5)["cpu_seconds_per_token"]) == (
        300,
        0.005,
    )


def test_metrics_have_exactly_the_agreed_fields():
    sent = NOTHING_SENT | {"tp": 30, "cross": 10, "local": 20}
    record = meter(step(1), step(2, skipped=True)).interval(sent, peak_memory_bytes=7).fields
    assert record == {
        "iteration": 2,
        "lm_loss": 10.0,
        "grad_norm": 1.0,
        "max_grad_norm": 1.0,
        "learning_rate": 1.5e-4,
        "consumed_samples": 16,
        "consumed_tokens": 1600,
        "steps": 2,
        "step_seconds": 0.5,
        "tokens_per_second": 1600.0,
        "skipped": 1,
        "tp_bytes": 15,
        "cross_bytes": 5,
        "local_bytes": 10,
        "peak_memory_bytes": 7,
    }


def test_an_interval_has_its_largest_gradient_norm_and_a_terminal_a_line_of_at_most_100_columns():
    record = meter(step(1, grad_norm=7.25), step(2, grad_norm=None), step(3, grad_norm=1.5, skipped=True)).interval()
    assert record.fields["max_grad_norm"] == 7.25
    assert "| max grad norm: 7.250 |" in record.line
    assert len(record.short_line) <= 100
    for part in ("iteration      3/500", "loss 10.0000", "grad norm  1.500", "1,600 tokens/s", "left", "1 skipped"):
        assert part in record.short_line


def test_the_summary_covers_all_intervals_of_the_run():
    filled = meter(step(1, wait_seconds=0.25))
    filled.interval(NOTHING_SENT | {"tp": 10, "cross": 4, "local": 2})
    filled.add(step(2, skipped=True))
    assert filled.summary(cpu_seconds=8.0) == {
        "iterations": 2,
        "skipped": 1,
        "tokens": 1600,
        "seconds": 1.0,
        "tokens_per_second": 1600.0,
        "cpu_seconds_per_token": 0.005,
        "data_wait_share": 0.25,
        "tp_bytes_per_step": 5,
        "cross_bytes_per_step": 2,
        "local_bytes_per_step": 1,
    }


def test_the_speed_of_a_run_is_that_of_its_steps_after_the_first_which_compiles():
    summary = meter(step(1, seconds=60.0), step(2, seconds=0.5), step(3, seconds=1.5)).summary(cpu_seconds=1.0)
    assert (summary["tokens_per_second"], summary["seconds"]) == (2 * 800 / 2.0, 62.0)
    assert meter(step(1, seconds=4.0)).summary(cpu_seconds=1.0)["tokens_per_second"] == 800 / 4.0
    nothing = meter().summary(cpu_seconds=1.0)
    assert (nothing["tokens_per_second"], nothing["cpu_seconds_per_token"]) == (0.0, 0.0)


def test_the_peak_on_a_cpu_is_the_kernels_high_water_mark_in_bytes():
    kibibytes = int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text()).group(1))
    assert peak_memory_bytes(torch.device("cpu")) == pytest.approx(1024 * kibibytes, rel=0.05)


MEGATRON_PART = (
    " iteration       10/     500 | consumed samples:           80 | elapsed time per iteration (ms): 500.0 |"
    " learning rate: 1.500E-04 | global batch size:     8 | lm loss: 1.043287E+01 | loss scale: 1.0 |"
    " grad norm: 2.718 | number of skipped iterations:   0 | number of nan iterations:   0 |"
)


def test_the_line_begins_with_megatrons_line_byte_for_byte():
    line = meter(step(10, loss=10.43287, grad_norm=2.71828)).interval().line
    assert line == (
        MEGATRON_PART
        + " max grad norm: 2.718 | tokens/s per rank: 400.0 | model TFLOP/s per rank: 0.8000 | eta: 0:04:05 |"
    )


def test_optional_fields_stand_where_megatron_puts_them():
    line = meter(step(1, num_zeros=12.0, params_norm=345.6789, loss_scale=65536.0)).interval().line
    assert (
        " loss scale: 65536.0 | grad norm: 1.000 | num zeros: 12.0 | params norm: 345.679 |"
        " number of skipped iterations:   0 |"
    ) in line
    assert "grad norm" not in meter(step(1, grad_norm=None)).interval().line


def test_our_fields_follow_and_silent_wires_are_left_out():
    sent = NOTHING_SENT | {"tp": 2_500_000, "local": 1_250_000}
    interval = meter(step(1), peak_flops=1.6e12).interval(sent, peak_memory_bytes=3_210_000_000)
    assert interval.line.endswith(
        "| tokens/s per rank: 400.0 | model TFLOP/s per rank: 0.8000 | MFU: 50.0% | max memory (GB): 3.21 |"
        " tp MB per step: 2.500 | local MB per step: 1.250 | eta: 0:04:10 |"
    )


def test_synchronizations_of_islands_are_in_the_line_the_record_and_the_summary():
    steps = [step(1), step(2, metrics={INNER_LOSS: 3.5}), step(3), step(4, metrics={INNER_LOSS: 2.5})]
    filled = meter(*steps)
    interval = filled.interval(NOTHING_SENT | {"cross": 8_000_000, "island": 8_000_000})
    assert " inner_loss: 3 | synchronizations: 2 | loss scale" in interval.line
    assert " cross MB per step: 2.000 | island MB per step: 2.000 |" in interval.line
    found = interval.fields
    assert (found["inner_loss"], found["synchronizations"], found["island_bytes"]) == (3.0, 2, 2_000_000)
    summary = filled.summary(cpu_seconds=1.0)
    assert (summary["inner_loss"], summary["synchronizations"], summary["island_bytes_per_step"]) == (2.5, 2, 2_000_000)
    lines = closing_lines(summary | {"stop_reason": None, "final_loss": 2.5, "validation_loss": None}, trained=True)
    assert "islands synchronized 2 times, 2.000 MB per node and step between them; inner loss 2.5000" in lines
    plain = meter(step(1)).interval()
    assert "synchronizations" not in plain.line
    assert not {"synchronizations", "island_bytes", "inner_loss"} & plain.fields.keys()


def test_a_loss_that_is_not_finite_is_printed():
    for loss in (math.nan, math.inf):
        line = meter(step(1, loss=loss, grad_norm=math.nan, skipped=True)).interval().line
        assert f" lm loss: {str(loss).upper()} |" in line
        assert " grad norm: nan | number of skipped iterations:   1 | number of nan iterations:   1 |" in line


def test_validation_is_printed_as_megatron_prints_it_with_a_perplexity_that_is_capped_and_keeps_nan():
    rule, line, again = validation_lines("iteration 100", 2.5)
    assert line == " validation loss at iteration 100 | lm loss value: 2.500000E+00 | lm loss PPL: 1.218249E+01 | "
    assert rule == again == "-" * (len(line) + 1)
    assert perplexity(100.0) == math.exp(20)
    assert math.isnan(perplexity(math.nan))


@pytest.mark.gpu
def test_the_memory_line_is_megatrons():
    line = memory_line(3, 10, torch.device("cuda"))
    number = r"\d+\.\d\d"
    assert re.fullmatch(
        rf"\[Rank 3\] \(after 10 iterations\) memory \(MB\) \| allocated: {number} \| max allocated: {number}"
        rf" \| reserved: {number} \| max reserved: {number}",
        str(line),
    )
