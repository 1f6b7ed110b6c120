"""What running something does to the GPU: time, memory, waits of the host, kernels. On the CPU only time."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

PROFILED_ROWS = 25


def allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def peak_of(run: Callable[[], object], times: int, device: torch.device) -> int:
    """Warm up; the most bytes that the last run allocated on top of what was there before the first (moments too)."""
    before, peak = allocated(device), 0
    for _ in range(times):
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        run()
        wait(device)
        peak = torch.cuda.max_memory_allocated(device) - before if device.type == "cuda" else 0
    return peak


def time_turn(run: Callable[[], object], steps: int, device: torch.device) -> float:
    """Seconds of one step."""
    wait(device)
    started = time.perf_counter()
    for _ in range(steps):
        run()
    wait(device)
    return (time.perf_counter() - started) / steps


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def count_waits(run: Callable[[], object], device: torch.device) -> int | str:
    """How often the host waits for the GPU in a step, as torch sees it; where is in the log."""
    if device.type != "cuda":
        return ""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    found = [warning for warning in caught if "synchroniz" in str(warning.message)]
    for warning in found:
        print(f"the host waits: {warning.filename}:{warning.lineno}")
    return len(found)


def profile(name: str, sides: Mapping[str, Callable[[], object]], folder: Path, device: torch.device) -> None:
    """What one step of each side spends its time on, into files."""
    if device.type != "cuda":
        return
    for side, run in sides.items():
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profiled:
            run()
            wait(device)
        table: Any = profiled.key_averages().table(sort_by="self_device_time_total", row_limit=PROFILED_ROWS)
        (folder / f"{name}-{side}.txt").write_text(table)
