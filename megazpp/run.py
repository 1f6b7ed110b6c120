"""What every program on ranks does: become a worker or start the workers, and find out on which cluster.

pretrain_gpt.py trains, the tools that use a checkpoint do something else; until there, and in how they end, they are
alike.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

from megazpp.arguments import RunConfig
from megazpp.errors import EXIT_USER_ERROR, UserError, user_errors
from megazpp.parallel.environment import prepare_environment
from megazpp.parallel.launch import LaunchConfig, Place, find_place, launched_rank
from megazpp.parallel.processes import launch_workers
from megazpp.parallel.survey import settle_cluster
from megazpp.parallel.worker import Worker, run_worker
from megazpp.topology.cluster import Cluster
from megazpp.topology.cluster_file import detect_cluster, read_cluster

LATE_SECONDS = 10.0  # that rank 0, which says what is wrong, may be behind; when it leaves, the launcher ends all


class Job(NamedTuple):
    """What was asked for, checked: where this process stands, and each worker's part."""

    place: Place
    launch: LaunchConfig
    work: Callable[[Worker], None]


def run_on_ranks(prepare: Callable[[], Job | int]) -> int:
    """Prepare, then become a worker (which does not return) or start the workers; returns the exit status.

    Args:
        prepare: reads and checks the command line; raises ValueError before anything is made. A number instead of a job
            is the exit status of a program that is done.
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
    return launch_workers([sys.executable, *sys.argv], job.place.world_size, max_restarts=job.launch.max_restarts)


def announced_cluster(config: RunConfig, place: Place) -> Cluster:
    """The cluster that the flags and the launcher's environment describe, before workers start.

    Raises:
        ValueError: names the flags and their values.
    """
    launcher_env = os.environ if place.started and place.world_size > 1 else {}  # a batch script's is not ours
    tp = config.parallel.tensor_model_parallel_size
    return detect_cluster(place.world_size, config.cluster, launcher_env, tp=tp)


def found_cluster(config: RunConfig, announced: Cluster, worker: Worker) -> Cluster:
    """The cluster as its ranks find it, which may be another than was announced; on all ranks."""
    return settle_cluster(worker, config.cluster, announced, tp=config.parallel.tensor_model_parallel_size)


def planned_cluster(config: RunConfig) -> Cluster:
    """The cluster of --cluster-file, or this machine's ranks: for programs that start no workers."""
    path = config.cluster.cluster_file
    world_size = find_place(config.launch, {}).world_size if path is None else read_cluster(path).world_size
    return detect_cluster(world_size, config.cluster, {}, tp=config.parallel.tensor_model_parallel_size)
