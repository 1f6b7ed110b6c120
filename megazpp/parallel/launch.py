"""The start of a job: detect the launcher, and start local workers if no launcher has done so.

This program has its own launcher instead of torch's elastic agent (torchrun) for two reasons. First, after a failure
the elastic agent ends the other workers with SIGTERM, and waits up to 30 seconds for them. MegaZ++'s workers would use
this time, because they finish their step and save on SIGTERM. Second, the store of MegaZ++'s launcher outlives every
worker, so the remaining ranks can still record in the store which rank failed first.

Each worker continues its start in worker.py.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Self

import torch

from megazpp.base.address import Address, listen, parse_host
from megazpp.base.files import errors_as
from megazpp.base.flags import spelling
from megazpp.base.launcher import LOOPBACK, find_address, find_launcher
from megazpp.base.program import (
    BEGAN,
    EXIT_ERROR,
    EXIT_HANG,
    EXIT_LATE,
    EXIT_READER_GONE,
    EXIT_SECONDARY,
    EXIT_USER_ERROR,
    LAUNCHER_PID,
    JobError,
    UserError,
    handling,
    say,
)
from megazpp.parallel.config import LaunchConfig
from megazpp.parallel.forks import Fork, can_fork
from megazpp.parallel.hosts import Hosts
from megazpp.parallel.store import (
    AGENT_STORE,
    CONNECT_SECONDS,
    POLL_SECONDS,
    RESTART_COUNT,
    RankInfo,
    loopback_store,
    wait_until,
)

# A rank whose collective breaks exits with EXIT_SECONDARY. The launcher then waits this long for the rank that failed
# first to exit, before the launcher ends the job.
GRACE_SECONDS = 3.0
# Largest number of workers of a job without --nproc on a machine without a GPU. Up to this limit the job has a worker
# per core, but at least 2 workers, so that collectives have something to send.
MOST_CPU_WORKERS = 4
# Signals on which workers finish the step, save and exit with 0. SIGHUP arrives when a terminal is closed, for example
# because an ssh connection ends. Batch systems send one of the last three before they end a job: Slurm the signal that
# its option --signal names, LSF and Grid Engine SIGUSR2, or SIGXCPU at a limit of CPU time.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)


def detect_rank_info(config: LaunchConfig, env: Mapping[str, str] = os.environ) -> RankInfo:
    """Find out from environment variables which rank this process is, or how many workers it has to launch.

    Args:
        config: flags with the number of workers, restarts and hosts, and the back end.
        env: environment of this process, in which a launcher such as torchrun or srun has set its variables.
    Raises:
        ValueError: --nproc, --nnodes or --max-restarts is given although a launcher such as torchrun started the
            workers; the launcher has not set the store's address; or --distributed-backend nccl is given without a GPU.
    """
    if config.distributed_backend == "nccl" and not torch.cuda.is_available():
        raise ValueError("--distributed-backend nccl needs a GPU, but torch finds none on this machine; use gloo")
    launched = find_launcher(env)
    if launched is None:
        cores = len(os.sched_getaffinity(0))
        nproc = config.nproc or torch.cuda.device_count() or min(max(cores, 2), MOST_CPU_WORKERS)
        if config.num_nodes > 1:
            return RankInfo(started=False, world_size=config.num_nodes * nproc, launched_size=nproc)
        # A single worker needs no separate process, unless a process must remain that can restart the worker.
        return RankInfo(started=nproc == 1 and not config.max_restarts, world_size=nproc)
    if LAUNCHER_PID not in env:
        own = {"--nproc": config.nproc, "--nnodes": config.nnodes, "--max-restarts": config.max_restarts or None}
        for name, value in own.items():
            if value is not None:
                raise ValueError(
                    f"{name} {value} conflicts with {launched.launcher}, which starts and restarts the workers of this "
                    "job: remove the flag"
                )
        find_address(launched, env)
    return RankInfo(started=True, world_size=launched.world_size, rank=launched.rank, local_rank=launched.local_rank)


def device_type() -> str:
    """Return the device type of this machine's workers, "cuda" or "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def hosts_of(config: LaunchConfig, nproc: int = 1) -> Hosts | None:
    """Return the `Hosts` of a job with --nnodes 2 or more and `nproc` ranks on each host; None for a single host.

    Raises:
        ValueError: --nnodes is given, but --node-rank or --master-addr is missing.
    """
    if config.num_nodes == 1:
        return None
    if config.node_rank is None or config.master_addr is None:
        missing = [name for name in ("node_rank", "master_addr") if getattr(config, name) is None]
        raise ValueError(
            f"--nnodes {config.nnodes} needs {' and '.join(spelling(config, name) for name in missing)}: on host 0 for "
            f"example --node-rank 0 --master-addr 10.0.0.1, and on each other host the same address and its own number"
        )
    return Hosts(
        num_nodes=config.num_nodes,
        node_rank=config.node_rank,
        address=parse_host(config.master_addr, "--master-addr"),
        port=config.master_port,
        ranks_per_node=nproc,
        patience_seconds=60 * config.distributed_timeout_minutes,
    )


def launch_workers(main: Callable[[], int], nproc: int, *, max_restarts: int = 0, end_seconds: float = math.inf) -> int:
    """Run a program in `nproc` local worker processes. When one fails, end the others and restart all of them.

    A user error is final and causes no restart. `STOP_SIGNALS` are forwarded to the workers, which finish their step
    and save. After a forwarded signal no worker is restarted. A second Ctrl-C is not forwarded but kills all workers.

    Args:
        main: main function of this process's program, which returns its exit status.
        nproc: number of workers.
        max_restarts: number of times that all workers are restarted after a failure.
        end_seconds: longest time for which workers may run after the first worker has ended without an error.
    Returns:
        The exit code for this process: 0 on success, 2 for a user error, 128 + n after signal n or a closed pipe, and
        1 for any other failure.
    """
    _divide_cores(nproc)
    workers = ForkedWorkers(main, nproc) if can_fork() else Workers([sys.executable, *sys.argv], nproc)
    workers.end_seconds = end_seconds
    variables = {"MASTER_ADDR": LOOPBACK, AGENT_STORE: "True"}
    try:
        with _passing_signals_to(workers.processes) as passed:
            for attempt in range(max_restarts + 1):
                failures = _run_once(workers, {**variables, RESTART_COUNT: str(attempt)})
                if not failures:
                    return 0
                if passed:
                    return _ended_by(passed[0])
                # A restart does not help after a user error or a closed output pipe. The worker has printed the error.
                for final in (EXIT_USER_ERROR, EXIT_READER_GONE):
                    if final in failures.values():
                        return final
                what_next = f"restart {attempt + 1} of {max_restarts}" if attempt < max_restarts else "the job is over"
                say(f"{describe_failure(failures)}; {what_next}")
    except KeyboardInterrupt:
        return _ended_by(signal.SIGINT)
    return EXIT_ERROR


def _run_once(workers: Workers, variables: Mapping[str, str]) -> dict[int, int]:
    """Start all workers with a new store, wait until the job is over, and end workers that still run.

    Args:
        workers: the local workers of the job.
        variables: environment variables for the workers; MASTER_PORT is added.
    Returns:
        The nonzero exit codes by rank, {} if all workers succeeded.
    Raises:
        ValueError: this machine has no usable loopback interface.
    """
    with listen(Address(LOOPBACK, 0)) as listener:
        remedy = "switch the loopback interface on, for example with: ip link set lo up"
        with errors_as(f"this machine cannot connect to itself at {LOOPBACK}", OSError, remedy=remedy):
            socket.create_connection(listener.getsockname(), CONNECT_SECONDS).close()
        try:
            workers.start({**variables, "MASTER_PORT": str(listener.getsockname()[1])})
            _store = loopback_store(listener)  # the store starts a thread, and workers must be forked before that
            while (failures := workers.failures()) is None:
                time.sleep(POLL_SECONDS)
        finally:
            workers.stop()
    return failures


def launch_workers_of_host(command: Sequence[str], hosts: Hosts, *, end_seconds: float = math.inf) -> int:
    """Run this host's workers of a job with --nnodes. When one host fails, all hosts end, and each prints the reason.

    Signals are forwarded as in `launch_workers`. The workers of all hosts then finish their step and save.

    Args:
        command: program and arguments of each worker.
        hosts: the hosts of the job, and the connection to their launchers.
        end_seconds: longest time for which workers may run after the first worker has ended without an error.
    Returns:
        An exit code as in `launch_workers`; 1 if another host has ended the job.
    """
    _divide_cores(hosts.ranks_per_node)
    workers = Workers(command, hosts.ranks_per_node, nodes=hosts.num_nodes, node=hosts.node_rank)
    workers.end_seconds = end_seconds
    code, reason = EXIT_ERROR, "its launcher has failed"
    with _passing_signals_to(workers.processes, then=hosts.note) as passed:
        try:
            code, reason = _run_on_host(workers, hosts, passed)
        finally:
            workers.stop()
            hosts.end(reason)
    return code


def _run_on_host(workers: Workers, hosts: Hosts, passed: Sequence[signal.Signals]) -> tuple[int, str]:
    """Start this host's workers, watch them, and print how the job has ended.

    Args:
        workers: the workers of this host.
        hosts: the hosts of the job.
        passed: signals that the launcher has forwarded to the workers, a list to which the signal handler of
            `_passing_signals_to` appends.
    Returns:
        The exit code; and the reason for which this host has failed, or "".
    """
    failures: Mapping[int, int] | None = None
    try:
        workers.start({**hosts.gather(), AGENT_STORE: "True", RESTART_COUNT: "0"})
        while (failures := workers.failures()) is None and hosts.over is None:
            time.sleep(POLL_SECONDS)
        # If all failed ranks of this host failed only because a collective broke, a rank of another host has failed
        # first. Wait until the launcher of that host has written the reason to the store.
        if failures and set(failures.values()) == {EXIT_SECONDARY}:
            wait_until(lambda: hosts.over is not None, GRACE_SECONDS)
            failures = None if hosts.over else failures
    except ValueError as error:
        UserError(str(error)).show()
        return EXIT_USER_ERROR, str(error)
    # Another host has failed before the start, or the user has pressed Ctrl-C. The code below prints which of the two.
    except (JobError, KeyboardInterrupt):
        workers.stop()
    if passed:
        return _ended_by(passed[0]), "" if failures == {} else f"ended by {passed[0].name}"
    reason = describe_failure(failures) if failures else ""
    if failures and EXIT_USER_ERROR in failures.values():  # the worker has printed its error, so print nothing here
        return EXIT_USER_ERROR, reason
    if reason or hosts.over:
        say(f"{f'{hosts.name}: {reason}' if reason else hosts.over}; the job is over")
        return EXIT_ERROR, reason
    if hosts.node_rank != 0:  # only host 0 prints the log, so the others say that the job has ended
        say(f"{hosts.name}: the job has ended without errors")
    return 0, ""


def _divide_cores(nproc: int) -> None:
    """Set the number of OpenMP and torch threads per worker to this machine's cores / `nproc`.

    If the user has set OMP_NUM_THREADS, nothing is changed.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        threads = max(1, len(os.sched_getaffinity(0)) // nproc)
        os.environ["OMP_NUM_THREADS"] = str(threads)
        torch.set_num_threads(threads)  # for workers that are forks: they inherit torch's setting from this process


class Workers:
    """The worker processes that this launcher starts on its machine, one per rank.

    Args:
        command: program and arguments of each worker.
        ranks_per_node: number of workers per node.
        nodes: number of nodes of the job.
        node: index of the node whose workers are started. None starts the workers of all nodes on this machine, which
            then emulates the nodes.
    Attributes:
        end_seconds: longest time for which workers may run after the first worker has ended without an error; infinite
            by default.
        processes: the started processes in the order of their ranks.
        command: program and arguments of each worker.
    """

    def __init__(self, command: Sequence[str], ranks_per_node: int, *, nodes: int = 1, node: int | None = None) -> None:
        self.processes: list[Process] = []
        self.end_seconds = math.inf
        self._began = time.monotonic()
        self.command, self._ranks_per_node, self._nodes = command, ranks_per_node, nodes
        first, count = (0, nodes) if node is None else (node * ranks_per_node, 1)
        self._ranks = range(first, first + count * ranks_per_node)
        # Times at which the job is over although workers still run. `_deadline` is set when a worker fails, `_end` when
        # a worker ends without an error
        self._deadline: float | None = None
        self._end: float | None = None

    def start(self, env: Mapping[str, str]) -> Self:
        """Start one process per rank, and return self. If a start fails, kill the processes that have started.

        Args:
            env: variables that are added to each rank's environment; they include MASTER_ADDR and MASTER_PORT.
        """
        self.processes.clear()
        self._deadline = self._end = None
        world_size = self._nodes * self._ranks_per_node
        try:
            for rank in self._ranks:
                node, local_rank = divmod(rank, self._ranks_per_node)
                place: dict[str, float] = {"RANK": rank, "LOCAL_RANK": local_rank, "GROUP_RANK": node}
                place |= {"WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": self._ranks_per_node}
                place[LAUNCHER_PID] = os.getpid()  # the worker asks the kernel to kill it when this process ends
                # Restarted workers get the same start time, so --exit-duration-in-mins counts from the first start.
                place[BEGAN] = self._began
                own = {name: str(value) for name, value in place.items()}
                self.processes.append(self.start_rank(rank, node, {**os.environ, **env, **own}))
        except BaseException:
            self.stop()
            raise
        return self

    def start_rank(self, rank: int, node: int, env: Mapping[str, str]) -> Process:
        """Start the worker process of one rank in a separate session, and return the process.

        Because of the separate session, Ctrl-C in the terminal reaches only the launcher. SIGINT stays blocked in the
        new process until `worker_process` unblocks it. Otherwise a SIGINT during the start of the interpreter would
        print a traceback.

        Args:
            rank: rank of the process, for subclasses.
            node: index of the rank's node, for subclasses.
            env: complete environment of the process.
        """
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            return subprocess.Popen(self.command, env=env, start_new_session=True)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def failures(self) -> dict[int, int] | None:
        """Check without blocking which worker processes have ended.

        The job is over if all workers have ended, or if one has failed with another code than EXIT_SECONDARY. A worker
        ends with EXIT_SECONDARY if a collective broke because another rank has ended. If all failures so far are of
        this kind, the job is over GRACE_SECONDS after the first of them. A worker that ends without an error has passed
        a barrier of all ranks, so the other workers have nothing left to do. The job is therefore also over if they
        still run `end_seconds` later: their processes were stopped, or are stuck in their exit.

        Returns:
            None while the job runs. Once the job is over, the nonzero exit codes by rank, {} if all ranks succeeded.
            EXIT_LATE is the code of a worker that still runs `end_seconds` after another worker has succeeded.
        """
        started = zip(self._ranks, self.processes, strict=True)
        codes = {rank: code for rank, process in started if (code := process.poll()) is not None}
        failures = {rank: code for rank, code in codes.items() if code != 0}
        if failures and self._deadline is None:
            self._deadline = time.monotonic() + GRACE_SECONDS
        if self._end is None and 0 in codes.values():
            self._end = time.monotonic() + self.end_seconds
        if not failures and self._end is not None and time.monotonic() > self._end:
            failures = {rank: EXIT_LATE for rank in self._ranks if rank not in codes}
        late = self._deadline is not None and time.monotonic() > self._deadline
        over = len(codes) == len(self.processes) or late or any(code != EXIT_SECONDARY for code in failures.values())
        return failures if over else None

    def stop(self) -> None:
        """Kill every worker process with its child processes, and wait until the workers have ended."""
        for process in self.processes:
            # Each worker leads a process group with its children. A fork that has just begun has no process group yet:
            # `killpg` does not find it, so kill the process itself too.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.send_signal(signal.SIGKILL)
        for process in self.processes:
            process.wait()


class ForkedWorkers(Workers):
    """The worker processes of one node as forks of the launching process, which saves the imports; see `Fork`.

    Args:
        main: main function of the program, which each worker calls. It returns the worker's exit status.
        ranks_per_node: number of workers.
    """

    def __init__(self, main: Callable[[], int], ranks_per_node: int) -> None:
        super().__init__((), ranks_per_node)
        self._main = main

    def start_rank(self, rank: int, node: int, env: Mapping[str, str]) -> Process:
        return Fork(self._main, env, handled=(*STOP_SIGNALS, signal.SIGTSTP))


Process = Fork | subprocess.Popen[bytes]


@contextlib.contextmanager
def _passing_signals_to(
    workers: Sequence[Process], then: Callable[[str], None] = lambda name: None
) -> Iterator[list[signal.Signals]]:
    """Forward `STOP_SIGNALS`, on which workers finish their step and save, to `workers` inside the context.

    A second SIGINT, and any of the signals before workers have been started, raise KeyboardInterrupt instead. SIGTSTP
    (Ctrl-Z) suspends this process and the workers. The workers continue when this process continues.

    Args:
        workers: the worker processes; the list may be filled inside the context.
        then: function that is called with the name of each signal after it has been forwarded.
    Yields:
        The list of received signals, which grows inside the context.
    """
    passed: list[signal.Signals] = []

    def pass_on(signum: int, frame: FrameType | None) -> None:
        """Forward a signal to all workers; for a second SIGINT, or without workers, raise KeyboardInterrupt instead."""
        if signum == signal.SIGINT and signal.SIGINT in passed:
            raise KeyboardInterrupt
        passed.append(signal.Signals(signum))
        if not workers:
            raise KeyboardInterrupt
        for worker in workers:
            worker.send_signal(signum)
        then(passed[-1].name)

    def suspend(signum: int, frame: FrameType | None) -> None:
        """Suspend all workers, which are in other sessions than the terminal's, and this process, until SIGCONT."""
        for worker in workers:
            worker.send_signal(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        for worker in workers:
            worker.send_signal(signal.SIGCONT)

    with handling(STOP_SIGNALS, pass_on), handling([signal.SIGTSTP], suspend):
        yield passed


def _ended_by(signum: signal.Signals) -> int:
    """Print that the signal ended the job, and return the launcher's exit code, 128 + the signal's number."""
    say(f"\nended by {signum.name}")  # starts a new line after a progress bar or the terminal's ^C
    return 128 + signum


def describe_failure(failures: Mapping[int, int]) -> str:
    """Return a text that names the worker which most likely failed first, and says how that worker ended.

    Args:
        failures: nonzero exit codes by rank, -n if signal n has killed the rank's process.
    """
    rank = first_failure(failures)
    code = failures[rank]
    if code == EXIT_HANG:
        return "the job hung, see the watchdog's report"
    if code == EXIT_LATE:
        late = ", ".join(str(rank) for rank, code in failures.items() if code == EXIT_LATE)
        return f"all work is done, but rank {late} did not end: its process was stopped, or is stuck in its exit"
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return f"rank {rank} {how}"


def first_failure(failures: Mapping[int, int]) -> int:
    """Return the rank that most likely failed first.

    Ranks that a signal has killed take precedence, then ranks with any other error. Ranks whose collective broke
    because another rank had ended come last.

    Args:
        failures: nonzero exit codes by rank, -n if signal n has killed the rank's process.
    """
    return min(failures, key=lambda rank: (failures[rank] == EXIT_SECONDARY, failures[rank] >= 0))
