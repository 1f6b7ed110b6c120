"""The means of an interval, and what is written to metrics.jsonl and summary.json."""

from __future__ import annotations

import math
import re
import time
from pathlib import Path

import pytest
import torch
from helpers.metrics import meter, step

from megazpp.training.metrics import SentBytes, cpu_seconds, peak_memory_bytes


def test_skipped_steps_do_not_count_in_the_loss_but_in_the_time():
    interval = meter(
        step(1, loss=4.0, seconds=1.0),
        step(2, loss=math.inf, seconds=2.0, skipped=True),
        step(3, loss=2.0, seconds=6.0, grad_norm=7.0),
    ).interval()
    assert interval.lm_loss == 3.0
    assert interval.step_seconds == 3.0
    assert (interval.skipped, interval.nan) == (1, 1)
    assert interval.last.grad_norm == 7.0
    assert interval.tokens_per_second == pytest.approx(2400 / 9)


def test_an_interval_starts_where_the_last_one_ended():
    filled = meter(step(1, loss=4.0), step(2, loss=2.0))
    filled.interval()
    filled.add(step(3, loss=1.0))
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
    filled = meter(step(1, wait_seconds=0.25, sent_bytes=SentBytes(tp=10, cross=4, local=2)))
    filled.interval()
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


def test_a_run_without_a_step_has_a_summary_too():
    summary = meter().summary(cpu_seconds=1.0)
    assert (summary["tokens_per_second"], summary["cpu_seconds_per_token"]) == (0.0, 0.0)


CPU = torch.device("cpu")


def test_the_peak_on_a_cpu_is_the_kernels_high_water_mark_in_bytes():
    status = Path("/proc/self/status").read_text()
    kibibytes = int(re.search(r"VmHWM:\s+(\d+) kB", status).group(1))
    assert peak_memory_bytes(CPU) == pytest.approx(1024 * kibibytes, rel=0.05)


def test_cpu_time_counts_work_and_not_waiting():
    start = cpu_seconds()
    time.sleep(0.1)
    assert cpu_seconds() - start < 0.08
    end = time.perf_counter() + 0.2
    while time.perf_counter() < end:
        pass
    assert cpu_seconds() - start > 0.02
