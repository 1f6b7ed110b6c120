"""Groups number their ranks as the axes do, whatever the order of the ranks, and training does not see that order."""

import dataclasses
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import ranks
from helpers.torch_versions import needs_any_order
from helpers.training import Case, train_on_ranks

from megazpp.parallel.axis import can_order_groups
from megazpp.parallel.dims import ParallelConfig, ParallelDims, plan_dims
from megazpp.topology.cluster import Cluster
from megazpp.zero.config import ZeroConfig

CYCLIC, SHUFFLED = (0, 2, 1, 3), (3, 1, 0, 2)
GRID = [(order, tp, replicas) for order in (None, CYCLIC, SHUFFLED) for tp in (1, 2) for replicas in (1, 2)]


def groups_of_every_layout(grid: list[tuple[tuple[int, ...] | None, int, int]]) -> list[dict[str, Any]]:
    """By layout, what this rank's groups say of it and what the layout says."""
    rank, found = dist.get_rank(), []
    for order, tp, replicas in grid:
        config = ParallelConfig(tensor_model_parallel_size=tp, num_distributed_optimizer_instances=replicas)
        cluster = Cluster(num_nodes=2, ranks_per_node=2, order=order)
        dims = ParallelDims(plan_dims(config, cluster, zero_stage=3), device_type="cpu")
        axes = [getattr(dims, name) for name in ("tp", "shard", "replicate", "local", "cross")]
        grouped = [axis for axis in axes if axis.group is not None]
        found.append({
            "place": (dims.data_rank, dims.tp.rank),
            "coordinate": list(dims.mesh.get_coordinate()),
            "coordinate by axes": [getattr(dims, name).rank for name in dims.mesh.mesh_dim_names],
            "mesh axes": dims.mesh.mesh_dim_names,
            "expected ranks": [dims.layout.axis_ranks(axis.name, rank) for axis in axes],
            "ranks": [axis.ranks for axis in axes],
            "gathered": [tuple(axis.all_gather(torch.tensor([rank])).tolist()) for axis in axes],
            "expected groups": [(axis.ranks, axis.rank) for axis in grouped],
            "groups": [(tuple(dist.get_process_group_ranks(axis.group)), axis.group.rank()) for axis in grouped],
        })  # fmt: skip
    return found


def test_every_group_numbers_its_ranks_as_its_axis_does():
    grid = [row for row in GRID if row[0] is None or can_order_groups()]
    for row, of_ranks in zip(grid, zip(*ranks(4).run(groups_of_every_layout, grid), strict=True), strict=True):
        _, tp, replicas = row
        assert sorted(found["place"] for found in of_ranks) == [(d, t) for d in range(4 // tp) for t in range(tp)], row
        sizes = {"replicate": replicas, "shard": 4 // tp // replicas, "tp": tp}
        mesh_axes = tuple(name for name, size in sizes.items() if size > 1 or name == "shard")
        for found in of_ranks:
            assert found["mesh axes"] == mesh_axes, row
            assert found["coordinate"] == found["coordinate by axes"], row
            assert found["ranks"] == found["gathered"] == found["expected ranks"], row
            assert found["groups"] == found["expected groups"], row


CASES = {
    "tp2": (Case(steps=2, nodes=2, tp=2), SHUFFLED),
    "hsdp": (Case(steps=2, nodes=2, replicas=2), SHUFFLED),
    "zeropp": (Case(steps=2, nodes=2, micro_batches=2, zero=ZeroConfig(zeropp=True)), CYCLIC),
}


@needs_any_order
@pytest.mark.parametrize(("case", "order"), [pytest.param(*CASES[name], id=name) for name in CASES])
def test_training_under_any_order_gives_the_losses_of_block_order(case, order):
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


def test_an_order_that_torch_cannot_make_groups_for_is_refused_and_an_ascending_one_is_not(monkeypatch):
    monkeypatch.setattr(dist, "new_group", lambda ranks=None, group_desc=None: None)
    with pytest.raises(ValueError, match="cannot make process groups"):
        plan_dims(ParallelConfig(), Cluster(num_nodes=2, ranks_per_node=2, order=CYCLIC), zero_stage=3)
    plan_dims(ParallelConfig(), Cluster(num_nodes=2, ranks_per_node=2, order=(0, 1, 2, 3)), zero_stage=3)
    whole_nodes = ParallelConfig(tensor_model_parallel_size=2)  # tp {0 2} {1 3}, shard {0 1} {2 3}
    plan_dims(whole_nodes, Cluster(num_nodes=2, ranks_per_node=2, order=CYCLIC), zero_stage=3)


def test_a_degree_that_is_not_positive_names_its_flag_at_every_stage():
    cluster = Cluster(num_nodes=1, ranks_per_node=4)
    for tp, stage in ((0, 0), (-2, 3)):
        with pytest.raises(ValueError, match=f"--tensor-model-parallel-size {tp}"):
            plan_dims(ParallelConfig(tensor_model_parallel_size=tp), cluster, zero_stage=stage)


def timeouts(minutes: int) -> list[timedelta]:
    layout = plan_dims(ParallelConfig(), Cluster(num_nodes=2, ranks_per_node=2), zero_stage=3)
    dims = ParallelDims(layout, device_type="cpu", timeout=timedelta(minutes=minutes))
    groups = [axis.group for axis in (dims.shard, dims.local, dims.cross, dims.twin("shard", "further"), dims.node)]
    return [group._get_backend(torch.device("cpu")).options._timeout for group in groups if group is not None]


def test_the_timeout_reaches_every_group_and_those_that_are_made_later():
    assert ranks(4).run(timeouts, 7) == [[timedelta(minutes=7)] * 5] * 4
