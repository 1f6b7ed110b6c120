"""Part "sanitizer" of tools/gpu_check.py: the kernels under NVIDIA's compute-sanitizer, where it is there and works."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress

import torch

from gpu_parts.part import Report, Task, run_part, start, tail
from kernels.block_quant import Feedback, dequantize_sum, quantize_blockwise
from kernels.formats import BlockFormat

TOOLS = {
    "memcheck": ["--report-api-errors", "no"],  # torch asks the driver for what it may not have
    "racecheck": [],
    "initcheck": [],
}
CLEAN = ("ERROR SUMMARY: 0 errors", "RACECHECK SUMMARY: 0 hazards")
ONLY_KERNELS = "only the kernels"  # on the command line


def measure(task: Task, report: Report) -> None:
    """One row per tool; all at once, because each spends most of its time on starting Python."""
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None or task.rehearse:
        report.note("compute-sanitizer is not here; the calls are made without it")
        run_kernels(task.device)
        report.row(tool="none", errors="")
        return
    kernels = [sys.executable, "-m", "gpu_parts.sanitizer", ONLY_KERNELS]
    logs = {tool: task.folder / f"{tool}.log" for tool in TOOLS}
    running = {tool: start([sanitizer, "--tool", tool, *TOOLS[tool], *kernels], log) for tool, log in logs.items()}
    for tool, process in running.items():
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=max(0.0, task.seconds - report.elapsed()))
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # its child too
            report.row(tool=tool, errors="not done in time")
            continue
        text = logs[tool].read_text(errors="replace")
        clean = any(line in text for line in CLEAN)
        report.row(tool=tool, errors="none" if clean else tail(logs[tool], 1))
        if not clean and "SUMMARY" in text:
            report.fail(f"{tool}: {tail(logs[tool], 1)}")


def run_kernels(device: str) -> None:
    """Each kernel on whole and partial tiles, sums of several, with feedback, of differences."""
    for fmt in (BlockFormat(8, 128), BlockFormat(4, 128), BlockFormat(2, 128)):
        for n in (257, 4096, 10_000):
            x = torch.randn(2, 3, n, device=device)
            payload = torch.zeros(2, 3, fmt.payload_bytes(n), dtype=torch.uint8, device=device)
            scales = torch.zeros(2, 3, fmt.num_blocks(n), dtype=torch.bfloat16, device=device)
            quantize_blockwise(x, fmt, payload=payload, scales=scales, feedback=Feedback.zeros((2, 3), n, fmt, device))
            quantize_blockwise(x, fmt, payload=payload, scales=scales, base=x.bfloat16())
            out = torch.zeros(3, n, device=device)
            dequantize_sum(payload, scales, fmt, out=out)


if __name__ == "__main__":
    if sys.argv[1] == ONLY_KERNELS:
        run_kernels("cuda")
        torch.cuda.synchronize()
        sys.exit(0)
    sys.exit(run_part(measure))
