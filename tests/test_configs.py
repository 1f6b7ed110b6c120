"""Every shipped flag file parses, passes all checks and describes the model it names."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple
from unittest.mock import Mock

import pytest
import torch

from megazpp.base.arguments import ParsedRun, parse_run_config
from megazpp.base.checks import check_run_config
from megazpp.model.gpt import GPTModel
from megazpp.parallel.axis import MeshAxis
from megazpp.planner.estimate import Estimator
from megazpp.planner.variants import for_planning
from megazpp.topology.cluster import Cluster
from megazpp.topology.cluster_file import read_cluster

ROOT = Path(__file__).parent.parent
CONFIGS = sorted(path.stem for path in (ROOT / "configs").glob("*.args"))


class Expected(NamedTuple):
    """`params` as published (ours for gpt_tiny); tensor-parallel size and the GPUs of a cluster it is meant for."""

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
}


def read(name: str, *more: str) -> ParsedRun:
    data = [] if name == "gpt_tiny" else ["--mock-data"]
    return parse_run_config([f"@configs/{name}.args", *more, *data], ROOT)


def test_local_steps_go_with_every_config_on_two_nodes() -> None:
    for name in CONFIGS:
        parsed = read(name, "@configs/common/local_steps.args")
        cluster = Cluster(num_nodes=max(EXPECTED[name].nodes, 2), ranks_per_node=EXPECTED[name].ranks_per_node)
        plan = check_run_config(for_planning(parsed.config, "--plan"), cluster, device_type="cuda")
        assert plan.islands is not None
        assert (plan.islands.steps, plan.islands.fragments, plan.layout.island) == (30, 2, cluster.num_nodes)


def test_the_list_above_is_the_folder_and_each_file_begins_by_saying_where_its_shape_comes_from() -> None:
    assert sorted(EXPECTED) == CONFIGS
    assert all((ROOT / "configs" / f"{name}.args").read_text(encoding="utf-8").startswith("# ") for name in CONFIGS)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_passes_every_check_on_a_cluster_it_is_meant_for(name: str) -> None:
    parsed, expected = read(name), EXPECTED[name]
    cluster = Cluster(num_nodes=expected.nodes, ranks_per_node=expected.ranks_per_node)
    plan = check_run_config(parsed.config, cluster, device_type="cpu")
    assert parsed.notices == plan.notices == ()
    assert plan.layout.tp == expected.tp
    assert plan.schedule.learning_rate(plan.batches.total_samples) == pytest.approx(parsed.config.schedule.min_lr)


def dry_build(name: str, tp: MeshAxis) -> int:
    """Parameters of the model that the config describes, on one rank of `tp`; nothing is allocated."""
    config = read(name).config
    assert config.tokenizer.vocab_size is not None
    with torch.device("meta"):
        model = GPTModel(
            config.model,
            vocab_size=config.tokenizer.vocab_size,
            tp=tp,
            sequence_parallel=config.parallel.sequence_parallel,
        )
    assert all(parameter.is_meta for parameter in model.parameters())
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_gives_a_model_of_the_published_size_and_a_tensor_parallel_rank_holds_its_share(name: str) -> None:
    whole, size = dry_build(name, MeshAxis("tp")), EXPECTED[name].tp
    assert whole == pytest.approx(EXPECTED[name].params, rel=0.02)
    if size > 1:
        share = dry_build(name, MeshAxis("tp", ranks=tuple(range(size)), group=Mock()))  # building does not communicate
        assert whole <= share * size < 1.02 * whole  # norms, positions and some biases are on every rank


MEMORY = re.compile(r"^# Memory: ([\d.]+) GB per GPU .*\n# python pretrain_gpt.py (.*)$", re.MULTILINE)


def planned_gigabytes(flags: str, digits: int = 1) -> str:
    """What --plan says of rank 0, with so many digits behind the point."""
    config = for_planning(parse_run_config(flags.split(), ROOT).config, "--plan")
    assert config.cluster.cluster_file is not None
    cluster = read_cluster(ROOT / config.cluster.cluster_file)
    return f"{Estimator(cluster, device_type='cpu').estimate(config).gigabytes:.{digits}f}"


@pytest.mark.parametrize("name", CONFIGS)
def test_the_memory_that_a_config_names_is_what_its_command_plans(name: str) -> None:
    found = MEMORY.findall((ROOT / "configs" / f"{name}.args").read_text(encoding="utf-8"))
    assert len(found) == 1
    gigabytes, flags = found[0]
    assert flags.startswith(f"@configs/{name}.args --plan --cluster-file configs/clusters/")
    assert planned_gigabytes(flags, digits=len(gigabytes.partition(".")[2])) == gigabytes
