"""What every program on ranks does with its RunConfig: check it, become a worker or start the workers.

pretrain_gpt.py trains, the tools that use a checkpoint do something else; until there, and in how they end, they are
alike.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeVar

import torch

from megazpp.arguments import ModelPlan, RunConfig, RunPlan
from megazpp.exit_codes import EXIT_USER_ERROR
from megazpp.parallel.launch import LaunchConfig, Place, launched_rank
from megazpp.parallel.supervisor import launch_workers
from megazpp.parallel.survey import settle_cluster
from megazpp.parallel.worker import ECHO_SECONDS, UserError, Worker, run_worker, user_errors
from megazpp.topology.cluster import Cluster, detect_cluster

P = TypeVar("P", RunPlan, ModelPlan)
P_co = TypeVar("P_co", RunPlan, ModelPlan, covariant=True)


class Check(Protocol[P_co]):
    """`check_run_config` or `check_model_config`."""

    def __call__(self, config: RunConfig, cluster: Cluster, *, device_type: str) -> P_co: ...


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
            job = prepare()
    except UserError as error:
        if launched_rank() == 0:
            error.show()
        else:
            time.sleep(3 * ECHO_SECONDS)  # the launcher ends rank 0 as soon as another rank has left
        return EXIT_USER_ERROR
    if isinstance(job, int):
        return job
    if job.place.started:
        run_worker(job.place, job.launch, job.work)
    return launch_workers([sys.executable, *sys.argv], job.place.world_size, max_restarts=job.launch.max_restarts)


def plan_as_announced(config: RunConfig, place: Place, check: Check[P]) -> P:
    """The plan for the cluster that the flags and the launcher's environment describe, before workers start.

    Raises:
        ValueError: names the flags and their values.
    """
    launcher_env = os.environ if place.started and place.world_size > 1 else {}  # a batch script's is not ours
    tp = config.parallel.tensor_model_parallel_size
    cluster = detect_cluster(place.world_size, config.cluster, launcher_env, tp=tp)
    return check(config, cluster, device_type="cuda" if torch.cuda.is_available() else "cpu")


def plan_as_found(config: RunConfig, plan: P, worker: Worker, check: Check[P]) -> P:
    """The plan for the cluster as its ranks find it, which may be another than was announced; on all ranks."""
    tp = config.parallel.tensor_model_parallel_size
    cluster = settle_cluster(worker, config.cluster, plan.layout.cluster, tp=tp)
    return check(config, cluster, device_type=worker.device.type)
