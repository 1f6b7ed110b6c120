"""The scaling study on small numbers: fixed work per GPU, and the table."""

from __future__ import annotations

from pathlib import Path

import pytest

from megazpp.arguments import parse_run_config
from megazpp.planner.scaling import Scaled, Scaling, scaling_table
from megazpp.topology.cluster import Cluster, Device, Link, Links

ROOT = Path(__file__).resolve().parents[2]
TINY = ["@configs/gpt_tiny.args", "--micro-batch-size", "4"]


def test_work_per_gpu_stays_and_the_ring_s_latency_grows():
    config = parse_run_config([*TINY, "--bf16"], ROOT).config
    links = Links(domain=Link(100.0), network=Link(10.0))
    cluster = Cluster(num_nodes=1, ranks_per_node=2, links=links, device=Device("a GPU", 10.0, 1.0, 100.0))
    found = list(Scaling(config, cluster, micro_batches=1, device_type="cpu").points([1, 2, 64]))
    speeds = {(point.gpus, point.scheme): point.teraflops for point in found}
    assert (2, "HSDP") not in speeds  # one node has no copies
    assert speeds[4, "ZeRO-3"] > speeds[128, "ZeRO-3"] > 0
    assert speeds[128, "--zeropp"] > speeds[128, "ZeRO-3"]


def tiny(gigabytes: float) -> Scaling:
    links = Links(domain=Link(100.0), network=Link(10.0, microseconds=1000.0))
    device = Device("a GPU", 10.0, gigabytes, 100.0)
    cluster = Cluster(num_nodes=1, ranks_per_node=2, links=links, device=device)
    config = parse_run_config([*TINY, "--bf16"], ROOT).config
    return Scaling(config, cluster, micro_batches=1, device_type="cpu")


def test_what_is_chosen_is_no_slower_than_any_scheme_and_may_be_several_copies():
    scaling = tiny(gigabytes=1.0)
    chosen, found = scaling.choice(64), scaling.points([64])
    assert chosen is not None
    assert chosen.fits
    assert chosen.teraflops >= max(point.teraflops for point in found if point.fits)
    assert chosen.scheme == "HSDP" or "copies" in chosen.scheme  # rings over 64 slow links take 63 ms each


def test_nothing_is_chosen_where_nothing_fits():
    assert tiny(gigabytes=0.001).choice(4) is None


def test_a_run_that_does_not_say_how_many_samples_a_rank_has_is_refused():
    config = parse_run_config(["@configs/gpt_tiny.args"], ROOT).config
    with pytest.raises(ValueError, match="--micro-batch-size is required"):
        Scaling(config, Cluster(num_nodes=1, ranks_per_node=2), micro_batches=1, device_type="cpu")


def test_choices_have_a_column_of_their_own():
    points = [Scaled(gpus, "ZeRO-3", 10.0, True, 10.0) for gpus in (8, 16)]
    table = scaling_table(points, [points[0]._replace(scheme="TP 2, HSDP", teraflops=12.0, least=11.0), None])
    last = [line.split(" | ")[-1] for line in table.splitlines()[2:]]
    assert last == ["11.0 to 12.0: TP 2, HSDP |", "nothing fits |"]


def test_the_table_brackets_what_does_not_fit_and_marks_the_fastest_that_does():
    found = [Scaled(8, "ZeRO-3", 10.0, True, 10.0), Scaled(8, "--zeropp", 20.0, False, 20.0)]
    assert scaling_table(found).splitlines() == [
        "| GPUs | ZeRO-3 | --zeropp |",
        "|---|---|---|",
        "| 8 | **10.0** | (20.0) |",
    ]
