"""The log line byte for byte, the means of an interval, and what is written to metrics.jsonl and summary.json."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from megazpp.training.metrics import Meter, RunShape, SentBytes, StepRecord, perplexity, validation_lines

SHAPE = RunShape(
    total_iterations=500, total_samples=4000, seq_length=100, world_size=4, flops_per_token=2 * 10**9, peak_flops=None
)


def step(iteration: int = 1, **values: Any) -> StepRecord:
    """A step of 8 samples and half a second."""
    defaults: dict[str, Any] = {
        "consumed_samples": 8 * iteration,
        "global_batch_size": 8,
        "lm_loss": 10.0,
        "grad_norm": 1.0,
        "learning_rate": 1.5e-4,
        "seconds": 0.5,
    }
    return StepRecord(iteration=iteration, **{**defaults, **values})


def meter(*steps: StepRecord, **shape: Any) -> Meter:
    filled = Meter(dataclasses.replace(SHAPE, **shape))
    for one in steps:
        filled.add(one)
    return filled


MEGATRON_PART = (
    " iteration       10/     500 | consumed samples:           80 | elapsed time per iteration (ms): 500.0 |"
    " learning rate: 1.500E-04 | global batch size:     8 | lm loss: 1.043287E+01 | loss scale: 1.0 |"
    " grad norm: 2.718 | number of skipped iterations:   0 | number of nan iterations:   0 |"
)


def test_the_line_begins_with_megatrons_line_byte_for_byte():
    line = meter(step(10, lm_loss=10.43287, grad_norm=2.71828)).interval().log_line()
    assert line == (MEGATRON_PART + " tokens/s per rank: 400.0 | model TFLOP/s per rank: 0.8000 | eta: 0:04:05 |")


def test_optional_fields_stand_where_megatron_puts_them():
    line = meter(step(1, num_zeros=12.0, params_norm=345.6789, loss_scale=65536.0)).interval().log_line()
    assert (
        " loss scale: 65536.0 | grad norm: 1.000 | num zeros: 12.0 | params norm: 345.679 |"
        " number of skipped iterations:   0 |"
    ) in line
    assert " grad norm" not in meter(step(1, grad_norm=None)).interval().log_line()


def test_our_fields_follow_and_silent_wires_are_left_out():
    sent = SentBytes(tp=2_500_000, cross=0, local=1_250_000)
    interval = meter(step(1, sent_bytes=sent), peak_flops=1.6e12).interval(peak_memory_bytes=3_210_000_000)
    assert interval.log_line().endswith(
        "| tokens/s per rank: 400.0 | model TFLOP/s per rank: 0.8000 | MFU: 50.0% | max memory (GB): 3.21 |"
        " tp MB per step: 2.500 | local MB per step: 1.250 | eta: 0:04:10 |"
    )


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_printed(loss: float):
    line = meter(step(1, lm_loss=loss, grad_norm=math.nan, skipped=True)).interval().log_line()
    assert f" lm loss: {str(loss).upper()} |" in line
    assert " grad norm: nan | number of skipped iterations:   1 | number of nan iterations:   1 |" in line


def test_skipped_steps_do_not_count_in_the_loss_but_in_the_time():
    interval = meter(
        step(1, lm_loss=4.0, seconds=1.0),
        step(2, lm_loss=math.inf, seconds=2.0, skipped=True),
        step(3, lm_loss=2.0, seconds=6.0, grad_norm=7.0),
    ).interval()
    assert interval.lm_loss == 3.0
    assert interval.step_seconds == 3.0
    assert (interval.skipped, interval.nan) == (1, 1)
    assert interval.last.grad_norm == 7.0
    assert interval.tokens_per_second == pytest.approx(2400 / 9)


def test_an_interval_starts_where_the_last_one_ended():
    filled = meter(step(1, lm_loss=4.0), step(2, lm_loss=2.0))
    filled.interval()
    filled.add(step(3, lm_loss=1.0))
    assert filled.interval().lm_loss == 1.0
    with pytest.raises(AssertionError, match="needs a step"):
        filled.interval()


def test_the_time_left_follows_the_samples_also_in_a_batch_size_ramp_up():
    interval = meter(step(1, global_batch_size=4, consumed_samples=1000)).interval()
    assert interval.eta_seconds == pytest.approx(3000 / 4 * 0.5)


def test_metrics_have_exactly_the_agreed_fields():
    sent = SentBytes(tp=30, cross=10, local=20)
    record = meter(step(1), step(2, sent_bytes=sent, skipped=True)).interval(peak_memory_bytes=7).as_json()
    assert record == {
        "iteration": 2,
        "lm_loss": 10.0,
        "grad_norm": 1.0,
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


def test_the_summary_covers_all_intervals_of_the_run():
    filled = meter(step(1, sent_bytes=SentBytes(tp=10, cross=4, local=2)))
    filled.interval()
    filled.add(step(2, skipped=True))
    summary = filled.summary(
        final_loss=3.0, validation_loss=3.1, unigram_entropy=6.0, cpu_seconds=8.0, peak_memory_bytes=99
    )
    assert summary == {
        "iterations": 2,
        "skipped": 1,
        "tokens": 1600,
        "seconds": 1.0,
        "final_loss": 3.0,
        "validation_loss": 3.1,
        "unigram_entropy": 6.0,
        "tokens_per_second": 1600.0,
        "cpu_seconds_per_token": 0.005,
        "peak_memory_bytes": 99,
        "tp_bytes_per_step": 5,
        "cross_bytes_per_step": 2,
        "local_bytes_per_step": 1,
    }


def test_a_run_without_a_step_has_a_summary_too():
    summary = meter().summary(
        final_loss=math.nan, validation_loss=None, unigram_entropy=None, cpu_seconds=1.0, peak_memory_bytes=None
    )
    assert (summary["tokens_per_second"], summary["cpu_seconds_per_token"]) == (0.0, 0.0)


def test_validation_is_printed_as_megatron_prints_it():
    rule, line, again = validation_lines("iteration 100", 2.5)
    assert line == " validation loss at iteration 100 | lm loss value: 2.500000E+00 | lm loss PPL: 1.218249E+01 | "
    assert rule == again == "-" * (len(line) + 1)


def test_perplexity_is_capped_and_keeps_nan():
    assert perplexity(100.0) == math.exp(20)
    assert math.isnan(perplexity(math.nan))
