"""The timers: what they add up, and Megatron's lines."""

from __future__ import annotations

import time

import pytest
import torch
from helpers.context import context
from helpers.ranks import ranks
from helpers.training import Case, build_step

from megazpp.parallel.dims import ParallelConfig, ParallelDims, plan_dims
from megazpp.parallel.timeline import COMPUTE, Span
from megazpp.topology.cluster import Cluster
from megazpp.training.step_recorder import (
    MAIN_TIMERS,
    OTHER_TIMERS,
    StepRecorder,
    TimingConfig,
    describe_ranks,
    seconds_by_timer,
    timer_lines,
)
from megazpp.zero.config import ZeroConfig


def test_a_step_s_spans_add_up_and_collectives_at_the_same_time_count_once():
    spans = [
        Span("wait", "data", 0.0, 0.5, True),
        Span("wait", "cross", 0.5, 9.0, True),
        Span("compute", "forward", 1.0, 1.0, True),
        Span("compute", "backward", 2.0, 2.0, True),
        Span("compute", "forward", 4.0, 1.0, True),
        Span("compute", "norm", 5.0, 0.25, True),
        Span("compute", "optimizer", 5.5, 0.5, True),
        Span("cross", "all_gather layers.0", 1.0, 2.0),
        Span("local", "all_gather layers.0", 2.0, 2.0),
        Span("local", "all_to_all the rest", 4.0, 1.0),
        Span("shard", "reduce_scatter", 4.5, 1.0),
        Span("shard", "all_reduce", 5.0, 1.0),
        Span("tp", "all_gather", 0.0, 6.0),
    ]
    seconds = seconds_by_timer(spans)
    assert {name: value for name, value in seconds.items() if value} == {
        "forward-backward": 4.0,
        "forward-compute": 2.0,
        "backward-compute": 2.0,
        "batch-generator": 0.5,
        "params-all-gather": 3.0,
        "params-all-gather-local": 2.0,
        "params-all-gather-cross": 2.0,
        "grads-reduce-scatter": 1.5,
        "grads-reduce-scatter-local": 1.0,
        "grads-reduce-scatter-shard": 1.0,
        "optimizer": 0.75,
        "optimizer-clip-main-grad": 0.25,
        "optimizer-inner-step": 0.5,
    }
    assert set(seconds) == {*MAIN_TIMERS, *OTHER_TIMERS}


def test_the_lines_are_megatron_s_and_leave_out_what_nobody_used():
    names, by_rank = ("forward-backward", "optimizer", "batch-generator"), [[12.344, 0.0, 0.0], [15.0, 1.5, 0.0]]
    assert timer_lines(names, by_rank) == (
        "(min, max) time across ranks (ms):\n"
        "    forward-backward ...............................: (12.34, 15.00)\n"
        "    optimizer ......................................: (0.00, 1.50)"
    )
    assert timer_lines(names, [[0.0] * 3] * 2) is None


def train_with_timers(level: int) -> tuple[str | None, bool, str | None]:
    """Two steps of ZeRO++ on two nodes of two: a report, whether the timeline was listened to, a second report."""
    case = Case(steps=2, nodes=2, zero=ZeroConfig(zeropp=True))
    step, dims = build_step(case)
    recorder = StepRecorder(TimingConfig(timing_log_level=level), context(dims)[0], interval=1)
    size, listened = case.global_batch // dims.data_size, False
    for index in range(case.steps):
        with recorder.step(index + 1):
            listened = listened or bool(dims.timeline._listeners)
            step([case.batch(index, dims.data_rank * size, size)], learning_rate=1e-2, weight_decay=0.01)
    return recorder.report_timers(), listened, recorder.report_timers()


@pytest.mark.parametrize("level", [0, 1, 2])
def test_each_level_prints_its_timers_of_real_steps_the_same_on_all_ranks(level: int):
    results = ranks(4).run(train_with_timers, level)
    assert len(set(results)) == 1
    report, listened, again = results[0]
    assert again is None  # nothing since
    assert listened == (level > 0)
    if level == 0:
        assert report is None
        return
    lines = report.splitlines()[1:]
    printed = {line.split()[0]: eval(line.split(": ")[1]) for line in lines}
    two_hops = {
        f"{what}-{axis}" for what in ("params-all-gather", "grads-reduce-scatter") for axis in ("local", "cross")
    }
    wanted = {name for name in OTHER_TIMERS if "-shard" not in name and name != "batch-generator"}
    assert set(printed) == ({*MAIN_TIMERS} if level == 1 else {*MAIN_TIMERS, *wanted})
    assert two_hops <= wanted
    assert all(0 < least <= most for least, most in printed.values())


def steps(slow_rank: int, log: bool) -> list[str]:
    """Four steps in which every rank computes 0.05 s, the slow one 0.3 s, and then waits for the others."""
    dims = ParallelDims(
        plan_dims(ParallelConfig(), Cluster(num_nodes=1, ranks_per_node=4), zero_stage=3), device_type="cpu"
    )
    run, said = context(dims)
    recorder = StepRecorder(TimingConfig(log_straggler=log), run, interval=2)
    for iteration in range(1, 5):
        with recorder.step(iteration), dims.timeline.span(COMPUTE, "forward"):
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
    assert describe_ranks(10, [1.0, 1.1, 1.05]).endswith(
        "median 1.0500, fastest 1.0000 (rank 0), slowest 1.1000 (rank 1); no slow rank"
    )
    assert describe_ranks(10, [1.0] * 30 + [2.0] * 10).endswith("rank 37 2.00 x and 2 more")
