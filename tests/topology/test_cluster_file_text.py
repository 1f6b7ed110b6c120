"""What is written is read back as the same cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from megazpp.topology.cluster import Cluster, cluster_text, read_cluster
from megazpp.topology.cluster_file import NO_DEVICE
from megazpp.topology.device import Device
from megazpp.topology.links import Link, Links

DEVICE = Device("a GPU", 989.0, 80.0, 3350.0, "its maker")
LINKS = Links(domain=Link(450.0, 3.25, "measured over local"), network=Link(0.0125, None, "measured over cross"))
CLUSTERS = {
    "bare": Cluster(num_nodes=1, ranks_per_node=4),
    "ordered": Cluster(num_nodes=2, ranks_per_node=4, domain_size=2, order=(0, 2, 4, 6, 1, 3, 5, 7)),
    "measured": Cluster(num_nodes=2, ranks_per_node=4, links=LINKS),
    "known": Cluster(num_nodes=2, ranks_per_node=4, links=LINKS, device=DEVICE),
    "calibrated": Cluster(num_nodes=2, ranks_per_node=4, links=LINKS, device=DEVICE._replace(shares="h100")),
}


@pytest.mark.parametrize("cluster", CLUSTERS.values(), ids=CLUSTERS)
def test_a_cluster_is_read_back_as_it_was(cluster: Cluster, tmp_path: Path):
    path = tmp_path / "cluster.yaml"
    path.write_text(cluster_text(cluster))
    assert read_cluster(path) == cluster
    assert (NO_DEVICE in path.read_text()) == (cluster.device is None)


def test_a_latency_too_short_to_tell_is_left_out(tmp_path: Path):
    path = tmp_path / "cluster.yaml"
    links = Links(network=Link(1.0, 0.0, "measured over cross"))
    path.write_text(cluster_text(Cluster(num_nodes=2, ranks_per_node=1, links=links)))
    assert read_cluster(path).links == Links(network=Link(1.0, None, "measured over cross"))
