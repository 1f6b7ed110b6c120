"""Bandwidths of parts: one direction, the slowest part counts, and what is not known has no figure."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megazpp.topology.hosts import SWITCH, Gpu, HostInfo, Nic, cluster_from_hosts
from megazpp.topology.links import Link, Links
from megazpp.topology.parts import known_links


def gpu(name: str, peers: tuple[str, ...] = (SWITCH,), pcie: tuple[int, int] = (5, 16), index: int = 0) -> Gpu:
    return Gpu(f"uuid{index}", name, f"0000:{index:02x}:00.0", "", peers, 0, *pcie)


def host(name: str, device: Gpu | None = None, rate: float = 0.0) -> HostInfo:
    nics = (Nic("mlx5_0", "0000:5e:00.0", 0, rate),) if rate else ()
    return HostInfo(host=name, boot_id=name, gpu=device, nics=nics)


def links(*infos: HostInfo) -> Links | None:
    return known_links(infos, cluster_from_hosts(infos))


@pytest.mark.parametrize(
    ("name", "gigabytes_per_second"),
    [
        ("NVIDIA GB300", 900),
        ("NVIDIA B200", 900),
        ("NVIDIA H200", 450),
        ("NVIDIA H200 NVL", 450),
        ("NVIDIA H100 80GB HBM3", 450),
        ("NVIDIA H100 PCIe", 300),
        ("NVIDIA H100 NVL", 300),
        ("NVIDIA A100-SXM4-80GB", 300),
        ("NVIDIA A100 80GB PCIe", 300),
        ("NVIDIA A40", 56.25),
        ("Tesla V100-SXM2-32GB", 150),
    ],
)
def test_nvlink_by_the_name_that_the_driver_gives(name: str, gigabytes_per_second: float):
    known = links(host("a", gpu(name)), host("a", gpu(name, index=1)))
    assert known is not None
    assert known.domain == Link(gigabytes_per_second, source=f"data sheet of {name}")
    assert known.node is known.network is None


@pytest.mark.parametrize("name", ["NVIDIA A400", "NVIDIA H1000", "NVIDIA L40S", "NVIDIA A30X"])
def test_a_name_that_is_not_in_the_table_has_no_nvlink_figure(name: str):
    known = links(host("a", gpu(name)), host("a", gpu(name, index=1)))
    assert known is None


def test_without_nvlink_the_node_is_joined_by_pcie_of_the_slot():
    known = links(host("a", gpu("NVIDIA L40S", (), (4, 16))), host("a", gpu("NVIDIA L40S", (), (4, 8), 1)))
    assert known is not None
    assert known.domain is not None
    assert known.domain.gigabytes_per_second == pytest.approx(15.75, abs=0.01)  # the slot of 8 lanes
    assert known.domain.source == "PCIe 4.0 x8"


def test_between_pairs_there_is_pcie_and_between_nodes_what_the_adapters_say():
    peers = {0: 1, 1: 0, 2: 3, 3: 2}
    infos = [
        replace(host(name, gpu("NVIDIA A40", (f"0000:{peer:02x}:00.0",), (4, 16), index), rate=100), local_rank=index)
        for name in "ab"
        for index, peer in peers.items()
    ]
    known = links(*infos)
    assert known is not None
    assert known.domain is not None
    assert known.domain.gigabytes_per_second == 56.25
    assert known.node is not None
    assert known.node.gigabytes_per_second == pytest.approx(31.5, abs=0.01)
    assert known.network == Link(12.5, source="the adapters' rates, as the kernel gives them")


def test_cpus_and_silent_adapters_have_no_figures():
    assert links(host("a"), host("b")) is None
    assert links(host("a", rate=10), host("b")) is None


def test_the_log_line_says_where_figures_come_from():
    known = Links(Link(450.0, source="data sheet of X"), None, Link(12.5, 3.0))
    assert known.describe() == "links: domain 450 GB/s (data sheet of X); network 12.5 GB/s, 3 us (no source given)"
    assert Links().describe() == "links: none known"
