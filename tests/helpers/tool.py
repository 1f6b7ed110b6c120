"""Run the tools that use a checkpoint on existing worker ranks."""

import contextlib
import importlib
import io
import sys
import uuid
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from helpers.program import LAUNCHER_VARIABLES
from helpers.ranks import ranks
from torch.distributed.distributed_c10d import _get_default_store

from megazpp.base.program import JobError
from megazpp.inference import on_checkpoint
from megazpp.parallel.watchdog import Watchdog
from megazpp.parallel.worker import Worker
from megazpp.run.ranks import Job


def run_tool(tool: str, *flags: object, world: int = 1) -> tuple[int, str]:
    """Run a tool on `world` ranks of `helpers.ranks` and return rank 0's (exit code, output)."""
    return ranks(world).run(_run_on_rank, tool, [str(flag) for flag in flags], uuid.uuid4().hex)[0]


def _run_on_rank(tool: str, flags: list[str], key: str) -> tuple[int, str]:
    rank, world_size, said, jobs = dist.get_rank(), dist.get_world_size(), io.StringIO(), list[Job]()
    store, timeout = dist.PrefixStore(key, _get_default_store()), timedelta(minutes=3)
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said), pytest.MonkeyPatch.context() as patch:
        for name in LAUNCHER_VARIABLES:
            patch.delenv(name, raising=False)
        patch.setattr(sys, "argv", [f"{tool}.py", *flags])  # error messages take flags from here
        patch.setattr(on_checkpoint, "run_on_ranks", lambda prepare: jobs.append(prepare()))
        code = importlib.import_module(tool).main(flags)
        for job in jobs:
            assert job.place.world_size == world_size
            try:
                watchdog = Watchdog(store, job.place, job.launch, restarts=0)  # not started
                job.work(Worker(torch.device("cpu"), rank, world_size, rank, store, timeout, watchdog))
            except JobError as error:
                error.show()
                code = error.exit_code
    return code, said.getvalue()
