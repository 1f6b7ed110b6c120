"""The start and the end of a distributed job: who starts the workers, what each worker sets up, how it leaves.

Under torchrun or srun the workers exist already; otherwise `launch_workers` starts one per GPU (4 on a CPU) through
torch's elastic agent. Every worker enters and leaves through `run_worker`:

- the first rank that fails claims the failure in the store and prints its traceback; the others, whose collectives
  then break, leave without a word, so that a user reads one traceback: the right one;
- every exit is barrier, destroy, flush, `os._exit`: an ordinary interpreter exit races with gloo's threads and
  aborts about one run in six (torch 2.13).
"""

from __future__ import annotations

import logging
import os
import random
import signal
import subprocess
import sys
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Literal, NoReturn

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig as ElasticConfig
from torch.distributed.launcher.api import elastic_launch

from megazpp.flags import flag

DEFAULT_CPU_WORKERS = 4


@dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    """Launch: worker processes, back end, seed."""

    nproc: int | None = flag(None, "local workers to start (default: one per GPU, 4 without GPUs)")
    distributed_backend: Literal["nccl", "gloo"] | None = flag(
        None, "collectives library (default: nccl with GPUs, gloo without)"
    )
    distributed_timeout_minutes: int = flag(10, "minutes after which a collective that does not finish is an error")
    local_rank: int | None = flag(
        None, "accepted for old launchers; the environment decides", aliases=("--local_rank",)
    )
    seed: int = flag(1234, "seed of the weights, the data order and dropout")


class UserError(Exception):
    """Something the user asked for cannot be done; the message says what, and no traceback helps."""

    def show(self) -> None:
        """Print it to stderr, one line per problem."""
        for line in str(self).splitlines():
            print(f"{Path(sys.argv[0]).name}: error: {line}", file=sys.stderr)


@contextmanager
def user_errors() -> Iterator[None]:
    """Where flags and files are checked: a ValueError becomes a UserError."""
    try:
        yield
    except ValueError as error:
        raise UserError(str(error)) from error


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where this process stands: `started` says whether it is a worker already or has to start them."""

    started: bool
    world_size: int
    rank: int = 0
    local_rank: int = 0


def find_place(config: LaunchConfig, env: Mapping[str, str] = os.environ) -> Place:
    """Read the launcher's environment: torchrun (RANK, WORLD_SIZE), srun (SLURM_PROCID, ...), or none.

    Raises:
        ValueError: --nproc is not positive, or is given although a launcher has started the workers, or
            --distributed-backend nccl without a GPU.
    """
    if config.distributed_backend == "nccl" and not torch.cuda.is_available():
        raise ValueError("--distributed-backend nccl needs a GPU, and torch finds none here")
    if "RANK" in env and "WORLD_SIZE" in env:
        launcher, variables = "torchrun", ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    elif "SLURM_PROCID" in env and int(env.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        launcher, variables = "srun", ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS")
    else:
        nproc = config.nproc if config.nproc is not None else torch.cuda.device_count() or DEFAULT_CPU_WORKERS
        if nproc < 1:
            raise ValueError(f"--nproc {nproc} is not positive")
        return Place(started=nproc == 1, world_size=nproc)
    rank, local_rank, world_size = (int(env.get(name, "0")) for name in variables)
    if config.nproc is not None and "MEGAZPP_WORKER" not in env:
        raise ValueError(f"--nproc {config.nproc}: the workers were already started by {launcher}")
    return Place(started=True, world_size=world_size, rank=rank, local_rank=local_rank)


def launch_workers(command: list[str], nproc: int) -> int:
    """Run `command` in `nproc` local worker processes and return 0, or 1 if one of them failed.

    When one fails the others are ended; Ctrl-C ends them all.
    """
    for name in ("torch.distributed.elastic", "torch.distributed.launcher"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # the failing worker has said what there is to say
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // nproc)))
    os.environ["MEGAZPP_WORKER"] = "1"
    config = ElasticConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.1,
    )
    try:
        elastic_launch(config, command[0])(*command[1:])
    except SignalException as error:  # Ctrl-C or a termination: the workers are gone by now
        print(f"ended by {error.sigval.name}", file=sys.stderr)
        return 128 + error.sigval
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        print(f"worker {rank} ended with {_exit_reason(failure.exitcode)}; the job is over", file=sys.stderr)
        return 1
    return 0


@dataclass(frozen=True, kw_only=True)
class Worker:
    """What a worker has once the process group stands."""

    device: torch.device
    rank: int
    world_size: int


def run_worker(place: Place, config: LaunchConfig, main: Callable[[Worker], None]) -> NoReturn:
    """Set up the device and the process group, run `main`, and leave the process with its exit code."""
    env = os.environ
    if "MEGAZPP_WORKER" in env:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C must not wait for a blocked collective
    _set_missing_rendezvous(place)
    if "OMP_NUM_THREADS" not in env:
        local = int(env.get("LOCAL_WORLD_SIZE", "1"))
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // local))
    device = _pick_device(place.local_rank)
    backend = config.distributed_backend or ("nccl" if device.type == "cuda" else "gloo")
    timeout = timedelta(minutes=config.distributed_timeout_minutes)
    store, rank, world_size = next(dist.rendezvous("env://", place.rank, place.world_size, timeout=timeout))
    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timeout,
        device_id=device if device.type == "cuda" else None,
    )
    try:
        main(Worker(device=device, rank=rank, world_size=world_size))
    except BaseException as error:
        _report_once(error, store, rank)
        leave(2 if isinstance(error, UserError) else 1)
    dist.barrier()
    dist.destroy_process_group()
    leave(0)


def leave(code: int) -> NoReturn:
    """Flush and end the process at once; see the module docstring for why not `sys.exit`."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def seed_everything(seed: int, *, data_rank: int, tp_rank: int) -> None:
    """Seed the default generators so that every rank draws differently; used for dropout only.

    Weights come from (seed, name) and data order from the seed, so neither depends on this.
    """
    mixed = (seed * 1_000_003 + data_rank * 1_009 + tp_rank) % 2**63
    random.seed(mixed)
    np.random.seed(mixed % 2**32)
    torch.manual_seed(mixed)


def _report_once(error: BaseException, store: dist.Store, rank: int) -> None:
    """Print the traceback if this is the first rank to fail (the others fail because this one left)."""
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    try:
        first = store.add(f"megazpp/failures/{attempt}", 1) == 1
    except Exception:  # the store's host is gone, so somebody else failed before
        first = rank == 0
    if not first:
        return
    if isinstance(error, KeyboardInterrupt):
        print("interrupted", file=sys.stderr)
    elif isinstance(error, UserError):
        error.show()
    else:
        text = "".join(traceback.format_exception(error))
        print(f"rank {rank} failed:\n{text}", file=sys.stderr)


def _pick_device(local_rank: int) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _set_missing_rendezvous(place: Place) -> None:
    """Give `env://` an address where the launcher has not: a single process, or srun."""
    env = os.environ
    if place.world_size == 1:
        env.setdefault("MASTER_ADDR", "127.0.0.1")
        env.setdefault("MASTER_PORT", "0")
    elif "SLURM_PROCID" in env:
        if "MASTER_ADDR" not in env:
            hosts = subprocess.run(
                ["scontrol", "show", "hostnames", env["SLURM_JOB_NODELIST"]],
                capture_output=True,
                text=True,
                check=True,
            ).stdout.split()
            env["MASTER_ADDR"] = hosts[0]
        env.setdefault("MASTER_PORT", str(20000 + int(env.get("SLURM_JOB_ID", "0")) % 20000))


def _exit_reason(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
