"""The start of a job: who starts the workers, and the store in which they find each other.

| started by                      | store                          | reachable from                                    |
|---------------------------------|--------------------------------|---------------------------------------------------|
| nobody: one process             | in the process                 | nowhere                                           |
| this program (processes.py)     | in the launcher                | this machine                                      |
| torchrun                        | torchrun's                     | the network: torch listens on every interface     |
| srun, by hand                   | in rank 0, at MASTER_ADDR      | the network; this machine if that is its loopback |

torch's store asks nobody who they are: whoever reaches it can stop the job, or take part in it. On the network it
belongs behind a firewall (SECURITY.md). A worker's own side of the start is worker.py.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist

from megazpp.base.flags import check_not_negative, check_positive, check_words, flag, spelling
from megazpp.base.program import LAUNCHER_PID

MOST_CPU_WORKERS = 4  # by default; two at least, so that what would cross a network is seen
LARGEST_SEED = 2**32 - 1  # that numpy takes
YEAR_SECONDS = 366 * 24 * 3600.0  # clocks can add waits up to that to the present time
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)  # finish the step, save, exit with 0
RESTART_COUNT = "TORCHELASTIC_RESTART_COUNT"  # set by torchrun and by us
LOOPBACK = "127.0.0.1"
LOOPBACK_NAMES = (LOOPBACK, "localhost")
AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"  # "True": whoever started the workers has the store


@dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    """Launch: worker processes, back end, seed."""

    nproc: int | None = flag(None, "local workers to start (default: one per GPU; without GPUs one per core, 2 to 4)")
    max_restarts: int = flag(
        0, "times that the local workers are started again after one has failed (under torchrun, give it to torchrun)"
    )
    distributed_backend: Literal["nccl", "gloo"] | None = flag(
        None, "collectives library (default: nccl with GPUs, gloo without)"
    )
    distributed_timeout_minutes: float = flag(10, "minutes without any progress after which the job is taken to hang")
    distributed_timeout_seconds_after_init: float | None = flag(
        None,
        "the same in seconds from the second step on, when everything is compiled and connected (default: half of "
        "--distributed-timeout-minutes: more than a slow read or a busy neighbour keeps a rank away)",
    )
    local_rank: int | None = flag(
        None, "accepted for old launchers; the environment decides", aliases=("--local_rank",)
    )
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
class Place:
    """A process's place in the job; `started`: it is a worker already and need not start them."""

    started: bool
    world_size: int
    rank: int = 0
    local_rank: int = 0


def find_place(config: LaunchConfig, env: Mapping[str, str] = os.environ) -> Place:
    """Read the launcher's environment: torchrun (RANK, WORLD_SIZE), srun (SLURM_PROCID, ...), or none.

    Raises:
        ValueError: --nproc or --max-restarts is given although a launcher has started the workers, or
            --distributed-backend nccl without a GPU.
    """
    if config.distributed_backend == "nccl" and not torch.cuda.is_available():
        raise ValueError("--distributed-backend nccl needs a GPU, and torch finds none here")
    if "RANK" in env and "WORLD_SIZE" in env:
        launcher, variables = "torchrun", ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    elif "SLURM_PROCID" in env and int(env.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        launcher, variables = "srun", ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS")
    else:
        nproc = config.nproc if config.nproc is not None else torch.cuda.device_count() or default_cpu_workers()
        return Place(started=nproc == 1 and not config.max_restarts, world_size=nproc)
    rank, local_rank, world_size = (int(env.get(name, "0")) for name in variables)
    if config.nproc is not None and LAUNCHER_PID not in env:
        raise ValueError(f"--nproc {config.nproc}: the workers were already started by {launcher}")
    if config.max_restarts and LAUNCHER_PID not in env:
        raise ValueError(
            f"--max-restarts {config.max_restarts}: the workers are started, and started again, by {launcher}"
        )
    return Place(started=True, world_size=world_size, rank=rank, local_rank=local_rank)


def default_cpu_workers() -> int:
    """One per core that this process may use, but two at least and four at most."""
    return min(max(len(os.sched_getaffinity(0)), 2), MOST_CPU_WORKERS)


def device_type() -> str:
    """The device of this machine's workers: "cuda" or "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def loopback_store(port: int = 0, *, timeout: timedelta = timedelta(minutes=5)) -> dist.TCPStore:
    """A store in this process that listens on the loopback only.

    torch's own listens on every interface, whatever address it is given.

    Args:
        port: 0 for any that is free.
        timeout: of a client's wait for a key.
    """
    listener = socket.create_server((LOOPBACK, port))
    port = listener.getsockname()[1]
    return dist.TCPStore(
        LOOPBACK, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=listener.detach()
    )


def agent_variables(store: dist.TCPStore) -> dict[str, str]:
    """The environment of workers whose store is `store`, in the process that starts them."""
    return {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(store.port), AGENT_STORE: "True"}


def open_store(
    place: Place, timeout: timedelta, env: MutableMapping[str, str] = os.environ
) -> tuple[dist.Store, int, int]:
    """This worker's store, its rank and the number of ranks; sets MASTER_ADDR and MASTER_PORT where srun has not."""
    if place.world_size == 1:
        return dist.HashStore(), 0, 1
    _set_missing_address(env)
    if place.rank == 0 and env["MASTER_ADDR"] in LOOPBACK_NAMES and env.get(AGENT_STORE) != "True":
        return loopback_store(int(env["MASTER_PORT"]), timeout=timeout), 0, place.world_size
    return next(dist.rendezvous("env://", place.rank, place.world_size, timeout=timeout))


def is_on_one_machine(place: Place, env: Mapping[str, str] = os.environ) -> bool:
    """True where no other machine can take part, as far as the environment says once the store is open."""
    local = env.get("LOCAL_WORLD_SIZE") == str(place.world_size)
    return place.world_size == 1 or local or env.get("MASTER_ADDR") in LOOPBACK_NAMES


def _set_missing_address(env: MutableMapping[str, str]) -> None:
    """Give `env://` an address where srun, unlike torchrun, has left that to the program."""
    if "SLURM_PROCID" not in env:
        return
    if "MASTER_ADDR" not in env:
        command = ["scontrol", "show", "hostnames", env["SLURM_JOB_NODELIST"]]
        hosts = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
        env["MASTER_ADDR"] = hosts[0] if len(hosts) > 1 else LOOPBACK
    env.setdefault("MASTER_PORT", str(20000 + int(env.get("SLURM_JOB_ID", "0")) % 20000))
