"""The start and the end of a worker process: device, process group, seeds and exit code.

Every worker starts in `worker_process`, no matter which launcher started it, and ends in `leave`:

- One traceback. The first rank that fails claims the failure in the store (store.py) and prints its traceback. The
  other ranks, whose collectives then break, exit silently. A rank whose collective breaks waits CLAIM_SECONDS before it
  tries to claim the failure, so that the rank that broke the collective comes first. If that rank was killed and cannot
  claim the failure, the launcher ends the job in this time and names the killed rank.
- Safe exit. A worker that succeeds passes a barrier and destroys the process group. Every worker then flushes its
  output and calls `os._exit`, because an ordinary interpreter exit races with gloo's threads and aborts about one run
  in six (torch 2.13).
- No orphans. If MegaZ++'s launcher ends, even by `kill -9`, the kernel kills its workers.
"""

from __future__ import annotations

import abc
import contextlib
import ctypes
import os
import re
import signal
import socket
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from megazpp.base.address import is_loopback, store_address
from megazpp.base.files import errors_as
from megazpp.base.launcher import find_launcher
from megazpp.base.program import (
    BEGAN,
    EXIT_ERROR,
    EXIT_READER_GONE,
    EXIT_USER_ERROR,
    LAUNCHER_PID,
    REMEDIES,
    JobError,
    UserError,
    end_with,
    in_words,
    leave,
    say,
    user_errors,
)
from megazpp.parallel.agreement import call_roll
from megazpp.parallel.config import LaunchConfig
from megazpp.parallel.launch import LOOPBACK
from megazpp.parallel.store import CLAIM_SECONDS, RESTART_COUNT, FirstFailure, RankInfo, is_on_one_machine, open_store
from megazpp.parallel.watchdog import Watchdog

WAIT_SECONDS = 15.0  # time for the other ranks to start, before a rank prints that it waits for them
# Time limit of torch's collectives, practically infinite, because the watchdog ends a job that hangs. A shorter limit
# would also end a job that was suspended for longer than the limit and then continues.
COLLECTIVE_TIMEOUT = timedelta(days=30)
# Parts of the messages of gloo and of torch's store about a connection whose other end has gone
BROKEN = re.compile(r"closed by peer|reset by peer|recvBytes|[Bb]roken pipe|timed out \[|No route to host|unreachable")
PLACE_IN_GLOO = re.compile(r"^\[\S+:\d+\] ")  # file and line of gloo's source, with which its messages begin
TRIM_THRESHOLD, MMAP_MAX, ARENA_MAX = -1, -4, -8  # M_TRIM_THRESHOLD, M_MMAP_MAX and M_ARENA_MAX of <malloc.h>
NEVER = 2**31 - 1  # largest trim threshold of malloc in bytes, so that freed memory never goes back to the kernel


@dataclass(frozen=True, kw_only=True)
class Worker(RankInfo):
    """A worker process after its process group has been initialized."""

    device: torch.device
    store: dist.Store  # store of the default process group
    watchdog: Watchdog
    restarts: int = 0  # number of times that the launcher has restarted the job
    # Value of `time.monotonic()` when the launching process began, or when this worker began if torchrun or srun has
    # started it
    began: float = field(default_factory=time.monotonic)


@contextlib.contextmanager
def worker_process(
    place: RankInfo, config: LaunchConfig, facts: Mapping[str, str] = MappingProxyType({})
) -> Iterator[Worker]:
    """Return a context in which this process is a worker: set up its device and process group, and end them afterwards.

    An exception inside the context ends the process with the exception's exit code. A fact that differs between ranks
    ends the processes of all ranks. After the context, the program calls `leave`.

    Args:
        place: this process's rank, its index on its node, and the number of ranks.
        config: flags with the communication back end and the time limits.
        facts: values that must be equal on all ranks, such as flags and versions, as text by name.
    """
    # Let the kernel end this process when its launcher ends, and make Ctrl-C end it even in a blocked collective.
    if LAUNCHER_PID in os.environ:
        end_with(int(os.environ[LAUNCHER_PID]))
    if place.world_size > 1:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python's handler would only run after a blocked collective ends
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # the launcher has blocked SIGINT during the start

    # Divide this host's cores among its ranks, so that torch's threads of two ranks do not compete for a core. Then
    # select this rank's device.
    if "OMP_NUM_THREADS" not in os.environ:
        launched = find_launcher()
        local = None if launched is None else launched.local_size
        if launched is not None and launched.launcher == "srun":
            local = 1  # srun binds each rank to separate cores, so the affinity mask has only this rank's cores
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // (local or 1)))
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", place.local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)

    # Open the store, start the watchdog, and compare the facts of all ranks.
    backend = config.distributed_backend or ("nccl" if device.type == "cuda" else "gloo")
    began, restarts = float(os.environ.get(BEGAN, time.monotonic())), int(os.environ.get(RESTART_COUNT, "0"))
    with _say_whom_it_waits_for(place):
        try:
            store = open_store(place, timedelta(minutes=config.distributed_timeout_minutes))
        except ValueError as error:  # other hosts cannot be told, because that needs the store
            if place.local_rank == 0:
                UserError(str(error)).show()
            else:
                # A launcher kills all ranks of a host when one exits: give local rank 0 time to print the error.
                time.sleep(CLAIM_SECONDS)
            leave(EXIT_USER_ERROR)
        failure = FirstFailure(store, place)
        watchdog = Watchdog(store, place, config).start()
        try:
            call_roll(store, place, facts, failure)
        except JobError as error:
            _end(error, place, failure)

    # Create the default process group, and run the block of the `with` statement. After the block comes a barrier, so
    # that no rank ends while other ranks use its connections. The barrier's span lets the watchdog notice a rank that
    # never arrives, for example because the rank waits for a server of wandb.
    try:
        own = store.clone()  # type: ignore[attr-defined]  # torch's stub lacks the method
        with FirstFailure(own, place).ends_this_rank():
            alone = is_on_one_machine(place)
            address = LOOPBACK if alone else address_if_name_fails(os.environ["MASTER_ADDR"])
            share_gloo_device(address, lazy=backend != "gloo")
            if device.type == "cpu":
                keep_freed_memory()
            bound = device if device.type == "cuda" else None
            rank, world_size = place.rank, place.world_size
            dist.init_process_group(
                backend, store=store, rank=rank, world_size=world_size, timeout=COLLECTIVE_TIMEOUT, device_id=bound
            )
        worker = Worker(**vars(place), device=device, store=store, watchdog=watchdog, restarts=restarts, began=began)
        yield worker
        with watchdog.span("barrier at the end"):
            dist.barrier()
    except BaseException as error:
        _end(error, place, failure)
    dist.destroy_process_group()


@contextlib.contextmanager
def _say_whom_it_waits_for(place: RankInfo) -> Iterator[None]:
    """Return a context for the rendezvous that prints a hint if the rendezvous takes longer than WAIT_SECONDS.

    The first rank of each host prints which ranks it waits for, and at which address. Workers of MegaZ++'s launcher
    print nothing, because the launcher itself waits for other hosts.
    """
    others = f"the other {place.world_size - 1} rank(s) to connect to" if place.rank == 0 else "rank 0 at"
    hint = (
        f"rank {place.rank} on {socket.gethostname()} has waited {WAIT_SECONDS:g} s for {others} {store_address()} "
        "and goes on waiting. If nothing follows, that address or port is wrong, a firewall drops the packets, or "
        "the other ranks have not started"
    )
    timer = threading.Timer(WAIT_SECONDS, say, [hint])
    timer.daemon = True
    if place.world_size > 1 and place.local_rank == 0 and LAUNCHER_PID not in os.environ:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def seed_everything(seed: int, *, data_rank: int, tp_rank: int) -> None:
    """Seed torch's default random generators, which only dropout uses, differently on each rank.

    Initial weights and the order of the data do not depend on these generators: weights depend on the seed and on the
    parameter's name, the order only on the seed.

    Args:
        seed: seed of the run (--seed).
        data_rank: index of the activations that this rank computes, see `ParallelDims.dropout_rank`.
        tp_rank: index of the rank along the tp axis.
    """
    # With fewer than 1009 tensor-parallel ranks, no two ranks of a run get the same number.
    torch.manual_seed((seed * 1_000_003 + data_rank * 1_009 + tp_rank) % 2**63)


def _end(error: BaseException, place: RankInfo, failure: FirstFailure) -> NoReturn:
    """End this worker because of an exception, which is printed if this rank is the first to fail."""
    code = _report_once(error, place, failure)
    failure.let_others_read()
    leave(code)


def _report_once(error: BaseException, place: RankInfo, failure: FirstFailure) -> int:
    """Print the error that ended this worker if it is the first rank to fail, and return the worker's exit code.

    If another rank has failed first, the first rank of each other host prints that rank's error.

    Args:
        error: exception that ended the worker.
        place: this process's rank.
        failure: record of the job's first failure.
    """
    frames = traceback.extract_tb(error.__traceback__)
    if frames and Path(frames[-1].filename).is_relative_to(Path(dist.__file__).parent):
        time.sleep(CLAIM_SECONDS)  # torch.distributed raised the error, most likely because another rank has failed
    try:
        first = failure.claim()
    # The store does not answer, because the process that hosts it has ended. On one machine, let rank 0 print its
    # error. On several machines, `show_elsewhere` prints that the connection to the store was lost.
    except Exception:
        first = place.rank == 0 and is_on_one_machine(place)
    if not first:
        return failure.show_elsewhere()
    text = str(error).strip() or type(error).__name__
    brief = text if isinstance(error, JobError) else text.splitlines()[0]
    with contextlib.suppress(Exception):  # ignore a store that does not answer, because the process with it has ended
        code = error.exit_code if isinstance(error, JobError) else EXIT_ERROR
        failure.write(f"rank {place.rank} on {failure.host}: {brief}", code)
    if isinstance(error, JobError):
        error.show()
        return error.exit_code
    if isinstance(error, BrokenPipeError) and error.filename == "<stdout>":
        return EXIT_READER_GONE  # the reader of stdout has ended, as in `| head`
    if isinstance(error, KeyboardInterrupt):
        say("\ninterrupted")
        return 128 + signal.SIGINT
    if BROKEN.search(str(error)) and isinstance(error, RuntimeError):
        say(
            f"\nrank {place.rank} on {failure.host}: the connection to another rank is broken, and no rank has "
            f"reported an error, so a process or a host was killed, or the link is down: {PLACE_IN_GLOO.sub('', brief)}"
        )
        return EXIT_ERROR
    if isinstance(error, OSError) and error.errno in REMEDIES:
        say(f"\nrank {place.rank} on {failure.host}: {in_words(error)}")
        return EXIT_ERROR
    trace = "".join(traceback.format_exception(error)).rstrip()
    say(f"\nrank {place.rank} failed:\n{trace}")  # starts a new line after a progress bar
    return EXIT_ERROR


def address_if_name_fails(master: str) -> str | None:
    """Return the IP address from which this host connects to `master`, if other hosts cannot use this host's name.

    Return None if they can use the name, or if that address is a loopback address.

    gloo listens at the address of the host's name. Debian and Ubuntu give the name the address 127.0.1.1, and if the
    name has no address, gloo listens at 127.0.0.1. Other hosts can connect to neither.

    Args:
        master: host name or IP address of rank 0's host (MASTER_ADDR).
    """
    own = _local_address(master)
    return own if is_loopback(_local_address(socket.gethostname())) and not is_loopback(own) else None


def _local_address(host: str) -> str:
    """Return the IP address from which this host would connect to `host`; LOOPBACK if `host` has no address."""
    try:
        family, *_, where = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(where)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        return LOOPBACK


def share_gloo_device(address: str | None = None, *, lazy: bool = False) -> None:
    """Make all gloo groups that this process creates from now on share one gloo device (a listener and its thread).

    By default each group creates a device, whose thread wakes up a hundred times per second. Measured with torch 2.13,
    10 idle groups take 2.4 % of a core, one shared device takes 0.4 %. torch's `new_group` has no argument for gloo's
    options, so this function replaces the class that `new_group` instantiates. If torch is built without gloo, nothing
    happens.

    Args:
        address: IP address at which gloo listens, unless GLOO_SOCKET_IFNAME names interfaces; None for the address of
            the host's name.
        lazy: True connects two ranks when one of them first sends to the other, for groups in which ranks exchange
            small messages with a single rank. False leaves the choice to TORCH_GLOO_LAZY_INIT. By default, gloo then
            connects all pairs of ranks at once, half a million connections for 1024 ranks.
    """
    if not dist.is_gloo_available():
        return
    gloo: Any = dist.ProcessGroupGloo
    interfaces = os.environ.get("GLOO_SOCKET_IFNAME")  # names of network interfaces, which torch's gloo uses
    places = [{"interface": name} for name in interfaces.split(",")] if interfaces else [{"hostname": address}]
    own = lazy or None  # None leaves the choice to TORCH_GLOO_LAZY_INIT
    with _threads_that_wait_their_turn():
        if interfaces or address:
            what = f"GLOO_SOCKET_IFNAME={interfaces}" if interfaces else f"gloo cannot listen at {address}"
            remedy = "set GLOO_SOCKET_IFNAME to an interface of this host (see ip addr)"
            with user_errors(), errors_as(what, RuntimeError, remedy=remedy):
                devices = [gloo.create_device(**place, lazy_init=own) for place in places]
        else:
            devices = [gloo.create_default_device(lazy_init=own)]

    class OneDeviceGroup(abc.ABC):  # noqa: B024 (an ABC, so that `register` makes gloo groups instances of this class)
        """A substitute for torch's ProcessGroupGloo, whose gloo groups all use the device of `share_gloo_device`."""

        def __new__(cls, store: dist.Store, rank: int, size: int, timeout: timedelta, **others: Any) -> Any:
            options = gloo._Options()
            options._devices, options._timeout = devices, timeout
            # `others` are arguments of later torch versions that gloo's options hold, such as 2.14's enable_reconfigure
            for name, value in others.items():
                setattr(options, name, value)
            return gloo(store, rank, size, options)

    OneDeviceGroup.register(gloo)
    distributed_c10d.ProcessGroupGloo = OneDeviceGroup  # type: ignore[misc]


def keep_freed_memory() -> None:
    """Make glibc's malloc keep freed memory for reuse. Call this at the start of the process.

    By default glibc returns large buffers to the kernel, which then clears the pages of the next buffer. With 8 gloo
    ranks the kernel's work for memory took 30 % of all CPU time, with these settings 8 %. All threads use one arena,
    because a thread cannot reuse memory that another thread has freed in a different arena. With another C library than
    glibc, nothing happens.
    """
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        for parameter, value in ((ARENA_MAX, 1), (MMAP_MAX, 0), (TRIM_THRESHOLD, NEVER)):
            mallopt(parameter, value)


@contextlib.contextmanager
def _threads_that_wait_their_turn() -> Iterator[None]:
    """Return a context in which new threads get the scheduling policy SCHED_BATCH, so they preempt no other thread.

    gloo's thread is created in this context, and inherits the policy from its creator. Under the normal policy, an
    incoming message wakes gloo's thread while another thread holds the connection's lock. gloo's thread then retries
    in a loop until its time slice ends. With SCHED_BATCH, a step with TP 4 on 2 cores took a third less CPU time.
    """
    policy, parameters = os.sched_getscheduler(0), os.sched_getparam(0)
    if policy == os.SCHED_OTHER:  # keep any other scheduling policy, because the user has chosen it
        with contextlib.suppress(OSError):  # some systems, such as gVisor, support only the policy SCHED_OTHER
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    try:
        yield
    finally:
        os.sched_setscheduler(0, policy, parameters)
