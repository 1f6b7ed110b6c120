"""The start of a job: who starts the workers, the store in which they find each other, the launcher of local workers.

| started by                      | store                          | reachable from                                    |
|---------------------------------|--------------------------------|---------------------------------------------------|
| nobody: one process             | in the process                 | nowhere                                           |
| this program                    | in the launcher                | this machine                                      |
| torchrun                        | torchrun's                     | the network: torch listens on every interface     |
| srun, mpirun, ..., by hand      | in rank 0, at MASTER_ADDR      | the network; this machine if that is its loopback |

Which variables launchers set: base/launcher.py. mpirun and its like say nothing of addresses: where they have started
ranks on several nodes, MASTER_ADDR and MASTER_PORT have to be given.

torch's store asks nobody who they are: whoever reaches it can stop the job, or take part in it. On the network it
belongs behind a firewall (SECURITY.md). A worker's own side of the start is worker.py.

The launcher is ours rather than torch's elastic agent (which torchrun is), because that ends workers by SIGTERM, which
means "finish your step and save" to ours, and takes up to 30 seconds about it. The launcher's store outlives every
worker, so the ranks that are left can say in it who failed first.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import Literal, Self

import torch
import torch.distributed as dist

from megazpp.base.flags import check_not_negative, check_positive, check_words, flag, spelling
from megazpp.base.launcher import LOOPBACK, find_address, find_launcher
from megazpp.base.program import EXIT_ERROR, EXIT_HANG, EXIT_READER_GONE, EXIT_SECONDARY, EXIT_USER_ERROR, LAUNCHER_PID

POLL_SECONDS = 0.05
GRACE_SECONDS = 3.0  # for the rank that failed first, when all that is seen is that another rank's collective broke
MOST_CPU_WORKERS = 4  # by default; two at least, so that what would cross a network is seen
LARGEST_SEED = 2**32 - 1  # that numpy takes
YEAR_SECONDS = 366 * 24 * 3600.0  # clocks can add waits up to that to the present time
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)  # finish the step, save, exit with 0
RESTART_COUNT = "TORCHELASTIC_RESTART_COUNT"  # set by torchrun and by us
LOOPBACK_NAMES = (LOOPBACK, "localhost")
AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"  # "True": whoever started the workers has the store


@dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    """Launch.

    Worker processes, the communication back end and the seed.
    """

    nproc: int | None = flag(None, "local workers to start (default: one per GPU; on a CPU 2 to 4)", common=True)
    max_restarts: int = flag(
        0, "times that the local workers are started again after one has failed (under torchrun, give it to torchrun)"
    )
    distributed_backend: Literal["nccl", "gloo"] | None = flag(
        None, "collectives library (default: nccl with GPUs, gloo without)"
    )
    distributed_timeout_minutes: float = flag(10, "minutes without any progress after which the job is taken to hang")
    distributed_timeout_seconds_after_init: float | None = flag(
        None,
        "the same in seconds from the second step on, when everything is compiled and connected (default: half of it, "
        "more than a slow read or a busy neighbour keeps a rank away)",
    )
    local_rank: int | None = flag(None, "for old launchers; the environment decides", aliases=("--local_rank",))
    seed: int = flag(1234, "seed of the weights, the data order and dropout")

    def __post_init__(self) -> None:
        check_words(self)
        check_positive(self, "nproc", "distributed_timeout_minutes", "distributed_timeout_seconds_after_init")
        check_not_negative(self, "max_restarts")
        if not 0 <= self.seed <= LARGEST_SEED:
            raise ValueError(f"--seed {self.seed} is not a number from 0 to {LARGEST_SEED}")
        names = ("distributed_timeout_minutes", "distributed_timeout_seconds_after_init")
        for name, seconds in zip(names, self.hang_seconds, strict=True):
            if seconds > YEAR_SECONDS:
                raise ValueError(f"{spelling(self, name)} {getattr(self, name)} is more than a year")

    @property
    def hang_seconds(self) -> tuple[float, float]:
        """Seconds for which nothing may move: until the first step is done, and later."""
        first, later = 60 * self.distributed_timeout_minutes, self.distributed_timeout_seconds_after_init
        return first, first / 2 if later is None else later


@dataclass(frozen=True, kw_only=True)
class RankInfo:
    """A process's place in the job; `started`: it is a worker already and need not start them."""

    started: bool
    world_size: int
    rank: int = 0
    local_rank: int = 0


def detect_rank_info(config: LaunchConfig, env: Mapping[str, str] = os.environ) -> RankInfo:
    """Read the launcher's environment (`find_launcher`).

    Raises:
        ValueError: --nproc or --max-restarts is given although a launcher has started the workers, an address is
            missing, or --distributed-backend nccl without a GPU.
    """
    if config.distributed_backend == "nccl" and not torch.cuda.is_available():
        raise ValueError("--distributed-backend nccl needs a GPU, and torch finds none here")
    launched = find_launcher(env)
    if launched is None:
        cores = len(os.sched_getaffinity(0))
        nproc = config.nproc or torch.cuda.device_count() or min(max(cores, 2), MOST_CPU_WORKERS)
        return RankInfo(started=nproc == 1 and not config.max_restarts, world_size=nproc)
    if LAUNCHER_PID not in env:
        for name, value in (("--nproc", config.nproc), ("--max-restarts", config.max_restarts or None)):
            if value is not None:
                raise ValueError(
                    f"{name} {value} conflicts with {launched.launcher}, which starts and restarts the workers"
                )
        find_address(launched, env)
    return RankInfo(started=True, world_size=launched.world_size, rank=launched.rank, local_rank=launched.local_rank)


def device_type() -> str:
    """The device of this machine's workers: "cuda" or "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def loopback_store(port: int = 0, *, timeout: timedelta = timedelta(minutes=5)) -> dist.TCPStore:
    """A store in this process that listens on the loopback only (torch's own: everywhere); port 0: any free one."""
    listener = socket.create_server((LOOPBACK, port))
    port = listener.getsockname()[1]
    return dist.TCPStore(
        LOOPBACK, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=listener.detach()
    )


def open_store(
    place: RankInfo, timeout: timedelta, env: MutableMapping[str, str] = os.environ
) -> tuple[dist.Store, int, int]:
    """This worker's store, its rank and the number of ranks; sets MASTER_ADDR and MASTER_PORT if they are not set."""
    if place.world_size == 1:
        return dist.HashStore(), 0, 1
    _set_missing_address(env)
    if place.rank == 0 and env["MASTER_ADDR"] in LOOPBACK_NAMES and env.get(AGENT_STORE) != "True":
        return loopback_store(int(env["MASTER_PORT"]), timeout=timeout), 0, place.world_size
    return next(dist.rendezvous("env://", place.rank, place.world_size, timeout=timeout))


def is_on_one_machine(place: RankInfo, env: Mapping[str, str] = os.environ) -> bool:
    """True where no other machine can take part, as far as the environment says once the store is open."""
    local = env.get("LOCAL_WORLD_SIZE") == str(place.world_size)
    return place.world_size == 1 or local or env.get("MASTER_ADDR") in LOOPBACK_NAMES


def _set_missing_address(env: MutableMapping[str, str]) -> None:
    """Give `env://` an address where the launcher, unlike torchrun, has left that to the program."""
    launched = find_launcher(env)
    if launched is not None and launched.launcher not in ("torchrun", "srun"):
        env.update(find_address(launched, env))
        return
    if "SLURM_PROCID" not in env:
        return
    if "MASTER_ADDR" not in env:
        command = ["scontrol", "show", "hostnames", env["SLURM_JOB_NODELIST"]]
        hosts = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
        env["MASTER_ADDR"] = hosts[0] if len(hosts) > 1 else LOOPBACK
    env.setdefault("MASTER_PORT", str(20000 + int(env.get("SLURM_JOB_ID", "0")) % 20000))


def launch_workers(command: Sequence[str], nproc: int, *, max_restarts: int = 0) -> int:
    """Run `command` in `nproc` local worker processes; when one fails, end the others and start all again.

    What the user has to fix is not tried again. SIGTERM, SIGUSR1 and the first Ctrl-C are passed on, and whatever the
    workers make of them, nothing is started any more. The second Ctrl-C ends all at once.

    Returns:
        The exit code for this process: 0, 2 for a user error, 128 + n after signal n or a closed pipe, else 1.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // nproc)))
    workers = Workers(command, nproc)
    variables = {"MASTER_ADDR": LOOPBACK, AGENT_STORE: "True"}
    try:
        with _passing_signals_to(workers.processes) as passed:
            for attempt in range(max_restarts + 1):
                store = loopback_store()
                try:
                    workers.start({**variables, "MASTER_PORT": str(store.port), RESTART_COUNT: str(attempt)})
                    while (failures := workers.failures()) is None:
                        time.sleep(POLL_SECONDS)
                finally:
                    workers.stop()
                if not failures:
                    return 0
                if passed:
                    return _ended_by(passed[0])
                for final in (EXIT_USER_ERROR, EXIT_READER_GONE):  # not tried again, and nothing to add
                    if final in failures.values():
                        return final
                what_next = f"restart {attempt + 1} of {max_restarts}" if attempt < max_restarts else "the job is over"
                print(f"{describe_failure(failures)}; {what_next}", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        return _ended_by(signal.SIGINT)
    return EXIT_ERROR


class Workers:
    """Runs one process per rank of `nodes` nodes, which are on this machine; `processes` are those that are started."""

    def __init__(self, command: Sequence[str], ranks_per_node: int, *, nodes: int = 1) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []
        self.command, self._ranks_per_node, self._nodes = command, ranks_per_node, nodes
        self._deadline: float | None = None

    def start(self, env: Mapping[str, str]) -> Self:
        """Start all ranks, with the variables `env` added to each; MASTER_ADDR and MASTER_PORT are among them."""
        self.processes.clear()
        self._deadline = None
        world_size = self._nodes * self._ranks_per_node
        try:
            for rank in range(world_size):
                node, local_rank = divmod(rank, self._ranks_per_node)
                place = {"RANK": rank, "LOCAL_RANK": local_rank, "GROUP_RANK": node, "WORLD_SIZE": world_size}
                place["LOCAL_WORLD_SIZE"] = self._ranks_per_node
                place[LAUNCHER_PID] = os.getpid()  # a worker ends when its launcher is gone
                own = {name: str(value) for name, value in place.items()}
                self.processes.append(self.start_rank(rank, node, {**os.environ, **env, **own}))
        except BaseException:
            self.stop()
            raise
        return self

    def start_rank(self, rank: int, node: int, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """Start one rank in a session of its own: Ctrl-C reaches only the launcher, which then ends all.

        SIGINT waits until `run_worker` lets it through: an interpreter that starts would answer with a traceback.
        """
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            return subprocess.Popen(self.command, env=env, start_new_session=True)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def failures(self) -> dict[int, int] | None:
        """Look at the ranks once: None while the job runs, then the exit codes, by rank, of those that failed."""
        codes = {rank: code for rank, process in enumerate(self.processes) if (code := process.poll()) is not None}
        failures = {rank: code for rank, code in codes.items() if code != 0}
        if failures and self._deadline is None:
            self._deadline = time.monotonic() + GRACE_SECONDS
        late = self._deadline is not None and time.monotonic() > self._deadline
        over = len(codes) == len(self.processes) or late or any(code != EXIT_SECONDARY for code in failures.values())
        return failures if over else None

    def stop(self) -> None:
        """End every rank and what it has started."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):  # the group is the rank and its children
                os.killpg(process.pid, signal.SIGKILL)
        for process in self.processes:
            process.wait()


@contextlib.contextmanager
def _passing_signals_to(workers: list[subprocess.Popen[bytes]]) -> Iterator[list[signal.Signals]]:
    """Send the signals that end a run in good order on to the workers; yields those that came."""
    passed: list[signal.Signals] = []

    def pass_on(signum: int, frame: FrameType | None) -> None:
        if signum == signal.SIGINT and signal.SIGINT in passed:
            raise KeyboardInterrupt
        passed.append(signal.Signals(signum))
        for worker in workers:
            worker.send_signal(signum)

    before = {signum: signal.signal(signum, pass_on) for signum in STOP_SIGNALS}
    try:
        yield passed
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _ended_by(signum: signal.Signals) -> int:
    print(f"\nended by {signum.name}", file=sys.stderr)  # on a line of its own after a progress bar or the ^C
    return 128 + signum


def describe_failure(failures: Mapping[int, int]) -> str:
    """Name the rank that ended the job and how it did, from exit codes by rank."""
    rank = first_failure(failures)
    code = failures[rank]
    if code == EXIT_HANG:
        return "the job hung, see above"
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return f"rank {rank} {how}"


def first_failure(failures: Mapping[int, int]) -> int:
    """The rank that ended the job: one that was killed, else one that reported."""
    return min(failures, key=lambda rank: (failures[rank] == EXIT_SECONDARY, failures[rank] >= 0))
