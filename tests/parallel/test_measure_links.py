"""Test link measurement.

The fit recovers latency and bandwidth, ranks agree on the results, and the counter of bytes ignores the measurement.
"""

import pytest
import torch
from helpers.ranks import ranks

from megazpp.parallel import measure_links as links_module
from megazpp.parallel.config import ParallelConfig
from megazpp.parallel.dims import ParallelDims, plan_dims
from megazpp.parallel.measure_links import fit_link, measure_device, measure_links
from megazpp.topology.cluster import Cluster, Device, Link, Links

CPU = torch.device("cpu")
NODES = Cluster(num_nodes=2, ranks_per_node=2, links=Links(*[Link(1.0, source="a file")] * 3))
PAIRS = Cluster(num_nodes=1, ranks_per_node=4, domain_size=2)


def test_fit_recovers_latency_and_bandwidth():
    for num_ranks in (2, 3, 8):
        small, large = ((size, (num_ranks - 1) * (20e-6 + size / 3e9)) for size in (4096, 1 << 20))
        assert fit_link(num_ranks, small, large) == Link(pytest.approx(3.0), pytest.approx(20.0))
    # noisy times: the large message takes less time than the small one, so a straight line through both points would
    # give a negative bandwidth
    noisy = fit_link(3, (0, 2e-3), (1 << 20, 1e-3))
    assert noisy == Link(pytest.approx(2 * (1 << 20) / 0.5e-3 / 1e9), pytest.approx(1000.0))
    assert fit_link(3, (4096, 1e-9), (1 << 20, 1e-3)).microseconds == 0.0, "not negative"


def make_dims(cluster: Cluster, tp: int = 1, cp: int = 1) -> ParallelDims:
    degrees = ParallelConfig(tensor_model_parallel_size=tp, context_parallel_size=cp)
    return ParallelDims(plan_dims(degrees, cluster, zero_stage=3), device_type="cpu")


def measure() -> tuple[Links, list[str], dict]:
    dims = make_dims(NODES, tp=2)
    links, lines = measure_links(dims, CPU)
    return links, [line.split()[1] for line in lines], dims.counter.table()


def test_links_of_all_axes_are_equal_on_all_ranks_and_not_counted():
    found = ranks(4).run(measure)
    assert found == [(found[0][0], ["tp", "cross"], {})] * 4


def time_all_gather(pauses: list[float]) -> float:
    """Return the seconds that `_time_all_gather` measures on a fake clock.

    On this clock, each all-gather takes the next of `pauses` in seconds on rank 0, and twice that on rank 1.
    """
    dims = make_dims(Cluster(num_nodes=1, ranks_per_node=2))
    now, left = [0.0], iter(pauses)

    def all_gather(mine, *, out):
        assert mine.numel() == 64
        now[0] += next(left) * (1 + dims.shard.rank)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(links_module.time, "perf_counter", lambda: now[0])
        patch.setattr(dims.shard, "all_gather", all_gather)
        seconds = links_module._time_all_gather(dims.shard, dims.world, 64, CPU)
    assert next(left, None) is None
    return seconds


def test_all_gather_time_is_the_slowest_ranks_median_after_a_warm_up():
    assert ranks(2).run(time_all_gather, [90.0, 1.0, 70.0, 3.0, 2.0, 4.0]) == [2 * 3.0] * 2


def check_figures() -> None:
    def times(axis, world, bytes_per_rank, device):
        bandwidth = {"tp": 4e9, "cp": 1.5e9, "local": 2e9, "cross": 0.5e9}[axis.name]
        return (axis.size - 1) * (1e-4 + bytes_per_rank / bandwidth)

    def link(bandwidth, axis):
        return Link(pytest.approx(bandwidth), pytest.approx(100.0), f"measured over {axis}")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(links_module, "_time_all_gather", times)
        links, lines = measure_links(make_dims(NODES, tp=2), CPU)
        # Both ranks of a node share its network link, so the link has twice the bandwidth that one rank measures
        assert links == Links(link(4.0, "tp"), NODES.links.node, link(2 * 0.5, "cross"))
        assert "(2 ranks, slowest link: network): 0.5 GB/s per rank, 100 us;" in lines[1]
        links, _ = measure_links(make_dims(PAIRS), CPU)
        assert links == Links(node=link(2.0, "local"))
        links, lines = measure_links(make_dims(PAIRS, cp=2), CPU)
        assert links.domain == link(1.5, "cp")
        assert [line.split()[1] for line in lines] == ["cp", "local"]
        links, _ = measure_links(make_dims(Cluster(num_nodes=1, ranks_per_node=4), cp=2), CPU)
        assert links == Links(link(1.5, "cp")), "the slower of two axes on one kind of link"


def test_measurement_replaces_only_the_axis_slowest_kind_of_link():
    """Measure links with fake times, and check which kind of link each axis replaces: the slowest one that it uses."""
    ranks(4).run(check_figures)


def measure_slow_copies(dtype: torch.dtype) -> tuple[Device, dict]:
    """Measure the device on a fake clock, on which each timed call lasts 0.5 s on rank 0 and 2 s on rank 3.

    Returns:
        (measured device, counted traffic).
    """
    dims, now = make_dims(NODES), [0.0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(links_module.PRODUCT_FLOPS, "cpu", 5e7)
        patch.setitem(links_module.COPIED_BYTES, "cpu", 1 << 20)
        patch.setattr(links_module, "DELTA_WEIGHTS", 1 << 16)
        patch.setattr(
            links_module.time, "perf_counter", lambda: now.append(now[-1] + 0.5 * (1 + dims.world.rank)) or now[-1]
        )
        device = measure_device(dims, CPU, dtype, tokens=128, hidden=64, lr=1e-4, name="CPU")
    return device, dims.counter.table()


@pytest.mark.slow
def test_device_has_the_speed_of_the_slowest_rank_and_is_equal_on_all_ranks():
    found = ranks(4).run(measure_slow_copies, torch.float32)
    assert found == [found[0]] * 4
    device, table = found[0]
    assert table == {}
    assert device.teraflops == pytest.approx(5e7 / 2.0 / 1e12, rel=0.02)  # 5e7 FLOPs in 2 s on rank 3
    assert device.gigabytes_per_second == pytest.approx(2 * (1 << 20) / 2.0 / 1e9, rel=0.02)
    assert device.calibration == "measured"
    assert device.source == "measured: [128, 64] x [64, 256] products in float32, copies"
    # fp32 weights have no lossless deltas, so no speed of encoding them was measured; `is_cpu` is True if it was
    assert not device.is_cpu
    (device, _), *_ = ranks(4).run(measure_slow_copies, torch.bfloat16)
    assert device.is_cpu
    rate = pytest.approx(2 * (1 << 16) / 2.0 / 1e9, rel=0.02)
    assert (device.encode_gigabytes_per_second, device.decode_gigabytes_per_second) == (rate, rate)


def large_sizes(gigabytes_per_second: float) -> list[int]:
    """Return the bytes per rank of the all-gathers that measure a link between two nodes.

    A fake clock gives the link the bandwidth `gigabytes_per_second`.
    """
    sizes = list[int]()

    def times(axis, world, bytes_per_rank, device):
        sizes.append(bytes_per_rank)
        return 1e-4 + bytes_per_rank / gigabytes_per_second / 1e9

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(links_module, "_time_all_gather", times)
        measure_links(make_dims(Cluster(num_nodes=2, ranks_per_node=1)), CPU)
    return sizes


def test_slow_links_are_measured_with_small_messages():
    for rate, large in ((1e-4, 128 << 10), (0.1, 3.7e6), (10.0, 8 << 20)):
        assert ranks(2).run(large_sizes, rate) == [[128 << 10, 256, pytest.approx(large, rel=0.02)]] * 2
