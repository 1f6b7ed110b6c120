"""Part "correct" of tools/gpu_check.py: the tests that are marked `gpu`, several at once.

Compiling the kernels is what takes time. Tests of what a training uses come first; what is not done in time is counted.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from gpu_parts.part import Report, Task, run_part, start, tail

ROOT = Path(__file__).resolve().parents[2]
MARK = re.compile(r"pytest\.mark\.gpu")
DONE = re.compile(r"^tests/(\S+?)\.py::.* (PASSED|FAILED|ERROR|SKIPPED)\b", re.MULTILINE)
BLOCK_SIZE = re.compile(r"\[\d-(\d+)-dtype")
USUAL_BLOCKS = ("128", "256")  # the defaults of zero/config.py, whose import takes seconds
MOST_AT_ONCE = {"gpu": 16, "rehearsal": 1}
POLL_SECONDS = 0.2
LAST_WORDS_SECONDS = 8.0  # of a pytest that was interrupted: what has failed
INTERRUPTED = (2, -signal.SIGINT)  # exit codes: pytest's own, and before it listens


def measure(task: Task, report: Report) -> None:
    """One row per file of tests."""
    files = [path for path in sorted(ROOT.glob("tests/**/test_*.py")) if MARK.search(path.read_text())]
    tests = sorted(collect(files, task, report), key=is_late)
    at_once = min(MOST_AT_ONCE[task.sizes], os.cpu_count() or 1, len(tests))
    running = []
    for index in range(at_once):
        log = task.folder / f"shard{index}.log"
        running.append(
            (start(pytest("-vv", *(str(ROOT / test) for test in tests[index::at_once])), log, SETTINGS), log)
        )
    while any(process.poll() is None for process, _ in running):
        time.sleep(POLL_SECONDS)
        if report.elapsed() > task.seconds - LAST_WORDS_SECONDS:
            interrupt([process for process, _ in running])
    found = Counter(outcome for _, log in running for outcome in DONE.findall(log.read_text(errors="replace")))
    for process, log in running:
        if process.returncode not in (0, 1, *INTERRUPTED):  # 1: tests have failed
            report.fail(f"pytest ended with exit code {process.returncode}, see {log.name}: {tail(log, 1)}")
    add_rows(Counter(test[len("tests/") : test.index(".py::")] for test in tests), found, report)
    if task.rehearse:
        report.note(
            "without a GPU these tests are skipped; what is rehearsed is finding, sharing out and counting them"
        )
    elif not any(outcome == "PASSED" for _, outcome in found):
        report.fail("no test has passed on the GPU")


SETTINGS = {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]), "PYTHONUNBUFFERED": "1"}


def pytest(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", f"--rootdir={ROOT}", *arguments]


def collect(files: list[Path], task: Task, report: Report) -> list[str]:
    """The tests, in pytest's spelling."""
    log = task.folder / "collect.log"
    start(pytest("--collect-only", *map(str, files)), log, SETTINGS).wait()
    found = re.findall(r"^(tests/\S+?\.py::.+)$", log.read_text(), re.MULTILINE)
    for file in re.findall(r"^ERROR (\S+)", log.read_text(), re.MULTILINE):
        report.note(f"{file} was left out, it cannot be imported here (a module is missing?): see {log.name}")
    if not found:
        raise RuntimeError(f"pytest has collected nothing: {tail(log, 1)}")
    return found


def is_late(test: str) -> bool:
    """Whether it is about blocks of a size that a training does not use."""
    size = BLOCK_SIZE.search(test)
    return size is not None and size[1] not in USUAL_BLOCKS


def interrupt(processes: list[subprocess.Popen[bytes]]) -> None:
    """Have them say what has failed, and end."""
    for process in processes:
        process.send_signal(signal.SIGINT)
    deadline = time.monotonic() + LAST_WORDS_SECONDS / 2
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=max(0.0, deadline - time.monotonic()))
        if process.poll() is None:
            process.kill()
            process.wait()
            process.returncode = INTERRUPTED[0]  # as of one that has heard us


def add_rows(collected: Counter[str], found: Counter[tuple[str, str]], report: Report) -> None:
    for name, count in sorted(collected.items()):
        passed, skipped = found[name, "PASSED"], found[name, "SKIPPED"]
        failed = found[name, "FAILED"] + found[name, "ERROR"]
        report.row(tests=name, passed=passed, failed=failed, skipped=skipped, no_time=count - passed - failed - skipped)
        if failed:
            report.fail(f"{failed} tests of {name} have failed: see shard*.log")


if __name__ == "__main__":
    sys.exit(run_part(measure))
