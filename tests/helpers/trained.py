"""A checkpoint that the program has written, and the tools that use one, run on ranks that are there already."""

import contextlib
import importlib
import io
import json
import sys
import uuid
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from helpers.program import LAUNCHER_VARIABLES, run_forked
from helpers.ranks import ranks
from torch.distributed.distributed_c10d import _get_default_store

from megazpp.base import run
from megazpp.base.program import JobError
from megazpp.base.run import Job
from megazpp.parallel.worker import Worker

# fmt: off
FLAGS = [
    "--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "4", "--seq-length", "32",
    "--max-position-embeddings", "32", "--position-embedding-type", "rope", "--tokenizer-type", "NullTokenizer",
    "--train-iters", "12", "--lr", "1e-2", "--micro-batch-size", "4", "--eval-iters", "2", "--split", "60,20,20",
    "--log-interval", "4", "--tensor-model-parallel-size", "2", "--sequence-parallel", "--seed", "77",
    "--eod-mask-loss", "--nproc", "2",
]
# fmt: on


class Trained(NamedTuple):
    """A finished run: its folder of checkpoints, its home, and what it printed."""

    load: Path
    home: Path
    output: str


def train(home: Path) -> Trained:
    """Train a tiny model with the program."""
    documents = [f"Document {i}: {'the cat sat on the mat. ' * (5 + i)}" for i in range(30)]
    text = home / "text.jsonl"
    text.write_text("".join(json.dumps({"text": document}) + "\n" for document in documents))
    places = ["--text-path", text, "--save", home / "save", "--data-cache-path", home / "cache", "--run-dir", home]
    code, output = run_forked("pretrain_gpt.py", *map(str, [*FLAGS, *places]), folder=home)
    assert code == 0, output
    return Trained(home / "save", home, output)


def run_tool(tool: str, *flags: object, world: int = 1) -> tuple[int, str]:
    """(exit code, output) of rank 0 of a tool that works on a checkpoint, on `world` ranks of `helpers.ranks`."""
    return ranks(world).run(_run_on_rank, tool, [str(flag) for flag in flags], uuid.uuid4().hex)[0]


def _run_on_rank(tool: str, flags: list[str], key: str) -> tuple[int, str]:
    rank, world_size, said, jobs = dist.get_rank(), dist.get_world_size(), io.StringIO(), list[Job]()
    store, timeout = dist.PrefixStore(key, _get_default_store()), timedelta(minutes=3)
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said), pytest.MonkeyPatch.context() as patch:
        for name in LAUNCHER_VARIABLES:
            patch.delenv(name, raising=False)
        patch.setattr(sys, "argv", [f"{tool}.py", *flags])  # an error looks for the flag there
        patch.setattr(run, "run_on_ranks", lambda prepare: jobs.append(prepare()))
        code = importlib.import_module(tool).main(flags)
        for job in jobs:
            assert job.place.world_size == world_size
            try:
                job.work(Worker(torch.device("cpu"), rank, world_size, rank, store, timeout))
            except JobError as error:
                error.show()
                code = error.exit_code
    return code, said.getvalue()
