"""The fit finds the shares that made the samples, and what it cannot predict is left out."""

from __future__ import annotations

import functools
import math

import pytest
from benchmark_cluster_report import Sample
from compare_plan import (
    BYTE_SECONDS,
    DEVICE,
    INSIDE,
    MESSAGE_SECONDS,
    PROCESSORS,
    Cell,
    Measured,
    SharedProcessors,
    fit,
    medians,
    seconds,
)

from megazpp.topology.cluster import Cluster, Link, Links
from megazpp.topology.layout import plan_layout
from megazpp.topology.shares import Shares

SHAPE = {
    "nodes": 2,
    "ranks_per_node": 2,
    "hidden_size": 64,
    "num_layers": 2,
    "vocab_size": 128,
    "seq_length": 16,
    "micro_batch_size": 1,
}


def sample(variant: str, rate: str, took: float) -> Sample:
    return Sample(1, 1, rate, 0, variant, took, 2 * took, 0.0, [], [])


def test_cells_are_medians_of_what_can_be_predicted():
    samples = [sample("zero3", "1gbit", took) for took in (3.0, 1.0, 2.0)]
    left_out = [sample("fsdp2", "1gbit", 9.0), sample("zero3", "10gbit", 9.0), sample("zero3", "local", 9.0)]
    assert medians(samples + left_out) == {Cell(1, 1, "1gbit", "zero3"): Measured(2.0, 4.0)}


def test_the_fit_finds_the_shares_that_made_the_samples_and_overlap_is_never_slower():
    predict = functools.partial(seconds, shape=SHAPE)
    slow, fast = (Cell(1, 1, rate, "zero3") for rate in ("1mbit", "1gbit"))
    cpu_seconds = PROCESSORS * predict(fast, 0.2, math.inf)
    measured = {slow: Measured(predict(slow, 0.2, 0.6), 0.0), fast: Measured(0.0, cpu_seconds)}
    assert fit(slow, fast, measured, predict) == pytest.approx((0.2, 0.6), rel=0.01)
    for rate in ("1mbit", "100mbit", "1gbit"):
        plain, overlapped = (predict(Cell(1, 2, rate, v), 0.2, 0.6) for v in ("zeropp", "zeropp-overlap"))
        assert overlapped <= plain


def test_ranks_that_share_a_processor_send_in_turn_and_hide_only_waiting():
    layout = plan_layout(
        Cluster(num_nodes=2, ranks_per_node=4, device=DEVICE, links=Links(domain=INSIDE, network=Link(1.0, 1.0))),
        tp=1,
        replicas=1,
    )
    costs = SharedProcessors(layout, Shares())
    one = MESSAGE_SECONDS + 10**6 * BYTE_SECONDS
    assert costs.taken("cross", "all_gather", 10**6) == pytest.approx(8 / PROCESSORS * one)
    assert costs.collective("cross", "all_gather", 10**6) == pytest.approx(0.004, rel=0.01)  # four share 1 GB/s
    assert costs.collective("local", "all_gather", 10**6) == costs.taken("local", "all_gather", 10**6)
