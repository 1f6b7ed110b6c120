"""Test the process groups of mesh axes: a group has the rank order of its axis, and any order trains alike."""

import dataclasses
import functools
import itertools
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import ranks
from helpers.tiers import slow
from helpers.torch_versions import needs_any_order
from helpers.training import Case, train_on_ranks

from megazpp.parallel.agreement import raise_on_all_ranks
from megazpp.parallel.config import ParallelConfig
from megazpp.parallel.dims import ParallelDims, can_order_groups, make_group, open_axis, plan_dims
from megazpp.topology.cluster import Cluster
from megazpp.zero.config import ZeroConfig

CYCLIC, SHUFFLED = (0, 2, 1, 3), (3, 1, 0, 2)


def fail_on_one_host() -> None:
    """Check that an error of one of two hosts names this host on all ranks, and an error of both hosts names none."""
    rank = dist.get_rank()
    cluster = Cluster(num_nodes=2, ranks_per_node=1)
    axis = open_axis(ParallelDims(plan_dims(ParallelConfig(), cluster, zero_stage=3), device_type="cpu"))

    def fail(kind: type[Exception], *, everywhere: bool) -> None:
        if rank == 1 or everywhere:
            raise kind("--save s cannot be written to")

    with mock.patch("socket.gethostname", return_value="ab"[rank]):
        for kind in (ValueError, OSError):
            for everywhere, end in ((False, r" \(on b\)$"), (True, "$")):
                with pytest.raises(ValueError, match=f"^--save s cannot be written to{end}"):
                    raise_on_all_ranks(axis, functools.partial(fail, kind, everywhere=everywhere))


def test_error_of_one_host_names_this_host_on_all_ranks():
    ranks(2).run(fail_on_one_host)


def check_groups(grid: list[tuple[tuple[int, ...] | None, int, int]]) -> list[tuple[int, int]]:
    """Check the order of the ranks in all axes and groups of this rank, for each layout of `grid`.

    Args:
        grid: (order of the ranks, tensor-parallel size, replicas) of each layout.

    Returns:
        (data-parallel rank, tensor-parallel rank) of this rank in each layout.
    """
    rank, places = dist.get_rank(), []
    for order, tp, replicas in grid:
        config = ParallelConfig(tensor_model_parallel_size=tp, num_distributed_optimizer_instances=replicas)
        cluster = Cluster(num_nodes=2, ranks_per_node=2, order=order)
        dims = ParallelDims(plan_dims(config, cluster, zero_stage=3), device_type="cpu")
        sizes = {"replicate": replicas, "shard": 4 // tp // replicas, "tp": tp}
        names = tuple(name for name, size in sizes.items() if size > 1 or name == "shard")
        assert dims.mesh.mesh_dim_names == names
        assert list(dims.mesh.get_coordinate()) == [getattr(dims, name).rank for name in names], (order, tp, replicas)
        for axis in (dims.tp, dims.shard, dims.replicate, dims.local, dims.cross):
            gathered = tuple(axis.all_gather(torch.tensor([rank])).tolist())
            expected = dims.layout.axis_ranks(axis.name, rank)
            assert axis.ranks == gathered == expected, (order, tp, replicas, axis.name, axis.ranks, gathered, expected)
            if axis.group is not None:
                assert dist.get_process_group_ranks(axis.group) == list(axis.ranks), (order, tp, replicas, axis.name)
                assert axis.group.rank() == axis.rank, (order, tp, replicas, axis.name)
        places.append((dims.data_rank, dims.tp.rank))
    return places


def test_every_group_numbers_its_ranks_as_its_axis_does():
    orders = (None, CYCLIC, SHUFFLED) if can_order_groups() else (None,)
    grid = list(itertools.product(orders, (1, 2), (1, 2)))
    for (_, tp, _), places in zip(grid, zip(*ranks(4).run(check_groups, grid), strict=True), strict=True):
        assert sorted(places) == list(itertools.product(range(4 // tp), range(tp)))


@needs_any_order
@pytest.mark.parametrize(("order", "case"), [
    slow(SHUFFLED, Case(steps=2, nodes=2, tp=2)),
    slow(CYCLIC, Case(steps=2, nodes=2, micro_batches=2, zero=ZeroConfig(zeropp=True))),
])  # fmt: skip
def test_training_with_any_rank_order_matches_block_order(order, case):
    expected = ranks(4).run(train_on_ranks, case)
    found = ranks(4).run(train_on_ranks, dataclasses.replace(case, order=order))
    # bit-identical, because sums run over the same shards in the same order
    assert found[0]["loss"] == expected[0]["loss"]
    assert found[0]["grad_norm"] == pytest.approx(expected[0]["grad_norm"], rel=1e-6)
    for wire in ("tp", "local", "cross"):
        assert sum(r["sent"][wire] for r in found) == sum(r["sent"][wire] for r in expected)


def test_hsdp_makes_one_copy_per_fast_domain():
    """Here a fast domain is a rack of two nodes. A copy of the model is sharded over the four ranks of a rack."""
    racks = Cluster(num_nodes=4, ranks_per_node=2, domain_size=4)
    layout = plan_dims(ParallelConfig(hsdp=True), racks, zero_stage=3)
    assert (layout.replicate, layout.cross, layout.local) == (2, 1, 4)
    with pytest.raises(ValueError, match=r"--hsdp .* --tensor-model-parallel-size 8 spreads"):
        plan_dims(ParallelConfig(hsdp=True, tensor_model_parallel_size=8), racks, zero_stage=3)


def test_only_rank_orders_that_torch_cannot_group_are_rejected(monkeypatch):
    monkeypatch.setattr(dist, "new_group", lambda ranks=None, group_desc=None: None)
    cyclic = Cluster(num_nodes=2, ranks_per_node=2, order=CYCLIC)
    with pytest.raises(ValueError, match="cannot create process groups"):
        plan_dims(ParallelConfig(), cyclic, zero_stage=3)
    plan_dims(ParallelConfig(), dataclasses.replace(cyclic, order=(0, 1, 2, 3)), zero_stage=3)
    # The tp groups {0 2} and {1 3} and the shard groups {0 1} and {2 3} are sorted, so torch can make them
    plan_dims(ParallelConfig(tensor_model_parallel_size=2), cyclic, zero_stage=3)


def timeouts() -> list[timedelta]:
    layout = plan_dims(ParallelConfig(), Cluster(num_nodes=2, ranks_per_node=2), zero_stage=3)
    dims = ParallelDims(layout, device_type="cpu")
    axes = dims.shard, dims.local, dims.cross, dims.twin("shard", "further"), dims.node, open_axis(dims)
    groups = [axis.group for axis in axes]
    return [group._get_backend(torch.device("cpu")).options._timeout for group in groups if group is not None]


def test_timeout_of_the_first_group_reaches_all_later_ones():
    assert ranks(4).run(timeouts) == [[timedelta(seconds=180)] * 6] * 4  # the timeout of the test workers


def groups_made(zero: ZeroConfig) -> list[str]:
    """Train a step on two emulated nodes, and return the sorted names of the axes that got process groups."""
    with mock.patch("megazpp.parallel.dims.make_group", wraps=make_group) as made:
        train_on_ranks(Case(nodes=2, zero=zero, steps=1))
    return sorted(call.args[1] for call in made.call_args_list)


@pytest.mark.parametrize(("zero", "made"), [
    (ZeroConfig(), ["shard"]),
    (ZeroConfig(zero_quantized_gradients=True), ["cross", "local", "shard"]),
])  # fmt: skip
def test_hop_groups_are_made_only_if_weights_or_gradients_use_them(zero, made):
    assert ranks(4).run(groups_made, zero) == [made] * 4


def takes_the_group_of_all_ranks(tp: int) -> bool:
    config = ParallelConfig(tensor_model_parallel_size=tp)
    layout = plan_dims(config, Cluster(num_nodes=1, ranks_per_node=4), zero_stage=3)
    with mock.patch("megazpp.parallel.dims.axis_options", return_value=None if tp > 1 else object()):
        return ParallelDims(layout, device_type="cpu").shard.group is dist.group.WORLD


@pytest.mark.parametrize("tp", [1, 2])
def test_shard_axis_over_all_ranks_reuses_the_default_group(tp):
    assert ranks(4).run(takes_the_group_of_all_ranks, tp) == [tp == 1] * 4
