"""Start of every distributed program, before its workers exist.

A program's `main` is decorated with `distributed_program`. It reads and checks its flags, and then either starts the
workers (`start_workers`), each of which runs the same `main`, or becomes a worker itself (`worker_process` in
parallel/worker.py). The functions for the cluster use only flags and environment variables, because the workers that
could discover it have not started.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from megazpp.base.program import (
    EXIT_USER_ERROR,
    LAUNCHER_PID,
    JobError,
    launched_rank,
    program,
    say_at_terminal,
    say_notices,
)
from megazpp.checkpoint.config import CheckpointConfig
from megazpp.parallel.environment import prepare_environment
from megazpp.parallel.launch import LaunchConfig, RankInfo, detect_rank_info, launch_workers
from megazpp.run.arguments import ParsedRun, RunConfig
from megazpp.topology.cluster import Cluster
from megazpp.topology.cluster_file import read_cluster
from megazpp.training.context import default_run_dir
from megazpp.training.tracking import TrackingConfig

# Seconds that other ranks wait before they exit after a user error. Launchers kill all ranks when one exits, and rank 0
# must print the error first.
LATE_SECONDS = 10.0

# Environment variable with the run folder, set by a launcher that may restart its workers.
RUN_DIR = "MEGAZPP_RUN_DIR"


def distributed_program(main: Callable[[list[str]], int]) -> Callable[..., int]:
    """Turn a `main` function into the entry point of a program with workers, which returns the exit status.

    It prepares the environment for CUDA and Triton before `main` uses torch, and prints errors as `program` does, on
    rank 0 only.

    Args:
        main: takes the arguments without the program name, and returns the exit status.
    """

    @program
    @functools.wraps(main)
    def run(argv: list[str]) -> int:
        try:
            notices = prepare_environment()
            if launched_rank() == 0:
                say_notices(notices)
            return main(argv)
        except (OSError, ValueError, JobError):
            if launched_rank() == 0:
                raise
            time.sleep(LATE_SECONDS)  # the launcher kills rank 0 as soon as another rank exits
            return EXIT_USER_ERROR

    return run


def start_workers(place: RankInfo, launch: LaunchConfig) -> int:
    """Start the workers on this machine with this program's arguments, wait for them, and return the exit status."""
    say_at_terminal(f"starting {place.world_size} workers; each imports torch")
    return launch_workers([sys.executable, *sys.argv], place.world_size, max_restarts=launch.max_restarts)


def hold_run_dir(parsed: ParsedRun) -> None:
    """Choose the run folder now if this process may restart workers, so that they all use the same one.

    Call it in the launching process, after all checks.
    """
    config = parsed.config
    if config.launch.max_restarts and config.tracking.run_dir is None and LAUNCHER_PID not in os.environ:
        os.environ[RUN_DIR] = str(default_run_dir(parsed.name, datetime.datetime.now()))


def own_checkpoints(
    checkpoint: CheckpointConfig, tracking: TrackingConfig, *, restarted: bool, env: Mapping[str, str] = os.environ
) -> CheckpointConfig:
    """Return the flags by which a job finds its own checkpoints after a restart: --save-to-run-dir sets --save.

    Args:
        checkpoint: checkpoint flags.
        tracking: flags with the run folder.
        restarted: True if a fault ended an earlier attempt of this job.
        env: environment of this process.
    Raises:
        ValueError: torchrun may restart this job, and a restarted job would not find the run folder.
    """
    if not checkpoint.save_to_run_dir or checkpoint.save is not None:
        return checkpoint
    run_dir, restarts = tracking.run_dir or env.get(RUN_DIR), env.get("TORCHELASTIC_MAX_RESTARTS", "0")
    if run_dir is None and (restarted or (restarts.isdecimal() and int(restarts) > 0)):
        raise ValueError(
            f"--save-to-run-dir with torchrun's --max-restarts {restarts}: a restarted job would not find its "
            "checkpoints, because the name of the run folder has the time; add --run-dir or --save"
        )
    if not restarted or run_dir is None:
        return checkpoint
    return dataclasses.replace(checkpoint, save=str(Path(run_dir) / "checkpoints"))


def announced_cluster(config: RunConfig, place: RankInfo) -> Cluster:
    """Return the cluster that the flags and the launcher's environment describe, as known before workers start."""
    launcher_env = os.environ if place.started and place.world_size > 1 else {}  # ignore a batch script's variables
    return config.detect_cluster(place.world_size, launcher_env)


def planned_cluster(config: RunConfig) -> Cluster:
    """Return the cluster for a program that starts no workers, such as --plan.

    It is the cluster of --cluster-file, or without the flag the ranks that this machine would start.
    """
    path = config.cluster.cluster_file
    world_size = detect_rank_info(config.launch, {}).world_size if path is None else read_cluster(path).world_size
    return config.detect_cluster(world_size, {})
