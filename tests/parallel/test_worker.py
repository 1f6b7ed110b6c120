"""A worker's gloo groups share a device that listens on the loopback, and its threads wait their turn."""

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import ranks
from torch.distributed import distributed_c10d

from megazpp.parallel import worker

TIMEOUT = timedelta(seconds=77)


def device_threads() -> list[int]:
    names = Path("/proc/self/task").glob("*/comm")
    return [int(file.parent.name) for file in names if file.read_text().strip() == "gloo_tcp_loop"]


def scheduling_policies() -> tuple[set[int], int]:
    """Of the threads that move messages, and of the one that computes."""
    return {os.sched_getscheduler(thread) for thread in device_threads()}, os.sched_getscheduler(0)


def sums_on_new_groups(count: int) -> tuple[list[float], int, timedelta]:
    before = len(device_threads())
    groups = [dist.new_group([0, 1], timeout=TIMEOUT) for _ in range(count)]
    values = [torch.tensor(float(index + dist.get_rank())) for index in range(count)]
    pending = [dist.all_reduce(x, group=group, async_op=True) for x, group in zip(values, groups, strict=True)]
    for work in pending:
        assert work is not None
        work.wait()
    backend = groups[0]._get_backend(torch.device("cpu"))
    return [float(x) for x in values], len(device_threads()) - before, backend.options._timeout


def test_new_groups_add_no_device_threads_and_keep_their_timeout():
    assert ranks(2).run(sums_on_new_groups, 3) == [([1.0, 3.0, 5.0], 0, TIMEOUT)] * 2


def test_threads_that_move_messages_wait_their_turn_and_those_that_compute_do_not():
    found = ranks(2).run(scheduling_policies)
    if not any(policies for policies, _ in found):
        pytest.skip("torch 2.11 does not name gloo's threads")
    assert found == [({os.SCHED_BATCH}, os.SCHED_OTHER)] * 2


def test_a_kernel_without_that_policy_is_no_failure(monkeypatch):
    def refuse(pid: int, policy: int, param: os.sched_param) -> None:
        if policy != os.SCHED_OTHER:
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    with worker._threads_that_wait_their_turn():
        pass


def test_the_interface_that_the_environment_names_is_used(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-interface")
    monkeypatch.setattr(distributed_c10d, "ProcessGroupGloo", distributed_c10d.ProcessGroupGloo)  # put back afterwards
    with pytest.raises(RuntimeError, match="no-such-interface"):
        worker.share_gloo_device()


LISTENING = """
import os, sys, torch.distributed as dist
from pathlib import Path
from megazpp.parallel.worker import share_gloo_device
share_gloo_device(loopback=True, lazy=True)
dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)
own = {os.readlink(file) for file in Path('/proc/self/fd').iterdir() if file.exists() or file.is_symlink()}
for table in ('tcp', 'tcp6'):
    for row in Path('/proc/net', table).read_text().splitlines()[1:]:
        words = row.split()
        if words[3] == '0A' and f'socket:[{words[9]}]' in own: print(words[1].split(':')[0])
sys.stdout.flush(); os._exit(0)
"""


@pytest.mark.slow
def test_on_one_machine_gloo_listens_on_the_loopback_only():
    env = {name: value for name, value in os.environ.items() if name != "GLOO_SOCKET_IFNAME"}
    done = subprocess.run([sys.executable, "-c", LISTENING], capture_output=True, text=True, check=True, env=env)
    assert {*done.stdout.split()} == {"0100007F"}  # as the kernel writes addresses


def lazily_connected(count: int) -> list[object]:
    make = distributed_c10d.ProcessGroupGloo
    worker.share_gloo_device(lazy=True)
    try:
        group = dist.new_group(list(range(count)), backend="gloo")
    finally:
        distributed_c10d.ProcessGroupGloo = make
    values: list[object] = [None] * count if dist.get_rank() == 0 else []
    dist.gather_object(dist.get_rank(), values or None, dst=0, group=group)
    box = [values]
    dist.broadcast_object_list(box, src=0, group=group)
    return box[0]


def test_ranks_that_connect_when_they_first_send_pass_objects_all_the_same():
    assert ranks(4).run(lazily_connected, 4) == [[0, 1, 2, 3]] * 4
