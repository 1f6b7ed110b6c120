"""Gloo groups of one process share a device."""

from __future__ import annotations

import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import ranks

TIMEOUT = timedelta(seconds=77)


def device_threads() -> int:
    return sum(task.read_text().strip() == "gloo_tcp_loop" for task in Path("/proc/self/task").glob("*/comm"))


def sums_on_new_groups(count: int) -> tuple[list[float], int, timedelta]:
    before = device_threads()
    groups = [dist.new_group([0, 1], timeout=TIMEOUT) for _ in range(count)]
    values = [torch.tensor(float(index + dist.get_rank())) for index in range(count)]
    pending = [dist.all_reduce(x, group=group, async_op=True) for x, group in zip(values, groups, strict=True)]
    for work in pending:
        assert work is not None
        work.wait()
    backend = groups[0]._get_backend(torch.device("cpu"))
    return [float(x) for x in values], device_threads() - before, backend.options._timeout


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted in /proc")
def test_new_groups_add_no_device_threads_and_keep_their_timeout() -> None:
    assert ranks(2).run(sums_on_new_groups, 3) == [([1.0, 3.0, 5.0], 0, TIMEOUT)] * 2


def test_the_interface_that_the_environment_names_is_used() -> None:
    program = (
        "import os; os.environ['GLOO_SOCKET_IFNAME'] = 'no-such-interface'\n"
        "from megazpp.parallel.gloo import share_gloo_device; share_gloo_device()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "no-such-interface" in done.stderr
