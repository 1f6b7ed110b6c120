"""Test the creation and the options of NCCL's process groups, with a fake NCCL."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megazpp.parallel.config import NcclConfig
from megazpp.parallel.dims import LAUNCH_ORDER, axis_options, make_group, order_launches
from megazpp.parallel.environment import CONNECTIONS
from megazpp.topology.cluster import Cluster
from megazpp.topology.layout import Layout
from megazpp.topology.plan import plan_layout


def layout(nodes: int = 2, tp: int = 2, ranks: int = 4, num_replica_groups: int = 1) -> Layout:
    return plan_layout(
        Cluster(num_nodes=nodes, ranks_per_node=ranks), tp=tp, replicas=1, num_replica_groups=num_replica_groups
    )


FLAGS = NcclConfig(nccl_high_priority=False, nccl_cross_max_ctas=8)
PRIORITIES = [  # axis, number of nodes, flags, True if the group gets high priority, other options of the group
    ("tp", 2, NcclConfig(), True, {}),
    ("local", 2, NcclConfig(), True, {}),
    ("cross", 2, NcclConfig(), False, {}),
    # the ring of plain ZeRO uses both NVLink and the network, so it gets no high priority
    ("shard", 2, NcclConfig(), False, {}),
    ("shard", 1, NcclConfig(), True, {}),
    ("cross", 2, FLAGS, False, {"max_ctas": 8}),
    ("tp", 2, FLAGS, False, {}),
]


@pytest.mark.parametrize("backend", ["nccl", "nccl2", "nccl-lazy"])  # "nccl2" and "nccl-lazy" are names of torch 2.15
def test_node_groups_have_high_priority_and_flags_reach_their_axes(backend, monkeypatch):
    def options(is_high_priority_stream=False):
        return SimpleNamespace(is_high_priority_stream=is_high_priority_stream, config=SimpleNamespace())

    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=options), raising=False)
    monkeypatch.setattr(dist, "get_backend", lambda: backend)
    for axis, nodes, config, first, own in PRIORITIES:
        made, another = (axis_options(axis, layout(nodes), config) for _ in range(2))
        assert (made.is_high_priority_stream, vars(made.config)) == (first, own), (axis, nodes, config)
        assert made is not another
    # an axis of one rank has no group, so it needs no options
    assert axis_options("tp", layout(tp=1), NcclConfig()) is None
    monkeypatch.setattr(dist, "get_backend", lambda: "gloo")
    assert axis_options("tp", layout(), NcclConfig()) is None


@pytest.mark.skipif(not dist.is_nccl_available(), reason="torch is built without NCCL")
def test_nccl_options_of_torch_accept_every_setting(monkeypatch):
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    assert axis_options("cross", layout(), FLAGS).config.max_ctas == 8
    assert axis_options("tp", layout(), NcclConfig()).is_high_priority_stream


def test_launch_order_is_enforced_if_several_axes_have_ranks():
    tp_alone = layout(1, 4)
    for on in (layout(), tp_alone, layout(1, 2), layout(2, 1, ranks=1, num_replica_groups=2)):
        order_launches(on, env := {})
        assert env == ({} if on is tp_alone else {LAUNCH_ORDER: "1"}), on
        order_launches(on, env := {LAUNCH_ORDER: "0"})
        assert env == {LAUNCH_ORDER: "0"}


def test_groups_are_refused_once_cuda_has_started_with_a_single_connection(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(ValueError, match="CUDA was initialized with CUDA_DEVICE_MAX_CONNECTIONS=1"):
        order_launches(layout(), {CONNECTIONS: "1"})


@pytest.mark.parametrize("backend", ["nccl", "nccl2", "nccl-lazy"])  # "nccl2" and "nccl-lazy" are names of torch 2.15
@pytest.mark.parametrize(("partition", "bound", "expected", "calls"), [
    ([(0, 2), (1, 3)], True, "split", [[[0, 2], [1, 3]]]),  # split_group makes all groups of an axis in one call
    ([(0, 1), (2, 3)], False, [2, 3], [[0, 1], [2, 3]]),
    # split_group would sort the ranks, so each group needs its own call
    ([(0, 1), (3, 2)], True, [3, 2], [[0, 1], [3, 2]]),
    ([(0,), (1,), (2,), (3,)], True, [2], [[2]]),
    ([(0, 1, 2, 3)], True, "world", []),
])  # fmt: skip
def test_nccl_groups_are_split_in_one_call_if_possible(partition, bound, expected, calls, backend, monkeypatch):
    """The test runs as rank 2 of 4.

    A group of one rank is a gloo group, so that NCCL makes no communicator for it. A group of all ranks is the default
    group.
    """
    called: list[Any] = []

    def split_group(*, split_ranks, timeout, pg_options, group_desc):
        called.append(split_ranks)
        return "split"

    def new_group(ranks, **options):
        called.append(ranks)
        assert options.get("use_local_synchronization", False) == (len(ranks) == 1)
        assert options["backend"] == ("gloo" if len(ranks) == 1 else None)
        assert options.get("sort_ranks", True) == all(list(part) == sorted(part) for part in partition)
        return ranks

    world = SimpleNamespace(bound_device_id="cuda:2" if bound else None, _device_types=[])
    for fake in (split_group, new_group):
        monkeypatch.setattr(dist, fake.__name__, fake)
    monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD=world))
    for name, answer in {"get_backend": backend, "get_rank": 2, "get_world_size": 4}.items():
        monkeypatch.setattr(dist, name, lambda answer=answer: answer)
    assert make_group(partition, "tp", "options" if calls else None) == (world if expected == "world" else expected)
    assert called == calls
