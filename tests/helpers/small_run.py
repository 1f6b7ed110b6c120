"""Parse and check the flags of a small training run, without starting it."""

import shlex
from pathlib import Path
from typing import Any
from unittest import mock

from megazpp.base.command_line import FlagParser
from megazpp.features import FEATURES
from megazpp.run.arguments import ParsedRun, parse_run_config
from megazpp.run.checks import RunPlan, plan_run
from megazpp.topology.cluster import Cluster

ROOT = Path(__file__).resolve().parents[2]
SMALL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 8 --seq-length 64 --max-position-embeddings 64 "
    "--micro-batch-size 2 --train-iters 10 --lr 1e-3 --mock-data"
)
PARSERS: list[FlagParser] = []  # the parser that all calls of `parse` share; empty before the first call


def shared_parser(*args: Any, **kwargs: Any) -> FlagParser:
    """Return a parser for all flags. Only the first call makes one, which takes longer than parsing a command line."""
    if not PARSERS:
        PARSERS.append(FlagParser(*args, **kwargs))
    return PARSERS[0]


def parse(text: str) -> ParsedRun:
    with mock.patch("megazpp.run.arguments.FlagParser", shared_parser):
        return parse_run_config(shlex.split(text), ROOT, features=FEATURES)


def check(text: str, *, nodes: int = 1, ranks_per_node: int = 1, device: str = "cpu") -> RunPlan:
    """Return the plan of a run with the flags SMALL and those in `text`; a ValueError rejects the flags."""
    cluster = Cluster(num_nodes=nodes, ranks_per_node=ranks_per_node)
    return plan_run(parse(f"{SMALL} {text}").config, cluster, device_type=device)
