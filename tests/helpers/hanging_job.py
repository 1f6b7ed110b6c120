"""A program that hangs, for the tests of the watchdog: `python hanging_job.py <how> <workers> <folder>`.

Steps of all-reduces over two axes; in the third step rank 1 sleeps for ever, or stops itself, before its all-reduce.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
import time
from pathlib import Path

import torch

from megazpp.parallel.dims import ParallelConfig, ParallelDims, plan_dims
from megazpp.parallel.launch import LaunchConfig, find_place
from megazpp.parallel.supervisor import launch_workers
from megazpp.parallel.timeline import STEP
from megazpp.parallel.watchdog import Watchdog
from megazpp.parallel.worker import Worker, leave, run_worker
from megazpp.topology.cluster import Cluster

LAUNCH = LaunchConfig(distributed_timeout_minutes=1, distributed_timeout_seconds_after_init=1.5)


def work(how: str, folder: Path, worker: Worker) -> None:
    cluster = Cluster(num_nodes=1, ranks_per_node=worker.world_size)
    dims = ParallelDims(
        plan_dims(ParallelConfig(tensor_model_parallel_size=2), cluster, zero_stage=3), device_type="cpu"
    )
    with Watchdog(worker, dims, LAUNCH, folder if worker.rank == 0 else None):
        for step in range(1, 6):
            with dims.timeline.span(STEP, f"step {step}"):
                dims.tp.all_reduce_(torch.ones(3))
                if worker.rank == 1 and step == 3:
                    print("hangs", flush=True)
                    fall_asleep(how)
                dims.shard.all_reduce_(torch.ones(3))
                dims.tp.all_reduce_(torch.ones(3))


def fall_asleep(how: str) -> None:
    while how == "sleep":
        time.sleep(1)
    os.kill(os.getpid(), signal.SIGSTOP)


def main() -> int:
    how, nproc, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    place = find_place(LaunchConfig(nproc=nproc))
    if place.started:
        run_worker(place, LAUNCH, functools.partial(work, how, folder))
    return launch_workers([sys.executable, *sys.argv], place.world_size)


if __name__ == "__main__":
    leave(main())
