"""A program that hangs, for the tests of the watchdog: `python hanging_job.py <folder>`.

Steps of all-reduces over two axes of four ranks; in the third step rank 1 sleeps for ever before its second all-reduce,
and rank 2 stops itself.
"""

import functools
import os
import signal
import sys
import time
from pathlib import Path

import torch

from megazpp.parallel.dims import ParallelConfig, ParallelDims, plan_dims
from megazpp.parallel.launch import LaunchConfig, find_place, launch_workers
from megazpp.parallel.timeline import STEP
from megazpp.parallel.watchdog import Watchdog
from megazpp.parallel.worker import Worker, leave, run_worker
from megazpp.topology.cluster import Cluster

LAUNCH = LaunchConfig(distributed_timeout_minutes=1, distributed_timeout_seconds_after_init=1.5)


def work(folder: Path, worker: Worker) -> None:
    cluster = Cluster(num_nodes=1, ranks_per_node=worker.world_size)
    dims = ParallelDims(
        plan_dims(ParallelConfig(tensor_model_parallel_size=2), cluster, zero_stage=3), device_type="cpu"
    )
    with Watchdog(worker, dims, LAUNCH, folder if worker.rank == 0 else None):
        for step in range(1, 6):
            with dims.timeline.span(STEP, f"step {step}"):
                dims.tp.all_reduce_(torch.ones(3))
                if step == 3:
                    hang(worker.rank)
                dims.shard.all_reduce_(torch.ones(3))
                dims.tp.all_reduce_(torch.ones(3))


def hang(rank: int) -> None:
    if rank == 1:
        print("hangs", flush=True)
        while True:
            time.sleep(1)
    if rank == 2:
        os.kill(os.getpid(), signal.SIGSTOP)


def main() -> int:
    folder = Path(sys.argv[1])
    place = find_place(LaunchConfig(nproc=4))
    if place.started:
        run_worker(place, LAUNCH, functools.partial(work, folder))
    return launch_workers([sys.executable, *sys.argv], place.world_size)


if __name__ == "__main__":
    leave(main())
