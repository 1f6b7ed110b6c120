"""The axis: collectives, byte counts, and the identity on one rank."""

import threading

import torch
from helpers.ranks import ranks

from megazpp.parallel.axis import MeshAxis
from megazpp.parallel.dims import ParallelConfig, ParallelDims, plan_dims
from megazpp.topology.cluster import Cluster


def test_one_rank_is_the_identity_without_a_process_group():
    axis, x = MeshAxis("tp"), torch.arange(6.0)
    assert axis.all_reduce_(x) is x
    assert axis.all_gather(x) is x
    assert axis.reduce_scatter(x) is x
    assert axis.all_to_all(x) is x
    out = torch.full_like(x, float("nan"))
    assert torch.equal(axis.all_gather(x, out=out), x)
    assert axis.gather_objects("x") == ["x"]
    assert axis.counter.table() == {}


def run_collectives() -> dict[str, object]:
    layout = plan_dims(ParallelConfig(), Cluster(num_nodes=2, ranks_per_node=2), zero_stage=3)
    axis = ParallelDims(layout, device_type="cpu").shard
    mine = torch.full((3,), float(axis.rank))
    results = {
        "all_reduce": axis.all_reduce_(mine.clone()),
        "all_gather": axis.all_gather(mine),
        "reduce_scatter": axis.reduce_scatter(torch.arange(8.0)),
        "all_to_all": axis.all_to_all(10 * axis.rank + torch.arange(4.0)),
        "traffic": axis.counter.table(),
        "sums": (
            axis.counter.sent_bytes("cross"),
            axis.counter.sent_bytes("local"),
            axis.counter.sent_on_axis("shard"),
        ),
    }
    results["objects"] = axis.gather_objects({"rank": axis.rank})
    aliased = torch.full((4, 3), float("nan"))
    aliased[axis.rank] = mine
    axis.all_gather(aliased[axis.rank], out=aliased.view(-1))
    return {**results, "aliased": aliased}


def test_collectives_and_the_bytes_a_ring_sends():
    for rank, result in enumerate(ranks(4).run(run_collectives)):
        assert result["all_reduce"].tolist() == [6.0] * 3
        assert result["all_gather"].tolist() == [r for r in range(4) for _ in range(3)]
        assert result["reduce_scatter"].tolist() == [8.0 * rank, 4 * (2.0 * rank + 1)]
        assert result["all_to_all"].tolist() == [10 * sender + rank for sender in range(4)]
        assert result["objects"] == ([{"rank": r} for r in range(4)] if rank == 0 else [])
        assert result["aliased"].tolist() == [[r] * 3 for r in range(4)]
        # ranks 1 and 3 send to a rank of the other node; a ring moves 3/4 of the buffer, twice for all-reduce
        wire = "cross" if rank in (1, 3) else "local"
        assert result["traffic"] == {
            (wire, "shard", "all_reduce"): (1, 2 * 12 * 3 // 4),
            (wire, "shard", "all_gather"): (1, 48 * 3 // 4),
            (wire, "shard", "reduce_scatter"): (1, 32 * 3 // 4),
            (wire, "shard", "all_to_all"): (1, 16 * 3 // 4),
        }
        total = sum(sent for _, sent in result["traffic"].values())
        assert result["sums"] == ((total, 0, total) if wire == "cross" else (0, total, total))


def send_under_way() -> int:
    """Bytes counted of three collectives: one under way when counting is paused, one submitted then, one after."""
    cluster = Cluster(num_nodes=1, ranks_per_node=2)
    axis = ParallelDims(plan_dims(ParallelConfig(), cluster, zero_stage=3), device_type="cpu").shard
    paused = threading.Event()
    under_way = axis.queue.submit(lambda: (paused.wait(), axis.all_reduce_(torch.zeros(4))))
    with axis.counter.paused():
        paused.set()
        under_way.wait()
        axis.queue.submit(lambda: axis.all_reduce_(torch.zeros(400))).wait()
    axis.queue.submit(lambda: axis.all_reduce_(torch.zeros(8))).wait()
    return axis.counter.sent_bytes("local")


def test_a_pause_of_counting_is_of_what_is_submitted_in_it():
    assert ranks(2).run(send_under_way) == [16 + 32] * 2
