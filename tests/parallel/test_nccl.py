"""What each axis asks of NCCL: without NCCL in the build the decisions and the way to them, with it torch's object."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from megazpp.parallel import environment
from megazpp.parallel.axis import make_group
from megazpp.parallel.environment import NcclConfig, axis_options, order_launches
from megazpp.topology.cluster import Cluster
from megazpp.topology.layout import Layout, plan_layout


def layout(nodes: int = 2, tp: int = 2) -> Layout:
    return plan_layout(Cluster(num_nodes=nodes, ranks_per_node=4), tp=tp, replicas=1)


@pytest.fixture
def recorded_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's options as a plain object, and a process group that says it is NCCL's."""

    def options(is_high_priority_stream: bool = False) -> Any:
        return SimpleNamespace(is_high_priority_stream=is_high_priority_stream, config=SimpleNamespace())

    monkeypatch.setattr(environment.dist, "ProcessGroupNCCL", SimpleNamespace(Options=options), raising=False)
    monkeypatch.setattr(environment.dist, "get_backend", lambda: "nccl")


def asked(axis: str, on: Layout, config: NcclConfig) -> tuple[bool, dict[str, int]]:
    """High priority, and what is set in NCCL's configuration of the group."""
    options = axis_options(axis, on, config)
    return options.is_high_priority_stream, vars(options.config)


@pytest.mark.usefixtures("recorded_options")
def test_tp_and_local_groups_go_first_and_nccl_decides_on_channels():
    found = {axis: asked(axis, layout(), NcclConfig()) for axis in ("tp", "local", "cross", "shard")}
    assert found["tp"] == found["local"] == (True, {})
    assert found["cross"] == (False, {})
    assert found["shard"] == (False, {})  # plain ZeRO's ring: needs NVLink's bandwidth and the network's


@pytest.mark.usefixtures("recorded_options")
def test_the_shard_axis_is_treated_like_the_local_axis_where_nothing_crosses_nodes():
    assert asked("shard", layout(nodes=1), NcclConfig()) == (True, {})


FLAGS = NcclConfig(nccl_high_priority=False, nccl_cross_max_ctas=8)


@pytest.mark.usefixtures("recorded_options")
def test_flags_reach_the_cross_group_and_priorities_can_be_turned_off():
    assert asked("cross", layout(), FLAGS) == (False, {"max_ctas": 8})
    assert asked("tp", layout(), FLAGS) == (False, {})


@pytest.mark.usefixtures("recorded_options")
def test_every_group_gets_options_of_its_own_and_an_axis_of_one_rank_none():
    one, other = (axis_options("tp", layout(), NcclConfig()) for _ in range(2))
    assert one is not other
    assert axis_options("tp", layout(tp=1), NcclConfig()) is None


def test_gloo_gets_no_options(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(environment.dist, "get_backend", lambda: "gloo")
    assert axis_options("tp", layout(), NcclConfig()) is None


@pytest.mark.skipif(not dist.is_nccl_available(), reason="torch is built without NCCL")
def test_torch_s_own_options_take_every_setting(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(environment.dist, "get_backend", lambda: "nccl")
    assert axis_options("cross", layout(), FLAGS).config.max_ctas == 8
    assert axis_options("tp", layout(), NcclConfig()).is_high_priority_stream


@pytest.mark.parametrize("value", [0, 65])
def test_values_that_nccl_refuses_are_refused_by_the_flag_s_name(value: int):
    with pytest.raises(ValueError, match=f"--nccl-cross-max-ctas {value} is not a number from 1 to 64"):
        NcclConfig(nccl_cross_max_ctas=value)


@pytest.mark.parametrize(
    ("nodes", "tp", "expected"),
    [(2, 2, {"NCCL_LAUNCH_ORDER_IMPLICIT": "1"}), (1, 4, {}), (1, 2, {"NCCL_LAUNCH_ORDER_IMPLICIT": "1"})],
)
def test_launches_keep_their_order_where_several_axes_have_ranks(nodes: int, tp: int, expected: dict[str, str]):
    env: dict[str, str] = {}
    order_launches(layout(nodes, tp), env)
    assert env == expected
    env = {"NCCL_LAUNCH_ORDER_IMPLICIT": "0"}
    order_launches(layout(nodes, tp), env)
    assert env == {"NCCL_LAUNCH_ORDER_IMPLICIT": "0"}


def test_hops_between_islands_of_one_rank_keep_their_order_too():
    env: dict[str, str] = {}
    order_launches(plan_layout(Cluster(num_nodes=2, ranks_per_node=1), tp=1, replicas=1, islands=2), env)
    assert env == {"NCCL_LAUNCH_ORDER_IMPLICIT": "1"}


class Calls(list[tuple[str, Any]]):
    """What would make groups, as it is called on rank 2 of 4."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, bound: bool) -> None:
        super().__init__()
        world = SimpleNamespace(bound_device_id="cuda:2" if bound else None)
        monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD=world))
        monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
        monkeypatch.setattr(dist, "get_rank", lambda: 2)
        monkeypatch.setattr(dist, "get_world_size", lambda: 4)
        monkeypatch.setattr(dist, "split_group", self.split)
        monkeypatch.setattr(dist, "new_group", self.new)
        self.world = world

    def split(self, *, split_ranks: list[list[int]], pg_options: Any, group_desc: str) -> str:
        self.append(("split", split_ranks))
        return "split"

    def new(self, ranks: list[int], **options: Any) -> str:
        self.append(("new", ranks))
        assert options.get("use_local_synchronization", False) == (len(ranks) == 1)
        assert options["backend"] == ("gloo" if len(ranks) == 1 else None)
        return f"group of {ranks}"


def test_bound_nccl_is_split_once_for_all_groups_of_an_axis(monkeypatch: pytest.MonkeyPatch):
    calls = Calls(monkeypatch, bound=True)
    assert make_group([(0, 2), (1, 3)], "tp", "options") == "split"
    assert calls == [("split", [[0, 2], [1, 3]])]


def test_without_a_device_or_in_another_order_groups_are_made_one_by_one(monkeypatch: pytest.MonkeyPatch):
    calls = Calls(monkeypatch, bound=False)
    assert make_group([(0, 1), (2, 3)], "tp", "options") == "group of [2, 3]"
    assert calls == [("new", [0, 1]), ("new", [2, 3])]
    calls = Calls(monkeypatch, bound=True)
    assert make_group([(0, 1), (3, 2)], "tp", "options") == "group of [3, 2]"  # split_group would sort them
    assert calls == [("new", [0, 1]), ("new", [3, 2])]


def test_all_ranks_have_their_group_already_and_one_rank_gets_no_communicator(monkeypatch: pytest.MonkeyPatch):
    calls = Calls(monkeypatch, bound=True)
    assert make_group([(0, 1, 2, 3)], "shard") is calls.world
    assert make_group([(0,), (1,), (2,), (3,)], "shard") == "group of [2]"
    assert calls == [("new", [2])]
