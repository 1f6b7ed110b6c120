"""Measure the CPU seconds of each test file, and fail a run in which a file takes more than a limit.

`MEGAZPP_FILE_SECONDS=10 python -m pytest` sets the limit and prints the most expensive files; `inf` only prints them.
The seconds include all processes that a file's tests use: pytest, the shared rank workers and started programs, but not
the server that forks the test processes. They hardly depend on how busy the machine is, but a slower machine needs a
larger limit.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

LIMIT = "MEGAZPP_FILE_SECONDS"
SHOWN = 30


class FileSeconds:
    """Pytest plugin that adds up the CPU seconds of each test file.

    Each worker process of pytest-xdist counts the files that it runs. The main process adds the counts of all workers.
    """

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.seconds: Counter[str] = Counter()
        self.last = 0.0

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if session.items:  # with pytest-xdist, the main process runs no tests and has no items
            self._charge("imports and collection")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[Any]:
        result = yield
        # measure only after the last test of a file, because reading the times of all processes takes milliseconds
        if nextitem is None or nextitem.path != item.path:
            self._charge(item.nodeid.partition("::")[0])
        return result

    def _charge(self, name: str) -> None:
        now = tree_seconds()
        self.seconds[name] += now - self.last
        self.last = now

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self.seconds.update(getattr(node, "workeroutput", {}).get("file_seconds", {}))

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["file_seconds"] = dict(self.seconds)
        elif self.too_long() and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        terminalreporter.section("CPU seconds")
        for name, seconds in self.seconds.most_common(SHOWN):
            terminalreporter.line(f"{seconds:7.1f}  {name}")
        terminalreporter.line(f"{self.seconds.total():7.1f}  all {len(self.seconds)}")
        for name in self.too_long():
            took = f"{name} took {self.seconds[name]:.1f} CPU seconds"
            terminalreporter.line(f"ERROR {took}, more than {LIMIT}={self.limit:g} allows: mark its long tests slow")

    def too_long(self) -> list[str]:
        """Return the names of the test files that took more CPU seconds than the limit."""
        return [name for name, seconds in self.seconds.items() if seconds > self.limit and name.endswith(".py")]


def tree_seconds() -> float:
    """Return the CPU seconds of this process and all its descendants."""
    me, total = psutil.Process(), 0.0
    for process in (me, *me.children(recursive=True)):
        try:
            times = process.cpu_times()
        # the process has just ended, so the `children_user` and `children_system` of its parent have its seconds
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total
