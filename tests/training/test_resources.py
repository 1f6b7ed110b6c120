"""Memory and CPU time are those of this process."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
import torch

from megazpp.training.resources import cpu_seconds, memory_line, peak_memory_bytes

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
