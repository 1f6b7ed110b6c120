"""Who starts the workers: torchrun, srun, or this program through torch's elastic agent.

A worker's own side of it is worker.py.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig as ElasticConfig
from torch.distributed.launcher.api import elastic_launch

from megazpp.flags import flag

DEFAULT_CPU_WORKERS = 4
EXIT_ERROR, EXIT_USER_ERROR, EXIT_ECHO = 1, 2, 3  # an echo: some other rank failed first
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)  # finish the step, save, exit with 0
LAUNCHER_PID = "MEGAZPP_LAUNCHER_PID"  # set for the workers that we start


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
    if config.nproc is not None and LAUNCHER_PID not in env:
        raise ValueError(f"--nproc {config.nproc}: the workers were already started by {launcher}")
    return Place(started=True, world_size=world_size, rank=rank, local_rank=local_rank)


def launched_rank(env: Mapping[str, str] = os.environ) -> int:
    """This process's rank before `find_place` has succeeded, so that one process reports a wrong flag; 0 if unclear."""
    if "RANK" in env:
        return int(env["RANK"])
    return int(env["SLURM_PROCID"]) if "SLURM_STEP_NUM_TASKS" in env and "SLURM_PROCID" in env else 0


def launch_workers(command: list[str], nproc: int) -> int:
    """Run `command` in `nproc` local worker processes.

    When one fails the others are ended; Ctrl-C or a termination ends them all.

    Returns:
        The exit code for this process: 0, 2 for a user error, 128 + n after signal n, else 1.
    """
    logging.disable(logging.ERROR)  # of torch's agent: the failing worker has said what there is to say
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // nproc)))
    os.environ[LAUNCHER_PID] = str(os.getpid())
    try:
        with tempfile.TemporaryDirectory(prefix="megazpp-") as scratch:
            elastic_launch(_local_workers(nproc, scratch), command[0])(*command[1:])
    except KeyboardInterrupt:
        return _ended_by(signal.SIGINT)
    except SignalException as error:
        return _ended_by(error.sigval)
    except ChildFailedError as error:
        return _worker_failed({rank: failure.exitcode for rank, failure in error.failures.items()})
    return 0


def _local_workers(nproc: int, scratch: str) -> ElasticConfig:
    """Torch's agent for one node; without `scratch` it leaves a folder in /tmp behind."""
    return ElasticConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.1,
        logs_specs=DefaultLogsSpecs(log_dir=scratch),
        signals_to_handle="SIGTERM,SIGHUP,SIGQUIT",  # Ctrl-C stays Python's: the agent then ends workers by SIGTERM
    )


def _ended_by(signum: signal.Signals) -> int:
    print(f"\nended by {signum.name}", file=sys.stderr)  # on a line of its own after a progress bar or the ^C
    return 128 + signum


def _worker_failed(exit_codes: dict[int, int]) -> int:
    """Say which rank ended the job: one that was killed, else one that reported; the rest the agent ended."""
    consequences = (EXIT_ECHO, -signal.SIGTERM)
    rank, code = min(exit_codes.items(), key=lambda item: (item[1] in consequences, item[1] >= 0))
    if code == EXIT_USER_ERROR:
        return EXIT_USER_ERROR
    reason = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    print(f"rank {rank} {reason}; the job is over", file=sys.stderr)
    return EXIT_ERROR
