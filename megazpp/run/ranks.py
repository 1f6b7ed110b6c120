"""The frame of every program on ranks: become a worker or start the workers, and find out on which cluster.

Training programs continue with run/training.py; programs that use a checkpoint's model with inference/on_checkpoint.py.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

from megazpp.base.program import EXIT_USER_ERROR, UserError, launched_rank, say_at_terminal, user_errors
from megazpp.parallel.environment import prepare_environment
from megazpp.parallel.launch import LaunchConfig, RankInfo, detect_rank_info, launch_workers
from megazpp.parallel.worker import Worker, run_worker
from megazpp.run.arguments import RunConfig
from megazpp.topology.cluster import Cluster
from megazpp.topology.cluster_file import read_cluster

LATE_SECONDS = 10.0  # that rank 0, which says what is wrong, may be behind; when it leaves, the launcher ends all


class Job(NamedTuple):
    """A checked request: where this process stands, and each worker's part."""

    place: RankInfo
    launch: LaunchConfig
    work: Callable[[Worker], None]


def run_on_ranks(prepare: Callable[[], Job | int]) -> int:
    """Prepare, then become a worker (which does not return) or start the workers; returns the exit status.

    `prepare` reads and checks the command line; it gives a job, or the exit status of a program that is done.
    """
    try:
        with user_errors():
            notices = prepare_environment()
            if launched_rank() == 0:
                for notice in notices:
                    print(f"note: {notice}", file=sys.stderr)
            job = prepare()
    except UserError as error:
        if launched_rank() == 0:
            error.show()
        else:
            time.sleep(LATE_SECONDS)  # the launcher ends rank 0 as soon as another rank has left
        return EXIT_USER_ERROR
    if isinstance(job, int):
        return job
    if job.place.started:
        run_worker(job.place, job.launch, job.work)
    say_at_terminal(f"starting {job.place.world_size} workers, of which each imports torch")
    return launch_workers([sys.executable, *sys.argv], job.place.world_size, max_restarts=job.launch.max_restarts)


def announced_cluster(config: RunConfig, place: RankInfo) -> Cluster:
    """The cluster that the flags and the launcher's environment describe, before workers start."""
    launcher_env = os.environ if place.started and place.world_size > 1 else {}  # a batch script's is not ours
    return config.detect_cluster(place.world_size, launcher_env)


def planned_cluster(config: RunConfig) -> Cluster:
    """The cluster of --cluster-file, or this machine's ranks: for programs that start no workers."""
    path = config.cluster.cluster_file
    world_size = detect_rank_info(config.launch, {}).world_size if path is None else read_cluster(path).world_size
    return config.detect_cluster(world_size, {})
