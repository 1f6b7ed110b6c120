"""The start and the end of a worker process: device, process group, seeds, and how it leaves.

Every worker, whoever started it, enters and leaves through `run_worker`:

- the first rank that fails claims the failure in the store and prints its traceback; the others, whose collectives
  then break, leave without a word, so that a user reads one traceback: the right one. A rank whose collective breaks
  first waits for the launcher to end it, because a rank that was killed could not claim anything;
- every exit is barrier, destroy, flush, `os._exit`: an ordinary interpreter exit races with gloo's threads and
  aborts about one run in six (torch 2.13);
- the kernel ends a worker that we started when its launcher is gone (`kill -9` included).
"""

from __future__ import annotations

import abc
import contextlib
import ctypes
import os
import random
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from megazpp.base.launcher import find_launcher
from megazpp.base.program import EXIT_ERROR, EXIT_READER_GONE, EXIT_SECONDARY, LAUNCHER_PID, JobError, end_with
from megazpp.parallel.launch import LOOPBACK, RESTART_COUNT, LaunchConfig, RankInfo, is_on_one_machine, open_store

REPORT_SECONDS = 1.0  # that the rank which failed first is given to say so
WATCHDOG_SECONDS = 30.0  # collectives time out that much after the watchdog's limit, so that it can speak first
FAILURES = "megazpp/failures/{}"  # a count in the store, by restart: who makes it 1 reports
TRIM_THRESHOLD, MMAP_MAX, ARENA_MAX = -1, -4, -8  # of <malloc.h>
NEVER = 2**31 - 1


@dataclass(frozen=True)
class Worker:
    """A worker once the process group stands."""

    device: torch.device
    rank: int
    world_size: int
    local_rank: int
    store: dist.Store  # the process group's
    timeout: timedelta  # of its collectives
    restarts: int = 0  # how often the launcher has started the job again before this time


def run_worker(place: RankInfo, config: LaunchConfig, main: Callable[[Worker], None]) -> NoReturn:
    """Set up the device and the process group, run `main`, and leave the process with its exit code."""
    if LAUNCHER_PID in os.environ:
        end_with(int(os.environ[LAUNCHER_PID]))
    if place.world_size > 1:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C must not wait for a blocked collective
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # the launcher has had it wait
    if "OMP_NUM_THREADS" not in os.environ:
        launched = find_launcher()
        local = None if launched is None else launched.local_size
        if launched is not None and launched.launcher == "srun":
            local = 1  # srun gives each rank cores of its own
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // (local or 1)))
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", place.local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    backend = config.distributed_backend or ("nccl" if device.type == "cuda" else "gloo")
    timeout = timedelta(minutes=config.distributed_timeout_minutes, seconds=WATCHDOG_SECONDS)
    store, rank, world_size = open_store(place, timeout)
    share_gloo_device(loopback=is_on_one_machine(place), lazy=backend != "gloo")
    if device.type == "cpu":
        keep_freed_memory()
    bound = device if device.type == "cuda" else None
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout, device_id=bound)
    restarts = int(os.environ.get(RESTART_COUNT, "0"))
    worker = Worker(device, rank, world_size, place.local_rank, store, timeout, restarts)
    try:
        main(worker)
        dist.barrier()
    except BaseException as error:
        leave(_report_once(error, worker))
    dist.destroy_process_group()
    leave(0)


def leave(code: int) -> NoReturn:
    """Flush and end the process at once; `sys.exit` races with gloo's threads, and takes seconds on a busy machine."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # whoever read it may be gone
            stream.flush()
    os._exit(code)


def seed_everything(seed: int, *, data_rank: int, tp_rank: int) -> None:
    """Seed the default generators so that every rank draws differently; used for dropout only.

    Weights come from (seed, name) and data order from the seed, so neither depends on this.
    """
    mixed = (seed * 1_000_003 + data_rank * 1_009 + tp_rank) % 2**63
    random.seed(mixed)
    np.random.seed(mixed % 2**32)
    torch.manual_seed(mixed)


def threads_on(device: torch.device, num_threads: int, name: str) -> ThreadPoolExecutor:
    """Threads that work on `device`: CUDA's current device is each thread's own, and in a new one the first GPU."""
    if device.type != "cuda":
        return ThreadPoolExecutor(num_threads, name)
    return ThreadPoolExecutor(num_threads, name, initializer=torch.cuda.set_device, initargs=(device,))


def _report_once(error: BaseException, worker: Worker) -> int:
    """Print the traceback if this is the first rank to fail; returns the exit code."""
    if _broke_in_a_collective(error):
        time.sleep(REPORT_SECONDS)
    try:
        first = worker.store.add(FAILURES.format(worker.restarts), 1) == 1
    except Exception:  # the store's host is gone, so somebody else failed before
        first = worker.rank == 0
    if not first:
        return EXIT_SECONDARY
    if isinstance(error, JobError):
        error.show()
        return error.exit_code
    if isinstance(error, BrokenPipeError) and _reader_is_gone():
        return EXIT_READER_GONE  # `| head` has seen enough
    if isinstance(error, KeyboardInterrupt):
        print("\ninterrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    text = "".join(traceback.format_exception(error))
    print(f"\nrank {worker.rank} failed:\n{text}", file=sys.stderr, end="")  # below a progress bar
    return EXIT_ERROR


def _reader_is_gone() -> bool:
    """True where stdout is a pipe that nobody reads."""
    poll = select.poll()
    poll.register(1, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _broke_in_a_collective(error: BaseException) -> bool:
    """True where torch.distributed raised it, most likely because another rank is gone."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and Path(frames[-1].filename).is_relative_to(Path(dist.__file__).parent)


def share_gloo_device(*, loopback: bool = False, lazy: bool = False) -> None:
    """From here on the gloo groups of this process share a device; without gloo in torch this does nothing.

    Each device has a thread that wakes up a hundred times a second: 2.4 % of a core for 10 idle groups, 0.4 % for one
    device (torch 2.13). `new_group` takes no gloo options, so the class that it calls is replaced.

    Args:
        loopback: listen there and nowhere else, unless GLOO_SOCKET_IFNAME names interfaces.
        lazy: connect two ranks when one first sends to the other, rather than all at once (a million connections of
            1024 ranks). For groups that only pass small messages to and from one rank.
    """
    if not dist.is_gloo_available():
        return
    gloo: Any = dist.ProcessGroupGloo
    interfaces = os.environ.get("GLOO_SOCKET_IFNAME")  # as torch reads it
    places = [{"interface": name} for name in interfaces.split(",")] if interfaces else [{"hostname": LOOPBACK}]
    own = lazy or None  # None: as TORCH_GLOO_LAZY_INIT says
    with _threads_that_wait_their_turn():
        if interfaces or loopback:
            devices = [gloo.create_device(**place, lazy_init=own) for place in places]
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
    """Have this process reuse the memory that it frees, where its C library is glibc; for the start of a process.

    glibc gives large buffers back to the kernel, which clears every page of the next one: 30 % of all CPU time of 8
    gloo ranks, 8 % with this. A thread's own arena cannot use what another thread has freed.
    """
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        for parameter, value in ((ARENA_MAX, 1), (MMAP_MAX, 0), (TRIM_THRESHOLD, NEVER)):
            mallopt(parameter, value)


@contextlib.contextmanager
def _threads_that_wait_their_turn() -> Iterator[None]:
    """Threads made inside do not preempt others when they wake up: a new thread has its maker's policy.

    A message wakes gloo's thread while another one holds the connection's lock, and it asks again at once until its
    time slice is over; without preemption a step with TP 4 on 2 cores took a third less CPU time.
    """
    policy, parameters = os.sched_getscheduler(0), os.sched_getparam(0)
    if policy == os.SCHED_OTHER:  # anything else was somebody's choice
        with contextlib.suppress(OSError):  # gVisor's kernel has no other policy
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    try:
        yield
    finally:
        os.sched_setscheduler(0, policy, parameters)
