"""Part "correct" of tools/gpu_check.py: the tests that are marked `gpu`, several at once, each kernel compiled once."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import time
import xml.etree.ElementTree as ET
from pathlib import Path

from gpu_check_part import Report, Task, run_part, start, tail

ROOT = Path(__file__).resolve().parent.parent
MARK = re.compile(r"pytest\.mark\.gpu")
MOST_AT_ONCE = {"gpu": 8, "rehearsal": 1}  # compiling the kernels is what takes time
POLL_SECONDS = 0.2


def measure(task: Task, report: Report) -> None:
    """One row per file of tests."""
    if importlib.util.find_spec("pytest") is None:
        raise ModuleNotFoundError("pytest is not installed, which the tests need")
    files = [path for path in sorted(ROOT.glob("tests/**/test_*.py")) if MARK.search(path.read_text())]
    at_once = min(MOST_AT_ONCE[task.sizes], max(1, (os.cpu_count() or 2) // 2))
    shards = split(collect(files, task, report), at_once)
    running = []
    for index, tests in enumerate(shards):
        result, log = task.folder / f"shard{index}.xml", task.folder / f"shard{index}.log"
        running.append((start(pytest("--junitxml", str(result), *tests), log, SETTINGS), result, log))
    while any(process.poll() is None for process, _, _ in running):
        time.sleep(POLL_SECONDS)
    counts: dict[str, dict[str, float]] = {}
    for process, result, log in running:
        if process.returncode not in (0, 5):  # 5: no test was collected
            report.fail(f"pytest ended with exit code {process.returncode}, see {log.name}: {tail(log, 1)}")
        if result.exists():
            add_counts(counts, result)
    for name, count in sorted(counts.items()):
        report.row(
            tests=name,
            passed=int(count["passed"]),
            failed=int(count["failed"]),
            skipped=int(count["skipped"]),
            seconds=round(count["seconds"], 1),
        )
    if task.rehearse:
        report.note(
            "without a GPU these tests are skipped; what is rehearsed is finding, sharing out and counting them"
        )
    elif not any(count["passed"] for count in counts.values()):
        report.fail("no test has passed on the GPU")


SETTINGS = {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]), "CUDA_MODULE_LOADING": "LAZY"}


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
    return [str(ROOT / test) for test in found]


def split(tests: list[str], count: int) -> list[list[str]]:
    """Every n-th test: neighbours are variants of one kernel and take equally long."""
    return [part for index in range(count) if (part := tests[index::count])]


def add_counts(counts: dict[str, dict[str, float]], result: Path) -> None:
    """Add what a junit file says, by file of tests."""
    for case in ET.parse(result).getroot().iter("testcase"):
        name = case.get("classname", "").removeprefix("tests.")
        count = counts.setdefault(name, dict.fromkeys(("passed", "failed", "skipped", "seconds"), 0.0))
        kinds = {child.tag for child in case}
        outcome = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        count[outcome] += 1
        count["seconds"] += float(case.get("time", "0"))


if __name__ == "__main__":
    sys.exit(run_part(measure))
