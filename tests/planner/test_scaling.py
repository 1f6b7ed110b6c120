"""The scaling study on small numbers: fixed work per GPU, and the table."""

from __future__ import annotations

from pathlib import Path

from megazpp.arguments import parse_run_config
from megazpp.planner.scaling import Scaled, scale, scaling_table
from megazpp.topology.cluster import Cluster
from megazpp.topology.device import Device
from megazpp.topology.links import Link, Links

ROOT = Path(__file__).resolve().parents[2]


def test_work_per_gpu_stays_and_the_ring_s_latency_grows():
    config = parse_run_config(["@configs/gpt_tiny.args", "--bf16"], ROOT).config
    links = Links(domain=Link(100.0), network=Link(10.0))
    cluster = Cluster(num_nodes=1, ranks_per_node=2, links=links, device=Device("a GPU", 10.0, 1.0, 100.0))
    found = list(scale(config, cluster, [1, 2, 64], micro_batches=1, vocab_size=2048, device_type="cpu"))
    speeds = {(point.gpus, point.scheme): point.teraflops for point in found}
    assert (2, "HSDP") not in speeds  # one node has no copies
    assert speeds[4, "ZeRO-3"] > speeds[128, "ZeRO-3"] > 0
    assert speeds[128, "--zeropp"] > speeds[128, "ZeRO-3"]


def test_the_table_brackets_what_does_not_fit_and_marks_the_fastest_that_does():
    found = [Scaled(8, "ZeRO-3", 10.0, 5.0, True, 1.0), Scaled(8, "--zeropp", 20.0, 50.0, False, 1.0)]
    assert scaling_table(found).splitlines() == [
        "| GPUs | ZeRO-3 | --zeropp |",
        "|---|---|---|",
        "| 8 | **10.0** | (20.0) |",
    ]
