"""Part "sanitizer" of tools/gpu_check.py: the kernels under NVIDIA's compute-sanitizer, where it is there and works."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys

import torch

from gpu_parts.part import Report, Task, last_line, start
from kernels.block_quant import Feedback, pack, range_table, unpack_onto, unpack_sum
from kernels.formats import BlockFormat
from megazpp.zero.layout import plan_message, plan_segments

TOOLS = {
    "memcheck": ["--report-api-errors", "no"],  # torch asks the driver for what it may not have
    "racecheck": [],
    "initcheck": [],
}
CLEAN = ("ERROR SUMMARY: 0 errors", "RACECHECK SUMMARY: 0 hazards")


def measure(task: Task, report: Report) -> None:
    """One row per tool; all at once, because each spends most of its time on starting Python."""
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None or task.rehearse:
        report.note("compute-sanitizer is not here; the calls are made without it")
        run_kernels(task.device)
        report.row(tool="none", errors="")
        return
    kernels = [sys.executable, "-m", "gpu_parts.sanitizer"]
    logs = {tool: task.folder / f"{tool}.log" for tool in TOOLS}
    running = {tool: start([sanitizer, "--tool", tool, *TOOLS[tool], *kernels], log) for tool, log in logs.items()}
    for tool, process in running.items():
        try:
            process.wait(timeout=max(0.0, task.seconds - report.elapsed()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # its child too
            report.row(tool=tool, errors="not done in time")
            continue
        text, last = logs[tool].read_text(errors="replace"), last_line(logs[tool])
        clean = any(line in text for line in CLEAN)
        report.row(tool=tool, errors="none" if clean else last)
        if not clean and "SUMMARY" in text:
            report.fail(f"{tool}: {last}")


def run_kernels(device: str) -> None:
    """Each kernel on whole and partial tiles of segments that are quantized and not: sums, feedback, differences."""
    for fmt in (BlockFormat(8, 128), BlockFormat(4, 128)):
        for n in (257, 4096, 10_000):
            segments = plan_segments([("weight", (n, 1)), ("norm", (n,)), ("head", (1, 8192)), ("bias", (5,))], 1)
            table = range_table(plan_message(segments, fmt, exact_itemsize=4), torch.float32)
            x = torch.randn(2, 3, table.layout.size, device=device)
            messages = torch.zeros(2, 3, table.layout.message_bytes, dtype=torch.uint8, device=device)
            pack(x, table, messages=messages, errors=Feedback.zeros((2, 3), table, device))
            pack(x, table, messages=messages, base=x.bfloat16())
            unpack_onto(messages, table, out=x)
            unpack_sum(messages, table, out=torch.zeros_like(x[0]))


if __name__ == "__main__":
    run_kernels("cuda")
    torch.cuda.synchronize()
