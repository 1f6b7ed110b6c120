"""Test the shipped flag files: each parses, passes all checks, and describes the model that it names."""

import dataclasses
import re
from pathlib import Path
from typing import NamedTuple
from unittest.mock import Mock

import pytest
import torch

from megazpp.diloco.config import DilocoPlan
from megazpp.features import FEATURES
from megazpp.model.gpt import GPTModel
from megazpp.model.layer_parts import LayerSettings
from megazpp.parallel.axis import MeshAxis
from megazpp.planner.estimate import Estimator
from megazpp.planner.variants import for_planning
from megazpp.run.arguments import ParsedRun, parse_run_config
from megazpp.run.checks import plan_run
from megazpp.topology.cluster import Cluster
from megazpp.topology.cluster_file import read_cluster

ROOT = Path(__file__).parent.parent


class Expected(NamedTuple):
    """What a shipped flag file should describe.

    Attributes:
        params: published number of parameters of the model; for the toy models, the number that they have.
        tp: tensor-parallel size.
        nodes: number of nodes of a suitable cluster.
        ranks_per_node: GPUs per node of that cluster.
    """

    params: float
    tp: int
    nodes: int
    ranks_per_node: int = 8


EXPECTED = {
    "gpt_tiny": Expected(0.675e6, 1, 1, 4),
    "gpt_125m": Expected(125e6, 1, 1),
    "gpt_350m": Expected(350e6, 1, 2),
    "gpt_1b3": Expected(1.3e9, 1, 2),
    "gpt_6b7": Expected(6.7e9, 4, 4),
    "gpt_13b": Expected(13.0e9, 8, 8),
    "gpt_18b": Expected(18.4e9, 8, 16),
    "llama_1b": Expected(1.236e9, 1, 2),
    "llama_8b": Expected(8.03e9, 1, 8),
    "llama_8b_128k": Expected(8.03e9, 1, 16),
    "moe_tiny": Expected(0.92e6, 1, 1, 4),
    "mixtral_8x7b": Expected(46.7e9, 1, 8),
    "qwen3_30b_a3b": Expected(30.5e9, 1, 8),
}


def read(name: str, *more: str) -> ParsedRun:
    data = [] if name in ("gpt_tiny", "moe_tiny") else ["--mock-data"]
    return parse_run_config([f"@configs/{name}.args", *more, *data], ROOT, features=FEATURES)


def test_shipped_config_passes_every_check_with_and_without_local_steps():
    assert sorted(EXPECTED) == sorted(path.stem for path in (ROOT / "configs").glob("*.args"))
    for name, expected in EXPECTED.items():
        assert (ROOT / f"configs/{name}.args").read_text().startswith("# "), f"{name}: begin with a comment"
        parsed = read(name)
        cluster = Cluster(num_nodes=expected.nodes, ranks_per_node=expected.ranks_per_node)
        plan = plan_run(parsed.config, cluster, device_type="cpu")
        last = plan.schedule.learning_rate(plan.batches.total_samples)
        assert (parsed.notices, plan.notices, plan.layout.tp) == ((), (), expected.tp), name
        assert last == pytest.approx(parsed.config.schedule.min_lr), name

        one = ["--expert-model-parallel-size", "1"] if parsed.config.parallel.expert_model_parallel_size > 1 else []
        local_steps = for_planning(read(name, "@configs/common/local_steps.args", *one).config, "--plan")
        cluster = dataclasses.replace(cluster, num_nodes=max(expected.nodes, 2))
        plan = plan_run(local_steps, cluster, device_type="cuda")
        assert (plan.of(DilocoPlan).steps, plan.of(DilocoPlan).fragments) == (30, 2), name
        assert plan.layout.replica_group == plan.layout.cluster.num_nodes, name


def dry_build(name: str, tp: MeshAxis) -> int:
    """Return the number of parameters of a shipped flag file's model on one rank of `tp`, without allocating them."""
    config = read(name).config
    settings = LayerSettings(tp=tp, sequence_parallel=config.parallel.sequence_parallel)
    with torch.device("meta"):
        model = GPTModel(config.model, settings, vocab_size=config.tokenizer.vocab_size)
    return sum(parameter.numel() for parameter in model.parameters())


def test_config_has_the_published_size_and_tp_ranks_hold_their_share():
    for name, expected in EXPECTED.items():
        whole, size = dry_build(name, MeshAxis("tp")), expected.tp
        assert whole == pytest.approx(expected.params, rel=0.02), name
        if size > 1:
            share = dry_build(name, MeshAxis("tp", ranks=tuple(range(size)), group=Mock()))
            # the tp ranks' parameters sum to a little more, because norms, positions and some biases are replicated
            assert whole <= share * size < 1.02 * whole, name


MEMORY = re.compile(r"^# Memory: ([\d.]+) GB per GPU .*\n# python pretrain_gpt.py (.*)$", re.MULTILINE)


@pytest.mark.slow
def test_memory_in_a_configs_comment_equals_its_plan():
    for name in EXPECTED:
        ((gigabytes, flags),) = MEMORY.findall((ROOT / f"configs/{name}.args").read_text())
        assert flags.startswith(f"@configs/{name}.args --plan --cluster-file configs/clusters/")
        config = for_planning(parse_run_config(flags.split(), ROOT, features=FEATURES).config, "--plan")
        cluster = read_cluster(ROOT / config.cluster.cluster_file)
        planned = Estimator(cluster, device_type="cpu").estimate(config).gigabytes
        assert f"{planned:.{len(gigabytes.partition('.')[2])}f}" == gigabytes, name
