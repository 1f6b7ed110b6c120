"""Run a job that fails in a chosen way, to test the launcher and the watchdog.

    job.py KIND WORKERS [RESTARTS [MINUTES]]

KIND names the failure, and often its rank: "kill-on-1" kills rank 1. WORKERS is the number of ranks, RESTARTS is
--max-restarts, and MINUTES is the timeout while the job starts.
"""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

from megazpp.base.program import JobError, UserError, leave
from megazpp.parallel.config import LaunchConfig, ParallelConfig
from megazpp.parallel.dims import ParallelDims, plan_dims
from megazpp.parallel.launch import detect_rank_info, launch_workers
from megazpp.parallel.timeline import STEP
from megazpp.parallel.worker import Worker, worker_process
from megazpp.topology.cluster import Cluster

FOREVER = 1000


def work(what: str, worker: Worker) -> None:
    total = torch.ones(3)
    dist.all_reduce(total)
    if worker.rank == 0:
        print(f"sum {total[0]:.0f}", flush=True)
    kind, _, rank = what.partition("-on-")
    if kind == "user-error":
        raise UserError("--flag 3 is wrong\n--other 4 too")
    if kind == "agreed":
        raise JobError("all ranks have found the same\nand say so once")
    if kind == "hang":
        watched(worker)
    if kind == "pause":
        for _ in range(12):
            print(f"rank {worker.rank} at work", flush=True)
            time.sleep(0.25)
            dist.all_reduce(total)
    if rank == str(worker.rank):
        time.sleep(0.3)  # long enough for the other ranks to wait in the next collective, as in a real failure
        if kind == "raise":
            raise RuntimeError("injected")
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if kind == "sleep":
            time.sleep(FOREVER)
    if kind != "nothing":
        dist.all_reduce(total)


def watched(worker: Worker) -> None:
    """Run steps with collectives of two mesh axes on four ranks under the watchdog, and hang in step 3.

    In step 3, rank 1 sleeps and rank 2 stops its own process.
    """
    cluster = Cluster(num_nodes=1, ranks_per_node=worker.world_size)
    layout = plan_dims(ParallelConfig(tensor_model_parallel_size=2), cluster, zero_stage=3)
    dims = ParallelDims(layout, device_type="cpu")
    worker.watchdog.watch(dims)
    if worker.rank == 0:
        worker.watchdog.write_to(Path())
    for step in range(1, 6):
        with dims.timeline.span(STEP, f"step {step}"):
            dims.tp.all_reduce_(torch.ones(3))
            if step == 3:
                hang(worker.rank)
            dims.shard.all_reduce_(torch.ones(3))
            dims.tp.all_reduce_(torch.ones(3))


def hang(rank: int) -> None:
    if rank == 1:
        # UTF-8 has no bytes for this character, half a surrogate pair; the watchdog must write the stacks to its file
        # nevertheless. Python puts such characters into a script's path that is not UTF-8.
        threading.current_thread().name = "main \udcff"
        print("hangs", flush=True)
        time.sleep(FOREVER)
    if rank == 2:
        os.kill(os.getpid(), signal.SIGSTOP)


def main() -> int:
    what, nproc = sys.argv[1], int(sys.argv[2])
    restarts = int(sys.argv[3]) if len(sys.argv) > 3 else 0
    minutes = float(sys.argv[4]) if len(sys.argv) > 4 else 1.0
    limits = {"distributed_timeout_minutes": minutes, "distributed_timeout_seconds_after_init": 1.5}
    config = LaunchConfig(nproc=nproc or None, max_restarts=restarts, **limits)
    place = detect_rank_info(config)
    if place.started:
        with worker_process(place, config) as worker:
            work(what, worker)
        leave(0)
    return launch_workers(main, place.world_size, max_restarts=restarts)


if __name__ == "__main__":
    leave(main())
