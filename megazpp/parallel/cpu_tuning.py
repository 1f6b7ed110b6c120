"""Faster gloo workers on CPUs: one network device, threads that wait their turn, memory that is kept.

torch gives every gloo group a device of its own, whose thread wakes up a hundred times a second: 2.4 % of a core with
10 idle groups, 0.4 % with one device for all (torch 2.13). `torch.distributed.new_group` takes no gloo options, so the
class that it calls is replaced by one that fills them in.

A message wakes that thread while another one holds the connection's lock, and it asks again at once (gloo's
Pair::handleEvents under a level-triggered epoll) until its time slice is over. Under SCHED_BATCH a wake-up waits until
the running thread lets go; the CPU time of a step with TP 4 on 2 cores fell by a third.

glibc gives large buffers back to the kernel, which clears every page of the next one: 30 % of all CPU time of 8 gloo
ranks, 8 % where freed memory is kept, as CUDA's caching allocator does. A thread's own arena cannot use what another
thread has freed.
"""

from __future__ import annotations

import abc
import contextlib
import ctypes
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

TRIM_THRESHOLD, MMAP_MAX, ARENA_MAX = -1, -4, -8  # of <malloc.h>
NEVER = 2**31 - 1


def share_gloo_device(*, loopback: bool = False, lazy: bool = False) -> None:
    """From here on the gloo groups of this process share a device; without gloo in torch this does nothing.

    Args:
        loopback: listen there and nowhere else, unless GLOO_SOCKET_IFNAME names interfaces: no other machine takes
            part.
        lazy: connect two ranks when one first sends to the other, rather than each rank with all at once, which are a
            million connections among 1024 ranks. For groups that only pass small messages to and from one rank.
    """
    if not dist.is_gloo_available():
        return
    gloo: Any = dist.ProcessGroupGloo
    interfaces = os.environ.get("GLOO_SOCKET_IFNAME")  # as torch reads it
    own = lazy or None  # None: as TORCH_GLOO_LAZY_INIT says
    with _threads_that_wait_their_turn():
        if interfaces:
            devices = [gloo.create_device(interface=name, lazy_init=own) for name in interfaces.split(",")]
        elif loopback:
            devices = [gloo.create_device(hostname="127.0.0.1", lazy_init=own)]
        else:
            devices = [gloo.create_default_device(lazy_init=own)]

    class OneDeviceGroup(abc.ABC):  # noqa: B024 (the registry of isinstance is all that is used)
        """Creates gloo groups on the shared device; torch takes them for its own class's."""

        def __new__(cls, store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
            options = gloo._Options()
            options._devices, options._timeout = devices, timeout
            return gloo(store, rank, size, options)

    OneDeviceGroup.register(gloo)
    distributed_c10d.ProcessGroupGloo = OneDeviceGroup  # type: ignore[misc]


def keep_freed_memory() -> None:
    """Have this process reuse the memory that it frees; on other systems than Linux with glibc this does nothing.

    For the start of a process: arenas that threads have already stay.
    """
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        for parameter, value in ((ARENA_MAX, 1), (MMAP_MAX, 0), (TRIM_THRESHOLD, NEVER)):
            mallopt(parameter, value)


@contextlib.contextmanager
def _threads_that_wait_their_turn() -> Iterator[None]:
    """Threads made inside do not preempt others when they wake up: a new thread has its maker's policy."""
    policy, parameters = os.sched_getscheduler(0), os.sched_getparam(0)
    if policy == os.SCHED_OTHER:  # anything else was somebody's choice
        with contextlib.suppress(OSError):  # gVisor's kernel has no other policy
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    try:
        yield
    finally:
        os.sched_setscheduler(0, policy, parameters)
