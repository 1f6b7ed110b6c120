"""Measured links: the fit gives back what made the times, every rank gets the same, and no traffic is counted."""

from __future__ import annotations

import pytest
import torch
from helpers.ranks import ranks

from megazpp.parallel.dims import ParallelConfig, ParallelDims, plan_dims
from megazpp.parallel.links import AxisTime, fit_link, measure_links
from megazpp.topology.cluster import Cluster
from megazpp.topology.links import Link, Links


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
def test_the_fit_gives_back_latency_and_bandwidth(num_ranks: int):
    latency, bandwidth = 20e-6, 3e9

    def seconds(size: int) -> AxisTime:
        return AxisTime(size, (num_ranks - 1) * (latency + size / bandwidth))

    link = fit_link(num_ranks, seconds(4096), seconds(1 << 20))
    assert link is not None
    assert link.gigabytes_per_second == pytest.approx(3.0)
    assert link.microseconds == pytest.approx(20.0)


def test_a_large_message_that_was_not_slower_gives_no_figures_and_noise_no_negative_latency():
    assert fit_link(2, AxisTime(4096, 2e-3), AxisTime(1 << 20, 1e-3)) is None
    link = fit_link(2, AxisTime(4096, 1e-9), AxisTime(1 << 20, 1e-3))
    assert link is not None
    assert link.microseconds == 0.0


def measure(cluster: Cluster, tp: int) -> tuple[Links, list[str], dict[object, object]]:
    layout = plan_dims(ParallelConfig(tensor_model_parallel_size=tp), cluster, zero_stage=3)
    dims, lines = ParallelDims(layout, device_type="cpu"), list[str]()
    links = measure_links(dims, torch.device("cpu"), announce=lines.append)
    return links, lines, dict(dims.counter.table())


def test_every_axis_of_several_ranks_is_measured_alike_on_all_ranks_and_not_counted():
    told = Link(1.0, source="a file")
    cluster = Cluster(num_nodes=2, ranks_per_node=2, links=Links(node=told))
    found = ranks(4).run(measure, cluster, 2)
    links, lines, traffic = found[0]
    assert [links for links, _, _ in found] == [links] * 4
    assert links.node == told
    assert links.domain is not None
    assert links.network is not None
    assert links.domain.source == "measured over tp"
    assert links.network.source == "measured over cross"
    assert [line.split(":")[0] for line in lines] == [
        "measured tp (2 ranks, slowest link",
        "measured cross (2 ranks, slowest link",
    ]
    assert all("GB/s per rank" in line for line in lines)
    assert traffic == {}


def test_the_network_figure_is_a_node_s_and_so_the_sum_of_its_ranks():
    links, lines, _ = ranks(4).run(measure, Cluster(num_nodes=2, ranks_per_node=2), 1)[0]
    per_rank = float(next(line for line in lines if "cross" in line).split("): ")[1].split(" GB/s")[0].split()[-1])
    assert links.network is not None
    assert links.network.gigabytes_per_second == pytest.approx(2 * per_rank, rel=0.01)  # the line has three digits
