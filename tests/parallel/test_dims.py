"""Groups number their ranks as the axes do, whatever the order of the ranks, and training does not see that order."""

from __future__ import annotations

import dataclasses
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import ranks
from helpers.torch_versions import needs_any_order
from helpers.training import Case, train_on_ranks

from megazpp.parallel.dims import ParallelConfig, ParallelDims, plan_dims
from megazpp.topology.cluster import Cluster
from megazpp.zero.config import ZeroConfig

CYCLIC, SHUFFLED = (0, 2, 1, 3), (3, 1, 0, 2)
AXES = ("tp", "shard", "replicate", "local", "cross")


def places(config: ParallelConfig, cluster: Cluster) -> dict[str, Any]:
    """What this rank's groups say, beside what the layout says."""
    dims = ParallelDims(plan_dims(config, cluster, zero_stage=3), device_type="cpu")
    rank = dist.get_rank()
    found: dict[str, Any] = {"data": (dims.data_rank, dims.tp.rank), "coordinate": tuple(dims.mesh.get_coordinate())}
    found["expected coordinate"] = tuple(getattr(dims, name).rank for name in dims.mesh.mesh_dim_names)
    assert [name for name in ("replicate", "shard", "tp") if getattr(dims, name).size > 1 or name == "shard"] == list(
        dims.mesh.mesh_dim_names
    )
    for name in AXES:
        axis = getattr(dims, name)
        assert axis.ranks == dims.layout.axis_ranks(name, rank)
        if axis.group is not None:
            assert tuple(dist.get_process_group_ranks(axis.group)) == axis.ranks
            assert axis.group.rank() == axis.rank
        gathered = axis.all_gather(torch.tensor([rank]))
        assert tuple(gathered.tolist()) == axis.ranks
    return found


@pytest.mark.parametrize("order", [None, *(pytest.param(order, marks=needs_any_order) for order in (CYCLIC, SHUFFLED))])
@pytest.mark.parametrize(("tp", "replicas"), [(1, 1), (1, 2), (2, 1), (2, 2)])
def test_every_group_numbers_its_ranks_as_its_axis_does(order: tuple[int, ...] | None, tp: int, replicas: int):
    config = ParallelConfig(tensor_model_parallel_size=tp, num_distributed_optimizer_instances=replicas)
    found = ranks(4).run(places, config, Cluster(num_nodes=2, ranks_per_node=2, order=order))
    assert sorted(place["data"] for place in found) == [(data, t) for data in range(4 // tp) for t in range(tp)]
    assert all(place["coordinate"] == place["expected coordinate"] for place in found)


@needs_any_order
@pytest.mark.parametrize(
    ("case", "order"),
    [
        (Case(steps=3, nodes=2), CYCLIC),
        (Case(steps=3, nodes=2, tp=2), SHUFFLED),
        (Case(steps=3, nodes=2, replicas=2), SHUFFLED),
        (Case(steps=3, nodes=2, micro_batches=2, zero=ZeroConfig(zeropp=True)), CYCLIC),
    ],
    ids=["zero3", "tp2", "hsdp", "zeropp"],
)
def test_training_under_any_order_gives_the_losses_of_block_order(case: Case, order: tuple[int, ...]):
    expected = ranks(4).run(train_on_ranks, case)
    found = ranks(4).run(train_on_ranks, dataclasses.replace(case, order=order))
    assert found[0]["loss"] == expected[0]["loss"]  # bitwise: sums run over the same shards in the same order
    assert found[0]["grad_norm"] == pytest.approx(expected[0]["grad_norm"], rel=1e-6)
    for wire in ("tp", "local", "cross"):
        assert sum(r["sent"][wire] for r in found) == sum(r["sent"][wire] for r in expected)


def test_hsdp_makes_one_copy_per_domain():
    racks = Cluster(num_nodes=4, ranks_per_node=2, domain_size=4)
    layout = plan_dims(ParallelConfig(hsdp=True), racks, zero_stage=3)
    assert (layout.replicate, layout.cross, layout.local) == (2, 1, 4)
    with pytest.raises(ValueError, match=r"--hsdp .* --tensor-model-parallel-size 8 spreads"):
        plan_dims(ParallelConfig(hsdp=True, tensor_model_parallel_size=8), racks, zero_stage=3)


def test_an_order_that_torch_cannot_make_groups_for_is_refused_and_an_ascending_one_is_not(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(dist, "new_group", lambda ranks=None, group_desc=None: None)
    with pytest.raises(ValueError, match="cannot make process groups"):
        plan_dims(ParallelConfig(), Cluster(num_nodes=2, ranks_per_node=2, order=CYCLIC), zero_stage=3)
    plan_dims(ParallelConfig(), Cluster(num_nodes=2, ranks_per_node=2, order=(0, 1, 2, 3)), zero_stage=3)
    whole_nodes = ParallelConfig(tensor_model_parallel_size=2)  # tp {0 2} {1 3}, shard {0 1} {2 3}
    plan_dims(whole_nodes, Cluster(num_nodes=2, ranks_per_node=2, order=CYCLIC), zero_stage=3)


@pytest.mark.parametrize(("tp", "stage"), [(0, 0), (-2, 3)])
def test_a_degree_that_is_not_positive_names_its_flag_at_every_stage(tp: int, stage: int):
    cluster = Cluster(num_nodes=1, ranks_per_node=4)
    with pytest.raises(ValueError, match=f"--tensor-model-parallel-size {tp}"):
        plan_dims(ParallelConfig(tensor_model_parallel_size=tp), cluster, zero_stage=stage)


def timeouts(minutes: int) -> list[timedelta]:
    layout = plan_dims(ParallelConfig(), Cluster(num_nodes=2, ranks_per_node=2), zero_stage=3)
    dims = ParallelDims(layout, device_type="cpu", timeout=timedelta(minutes=minutes))
    groups = [axis.group for axis in (dims.shard, dims.local, dims.cross)]
    return [group._get_backend(torch.device("cpu")).options._timeout for group in groups if group is not None]


def test_the_timeout_reaches_every_group():
    for found in ranks(4).run(timeouts, 7):
        assert found == [timedelta(minutes=7)] * 3
