"""Run a tool, which loads a checkpoint, on the shared worker ranks of the tests. The tool starts no other workers."""

import contextlib
import importlib
import io
import sys
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers.program import LAUNCHER_VARIABLES, ROOT
from helpers.ranks import ranks
from torch.distributed.distributed_c10d import _get_default_store

from megazpp.inference import on_checkpoint
from megazpp.parallel.config import LaunchConfig
from megazpp.parallel.launch import detect_rank_info
from megazpp.parallel.store import RankInfo
from megazpp.parallel.watchdog import Watchdog
from megazpp.parallel.worker import Worker


def run_tool(tool: str, *flags: object, world: int = 1, cwd: Path = ROOT) -> tuple[int, str]:
    """Run the program `tool` of the folder tools/ on `world` ranks of `helpers.ranks`, in the working directory `cwd`.

    Returns:
        Exit code and printed output of rank 0.
    """
    return ranks(world).run(_run_on_rank, tool, [str(flag) for flag in flags], uuid.uuid4().hex, cwd)[0]


def _run_on_rank(tool: str, flags: list[str], key: str, cwd: Path) -> tuple[int, str]:
    rank, world_size, said = dist.get_rank(), dist.get_world_size(), io.StringIO()
    store = dist.PrefixStore(key, _get_default_store())

    @contextlib.contextmanager
    def on_this_rank(place: RankInfo, launch: LaunchConfig, facts: object) -> Iterator[Worker]:
        assert place.world_size == world_size
        # the test does not start the watchdog, because the shared workers have their own timeouts
        watchdog = Watchdog(store, place, launch)
        own = replace(place, started=True, rank=rank, local_rank=rank)
        yield Worker(**vars(own), device=torch.device("cpu"), store=store, watchdog=watchdog)

    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said), pytest.MonkeyPatch.context() as patch:
        patch.chdir(cwd)
        for name in LAUNCHER_VARIABLES:
            patch.delenv(name, raising=False)
        patch.setattr(sys, "argv", [f"{tool}.py", *flags])  # error messages quote the flags from here
        # A tool that chooses the number of ranks itself calls `detect_rank_info` a second time, with --nproc set. Only
        # then is this rank one of the tool's started workers
        patch.setattr(
            on_checkpoint,
            "detect_rank_info",
            lambda config: replace(detect_rank_info(config), started=config.nproc is not None),
        )
        patch.setattr(on_checkpoint, "worker_process", on_this_rank)
        patch.setattr(on_checkpoint, "leave", lambda code: code)
        code = importlib.import_module(tool).main(flags)
    return code, said.getvalue()
