"""A slow rank is named, and those that wait for it are not."""

from __future__ import annotations

import time

import torch
from helpers.context import context
from helpers.ranks import ranks

from megazpp.parallel.dims import ParallelConfig, ParallelDims, plan_dims
from megazpp.parallel.timeline import COMPUTE
from megazpp.topology.cluster import Cluster
from megazpp.training.straggler import Straggler, StragglerConfig, describe


def steps(slow_rank: int, log: bool) -> list[str]:
    """Four steps in which every rank computes 0.05 s, the slow one 0.3 s, and then waits for the others."""
    dims = ParallelDims(
        plan_dims(ParallelConfig(), Cluster(num_nodes=1, ranks_per_node=4), zero_stage=3), device_type="cpu"
    )
    run, said = context(dims)
    straggler = Straggler(StragglerConfig(log_straggler=log), run, interval=2)
    for iteration in range(1, 5):
        with straggler.step(iteration), dims.timeline.span(COMPUTE, "forward"):
            time.sleep(0.3 if dims.world.rank == slow_rank else 0.05)
            dims.shard.all_reduce_(torch.ones(1))
    return said


def test_a_slow_rank_is_named_every_interval_and_those_that_wait_for_it_are_not():
    (said, *_) = ranks(4).run(steps, 2, True)
    assert [line.split(":")[0] for line in said] == ["compute seconds of iteration 2", "compute seconds of iteration 4"]
    for line in said:
        assert "(rank 2); slow: rank 2 " in line
        assert float(line.split("median ")[1].split(",")[0]) < 0.2  # the 0.25 s of waiting are not in it


def test_without_the_flag_nothing_is_measured():
    assert ranks(4).run(steps, 2, False) == [[]] * 4


def test_equal_ranks_are_not_called_slow_and_many_slow_ones_are_cut():
    assert describe(10, [1.0, 1.1, 1.05]).endswith(
        "median 1.0500, fastest 1.0000 (rank 0), slowest 1.1000 (rank 1); no slow rank"
    )
    assert describe(10, [1.0] * 30 + [2.0] * 10).endswith("rank 37 2.00 x and 2 more")
