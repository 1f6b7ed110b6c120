"""Measured links: the fit gives back what made the times, every rank gets the same, and no traffic is counted."""

import pytest
import torch
from helpers.ranks import ranks

from megazpp.parallel import measure_links as links_module
from megazpp.parallel.axis import MeshAxis
from megazpp.parallel.dims import ParallelConfig, ParallelDims, plan_dims
from megazpp.parallel.measure_links import fit_link, measure_links
from megazpp.topology.cluster import Cluster, Link, Links


def test_the_fit_gives_back_latency_and_bandwidth():
    for num_ranks in (2, 3, 8):
        small, large = ((size, (num_ranks - 1) * (20e-6 + size / 3e9)) for size in (4096, 1 << 20))
        assert fit_link(num_ranks, small, large) == Link(pytest.approx(3.0), pytest.approx(20.0))
    assert fit_link(3, (4096, 2e-3), (1 << 20, 1e-3)) is None, "the large message was not slower"
    noisy = fit_link(3, (4096, 1e-9), (1 << 20, 1e-3))
    assert noisy is not None
    assert noisy.microseconds == 0.0, "not negative"


def measure(cluster: Cluster, tp: int, modelled: bool, cp: int = 1) -> tuple[Links, list[str], dict[object, object]]:
    """Times taken here, or those of wires whose figures are known."""
    degrees = ParallelConfig(tensor_model_parallel_size=tp, context_parallel_size=cp)
    layout = plan_dims(degrees, cluster, zero_stage=3)
    dims = ParallelDims(layout, device_type="cpu")
    with pytest.MonkeyPatch.context() as patch:
        if modelled:
            patch.setattr(links_module, "_time_all_gather", modelled_time)
        links, lines = measure_links(dims, torch.device("cpu"))
    return links, lines, dict(dims.counter.table())


def modelled_time(axis: MeshAxis, world: MeshAxis, bytes_per_rank: int, device: torch.device) -> float:
    bandwidth = {"tp": 4e9, "cp": 3e9, "local": 2e9, "cross": 0.5e9}[axis.name]
    return (axis.size - 1) * (1e-4 + bytes_per_rank / bandwidth)


def test_every_axis_of_several_ranks_is_timed_alike_on_all_ranks_and_not_counted():
    """What the figures are depends on the machine's other work, down to none at all."""
    found = ranks(4).run(measure, Cluster(num_nodes=2, ranks_per_node=2), 2, modelled=False)
    links, lines, traffic = found[0]
    assert [links for links, _, _ in found] == [links] * 4
    for axis, line in zip(("tp", "cross"), lines, strict=True):
        assert line.startswith(f"measured {axis} (2 ranks, slowest link: ")
        assert "GB/s per rank, " in line or "too noisy to tell" in line
    assert traffic == {}


def times(pauses: list[float]) -> tuple[float, list[int]]:
    """What this rank takes an all-gather to last whose calls last so, and the bytes of its calls."""
    cluster = Cluster(num_nodes=1, ranks_per_node=2)
    dims = ParallelDims(plan_dims(ParallelConfig(), cluster, zero_stage=3), device_type="cpu")
    now, left, calls = [0.0], iter([pause * (1 + dims.shard.rank) for pause in pauses]), list[int]()

    def all_gather(mine: torch.Tensor, *, out: torch.Tensor) -> None:
        calls.append(mine.numel())
        now[0] += next(left)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(links_module.time, "perf_counter", lambda: now[0])
        patch.setattr(dims.shard, "all_gather", all_gather)
        return links_module._time_all_gather(dims.shard, dims.world, 64, torch.device("cpu")), calls


def test_an_all_gather_lasts_the_slowest_rank_s_median_after_one_that_connects():
    assert ranks(2).run(times, [90.0, 1.0, 70.0, 3.0, 2.0, 4.0]) == [(2 * 3.0, [64] * 6)] * 2


def test_figures_go_to_the_kind_of_the_axis_s_slowest_link_and_leave_the_others():
    told = Link(1.0, source="a file")
    nodes = Cluster(num_nodes=2, ranks_per_node=2, links=Links(node=told, network=told))
    links, lines, _ = ranks(4).run(measure, nodes, 2, modelled=True)[0]
    assert links.domain == Link(pytest.approx(4.0), pytest.approx(100.0), "measured over tp")
    assert links.node == told
    of_a_node = 2 * 0.5  # of its two ranks
    assert links.network == Link(pytest.approx(of_a_node), pytest.approx(100.0), "measured over cross")
    assert "(2 ranks, slowest link: network): 0.5 GB/s per rank, 100 us;" in lines[1]
    pairs = Cluster(num_nodes=1, ranks_per_node=4, domain_size=2)
    links, _, _ = ranks(4).run(measure, pairs, 1, modelled=True)[0]
    assert links.domain is links.network is None
    assert links.node == Link(pytest.approx(2.0), pytest.approx(100.0), "measured over local")
    links, lines, _ = ranks(4).run(measure, pairs, 1, modelled=True, cp=2)[0]
    assert links.domain == Link(pytest.approx(3.0), pytest.approx(100.0), "measured over cp")
    assert [line.split()[1] for line in lines] == ["cp", "local"]
