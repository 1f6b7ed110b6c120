"""A tiny program for the tests of the launcher: `python job.py <what goes wrong> <workers> [<restarts>]`."""

import functools
import os
import signal
import sys
import time

import torch
import torch.distributed as dist

from megazpp.base.program import JobError, UserError
from megazpp.parallel.launch import LaunchConfig, find_place, launch_workers
from megazpp.parallel.worker import Worker, leave, run_worker

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
    if rank == str(worker.rank):
        time.sleep(0.3)  # let the others reach their collective
        if kind == "raise":
            raise RuntimeError("injected")
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "sleep":
            time.sleep(FOREVER)
    if kind != "nothing":
        dist.all_reduce(total)


def main() -> int:
    what, nproc = sys.argv[1], int(sys.argv[2])
    restarts = int(sys.argv[3]) if len(sys.argv) > 3 else 0
    config = LaunchConfig(nproc=nproc if nproc else None, max_restarts=restarts)
    place = find_place(config)
    if place.started:
        run_worker(place, config, functools.partial(work, what))
    return launch_workers([sys.executable, *sys.argv], place.world_size, max_restarts=restarts)


if __name__ == "__main__":
    leave(main())
