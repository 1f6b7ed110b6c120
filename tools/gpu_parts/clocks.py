"""The GPU's clocks, power and temperature while a part runs, by nvidia-smi beside it."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from gpu_parts.part import start

FIELDS = "clocks.sm,power.draw,temperature.gpu,utilization.gpu"
EVERY_MILLISECONDS = "500"
BUSY_PERCENT = 50


@contextlib.contextmanager
def record_clocks(file: Path, *, rehearse: bool) -> Iterator[None]:
    """Write a line of FIELDS to `file` twice a second; nothing where nvidia-smi is not there."""
    program = shutil.which("nvidia-smi")
    if rehearse or program is None:
        yield
        return
    units = "--format=csv,noheader,nounits"
    process = start([program, f"--query-gpu={FIELDS}", units, "-lms", EVERY_MILLISECONDS], file)
    try:
        yield
    finally:
        process.kill()
        process.wait()


def describe_clocks(file: Path) -> list[str]:
    """A sentence on the moments in which the GPU was busy; none where there were not any."""
    busy = []
    for line in file.read_text().splitlines() if file.exists() else []:
        with contextlib.suppress(ValueError):  # "[N/A]", or a last line that is not whole
            clock, power, temperature, load = map(float, line.split(","))
            if load >= BUSY_PERCENT:
                busy.append((clock, power, temperature))
    if not busy:
        return []
    clocks, powers, temperatures = zip(*busy, strict=True)
    return [
        f"while busy, SM clock {min(clocks):.0f} to {max(clocks):.0f} MHz, at most {max(powers):.0f} W and "
        f"{max(temperatures):.0f} C ({len(busy)} samples)"
    ]
