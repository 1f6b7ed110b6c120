"""Gloo groups of one process share a device."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import ranks

from megazpp.parallel import gloo

TIMEOUT = timedelta(seconds=77)


def device_threads() -> int:
    return len(device_thread_ids())


def device_thread_ids() -> list[int]:
    names = Path("/proc/self/task").glob("*/comm")
    return [int(file.parent.name) for file in names if file.read_text().strip() == "gloo_tcp_loop"]


def scheduling_policies() -> tuple[set[int], int]:
    """Of the threads that move messages, and of the one that computes."""
    return {os.sched_getscheduler(thread) for thread in device_thread_ids()}, os.sched_getscheduler(0)


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


def test_threads_that_move_messages_wait_their_turn_and_those_that_compute_do_not() -> None:
    found = ranks(2).run(scheduling_policies)
    if not any(policies for policies, _ in found):
        pytest.skip("torch 2.11 does not name gloo's threads")
    assert found == [({os.SCHED_BATCH}, os.SCHED_OTHER)] * 2


def test_a_kernel_without_that_policy_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int, policy: int, param: os.sched_param) -> None:
        if policy != os.SCHED_OTHER:
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    with gloo._threads_that_wait_their_turn():
        pass


def test_the_interface_that_the_environment_names_is_used() -> None:
    program = (
        "import os; os.environ['GLOO_SOCKET_IFNAME'] = 'no-such-interface'\n"
        "from megazpp.parallel.gloo import share_gloo_device; share_gloo_device()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "no-such-interface" in done.stderr
