"""Part "correct" of tools/gpu_check.py: the tests that are marked `gpu`, several at once.

Compiling the kernels is what takes time. Tests of what a training uses come first; what is not done in time is counted.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from gpu_parts.part import Report, Task, last_line, start

ROOT = Path(__file__).resolve().parents[2]
PYTEST = [sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", f"--rootdir={ROOT}"]
DONE = re.compile(r"^tests/(\S+?)\.py::.* (PASSED|FAILED|ERROR|SKIPPED)\b", re.MULTILINE)
BLOCK_SIZE = re.compile(r"\[\d-(\d+)-dtype")
USUAL_BLOCKS = ("128", "256")  # the defaults of zero/config.py, whose import takes seconds
LAST_WORDS_SECONDS = 8.0  # of a pytest that was interrupted: what has failed


def measure(task: Task, report: Report) -> None:
    """One row per file of tests."""
    tests = sorted(collect(task, report), key=is_late)
    at_once = min(task.size(16, 1), os.cpu_count() or 1, len(tests))
    running = {}
    for index in range(at_once):
        log = task.folder / f"shard{index}.log"
        running[log] = start([*PYTEST, "-vv", *(str(ROOT / test) for test in tests[index::at_once])], log)
    wait_for(running.values(), task.seconds - LAST_WORDS_SECONDS - report.elapsed())
    late = [process for process in running.values() if process.poll() is None]
    for process in late:
        process.send_signal(signal.SIGINT)
    wait_for(late, LAST_WORDS_SECONDS / 2)
    for process in late:
        process.kill()
        process.wait()

    found = Counter(outcome for log in running for outcome in DONE.findall(log.read_text(errors="replace")))
    for log, process in running.items():
        if process not in late and process.returncode not in (0, 1):  # 1: tests have failed
            report.fail(f"pytest ended with exit code {process.returncode}, see {log.name}: {last_line(log)}")
    add_rows(Counter(test[len("tests/") : test.index(".py::")] for test in tests), found, report)
    if task.rehearse:
        report.note(
            "without a GPU these tests are skipped; what is rehearsed is finding, sharing out and counting them"
        )
    elif not any(outcome == "PASSED" for _, outcome in found):
        report.fail("no test has passed on the GPU")


def collect(task: Task, report: Report) -> list[str]:
    """The tests, in pytest's spelling."""
    files = [path for path in sorted(ROOT.glob("tests/**/test_*.py")) if "pytest.mark.gpu" in path.read_text()]
    log = task.folder / "collect.log"
    start([*PYTEST, "--collect-only", *map(str, files)], log).wait()
    found = re.findall(r"^(tests/\S+?\.py::.+)$", log.read_text(), re.MULTILINE)
    for file in re.findall(r"^ERROR (\S+)", log.read_text(), re.MULTILINE):
        report.note(f"{file} was left out, it cannot be imported here (a module is missing?): see {log.name}")
    if not found:
        raise RuntimeError(f"pytest has collected nothing: {last_line(log)}")
    return found


def is_late(test: str) -> bool:
    """Whether it is about blocks of a size that a training does not use."""
    size = BLOCK_SIZE.search(test)
    return size is not None and size[1] not in USUAL_BLOCKS


def wait_for(processes: Iterable[subprocess.Popen[bytes]], seconds: float) -> None:
    """Until all have ended, or no longer than that."""
    until = time.monotonic() + seconds
    for process in processes:
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=max(0.0, until - time.monotonic()))


def add_rows(collected: Counter[str], found: Counter[tuple[str, str]], report: Report) -> None:
    for name, count in sorted(collected.items()):
        passed, skipped = found[name, "PASSED"], found[name, "SKIPPED"]
        failed = found[name, "FAILED"] + found[name, "ERROR"]
        report.row(tests=name, passed=passed, failed=failed, skipped=skipped, no_time=count - passed - failed - skipped)
        if failed:
            report.fail(f"{failed} tests of {name} have failed: see shard*.log")
