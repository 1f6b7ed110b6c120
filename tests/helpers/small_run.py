"""Parse and check the flags of a small training run, without starting it."""

import shlex
from pathlib import Path

from megazpp.features import FEATURES
from megazpp.run.arguments import ParsedRun, parse_run_config
from megazpp.run.checks import RunPlan, plan_run
from megazpp.topology.cluster import Cluster

ROOT = Path(__file__).resolve().parents[2]
SMALL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 8 --seq-length 64 --max-position-embeddings 64 "
    "--micro-batch-size 2 --train-iters 10 --lr 1e-3 --mock-data"
)


def parse(text: str) -> ParsedRun:
    return parse_run_config(shlex.split(text), ROOT, features=FEATURES)


def check(text: str, *, nodes: int = 1, ranks_per_node: int = 1, device: str = "cpu") -> RunPlan:
    """Return the plan of a run with the flags SMALL and those in `text`; a ValueError rejects the flags."""
    cluster = Cluster(num_nodes=nodes, ranks_per_node=ranks_per_node)
    return plan_run(parse(f"{SMALL} {text}").config, cluster, device_type=device)
