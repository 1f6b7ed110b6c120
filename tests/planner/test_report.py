"""`--plan`: the tables, the reasons and the verdicts, on clusters where they are plain."""

from __future__ import annotations

from pathlib import Path

import pytest

from megazpp.arguments import parse_run_config
from megazpp.planner.report import plan_report
from megazpp.topology.cluster import Cluster, read_cluster
from megazpp.topology.device import Device
from megazpp.topology.links import Link, Links

ROOT = Path(__file__).resolve().parents[2]
SLOW = Links(domain=Link(100.0), network=Link(0.1))
FAST = Links(domain=Link(100.0), network=Link(100000.0, microseconds=0.1))
SMALL = Device("a small GPU", teraflops=10.0, gigabytes=0.1, gigabytes_per_second=100.0)
TINY = Device("a tiny GPU", teraflops=10.0, gigabytes=0.001, gigabytes_per_second=100.0)


def report(*flags: str, links: Links | None = SLOW, device: Device | None = SMALL) -> str:
    config = parse_run_config(["@configs/gpt_tiny.args", "--bf16", *flags], ROOT).config
    cluster = Cluster(num_nodes=2, ranks_per_node=2, links=links, device=device)
    return plan_report(config, cluster, device_type="cpu")


def test_on_a_slow_network_zeropp_pays_and_everything_is_in_the_tables():
    text = report("--zeropp")
    assert "ZeRO++ pays:" in text
    for name in ("ZeRO-3", "HSDP", "qwZ", "hpZ", "qgZ", "--zeropp"):
        assert any(line.startswith(name + " ") for line in text.splitlines()), name
    for kind in ("parameters", "moments", "secondary partition", "error feedback", "activations", "  of them logits"):
        assert f"\n{kind} " in text, kind
    assert "best with these flags otherwise: tp" in text
    assert "slower than the best" in text


def test_on_a_fast_network_zeropp_does_not_pay_and_that_is_said():
    assert "ZeRO++ does not pay here" in report("--zeropp", links=FAST)


def test_what_does_not_fit_says_what_it_needs():
    text = report(device=TINY)
    assert "nothing that was tried fits" in text
    assert "GB, a rank has 0.0" in text


def test_without_links_and_device_there_are_bytes_and_memory_and_no_times():
    text = report("--zeropp", links=None, device=None)
    assert "no times: the cluster file names no links or no device" in text
    assert "a rank sends per optimizer step" in text


def test_a_plan_wants_to_know_the_vocabulary():
    config = parse_run_config(["@configs/gpt_125m.args", "--vocab-size", "none"], ROOT).config
    with pytest.raises(ValueError, match="--plan needs --vocab-size"):
        plan_report(config, Cluster(num_nodes=1, ranks_per_node=1), device_type="cpu")


@pytest.mark.parametrize("path", sorted((ROOT / "configs/clusters").glob("*.yaml")), ids=lambda p: p.stem)
def test_the_shipped_clusters_name_their_devices_with_sources(path: Path):
    cluster = read_cluster(path)
    assert cluster.device is not None
    assert cluster.device.source != str(path)
    assert cluster.links is not None
    assert cluster.links.network is not None
