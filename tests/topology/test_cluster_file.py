"""A cluster file is read as its docstring says and written to read the same; mistakes name file, key and value."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from megazpp.topology import cluster_file
from megazpp.topology.cluster import Cluster, Device, Link, Links
from megazpp.topology.cluster_file import NO_DEVICE, cluster_text, read_cluster


def write(folder: Path, text: str) -> Path:
    path = folder / "cluster.yaml"
    path.write_text(text)
    return path


def test_the_docstring_example(tmp_path: Path):
    assert cluster_file.__doc__ is not None
    path = write(tmp_path, textwrap.dedent(cluster_file.__doc__.partition("\n")[2]))
    assert read_cluster(path) == Cluster(
        num_nodes=2,
        ranks_per_node=4,
        domain_size=2,
        order=(0, 2, 4, 6, 1, 3, 5, 7),
        links=Links(
            domain=Link(56.25, None, "GA102 whitepaper"),
            node=Link(31.5, None, str(path)),
            network=Link(12.5, 5.0, str(path)),
        ),
        device=Device("H100", 989.0, 80.0, 3350.0, "NVIDIA H100 Tensor Core GPU data sheet", "h100", 2.5),
    )


def test_only_nodes_and_ranks_per_node_are_needed(tmp_path: Path):
    path = write(tmp_path, "nodes: 3\nranks_per_node: 1\n")
    assert read_cluster(path) == Cluster(num_nodes=3, ranks_per_node=1)


@pytest.mark.parametrize(
    ("order", "ranks"),
    [("block", None), ("cyclic", (0, 2, 4, 1, 3, 5)), ("[[5, 4, 0], [1, 2, 3]]", (5, 4, 0, 1, 2, 3))],
)
def test_rank_orders(tmp_path: Path, order: str, ranks: tuple[int, ...] | None):
    path = write(tmp_path, f"nodes: 2\nranks_per_node: 3\nrank_order: {order}\n")
    assert read_cluster(path).order == ranks


DEVICE_LINE = "device: {{name: X, teraflops: 1, gigabytes: 2{}}}"
MISTAKES = [
    ("ranks_per_node: 2", "key nodes is missing"),
    ("nodes: 2", "key ranks_per_node is missing"),
    ("nodes: 0\nranks_per_node: 2", "nodes 0 is not a positive whole number"),
    ("nodes: 1000000000000\nranks_per_node: 8\nrank_order: cyclic", "nodes 1000000000000 x .* at most 1048576"),
    (f"nodes: 0x{'f' * 5000}\nranks_per_node: 8", "an integer has more digits than are read"),
    ("nodes: true\nranks_per_node: 2", "nodes True is not"),
    ("nodes: 2\nranks_per_node: 2.5", "ranks_per_node 2.5 is not"),
    ("nodes: 2\nranks_per_node: two", "ranks_per_node 'two' is not"),
    ("nodes: 2\nnodes: 3\nranks_per_node: 2", "is not YAML: key nodes twice .* line 2"),
    ("- nodes\n- 2", "the file .'nodes', 2. is not"),
    ("", "the file None is not"),
    ("nodes: [", "is not YAML"),
    *(("nodes: 2\nranks_per_node: 2\n" + line, message) for line, message in [
        ("fast_domain: -1", "fast_domain -1 is not"),
        ("fast_domain:", "fast_domain None is not"),
        ("fast_domain: 3", "fast_domain 3: .* would fit"),
        ("rank_oder: block", "unknown key rank_oder .value 'block'.; known are nodes"),
        ("rank_order: random", "rank_order 'random' is not block, cyclic or"),
        ("rank_order: [0, 1, 2, 3]", "rank_order .0, 1, 2, 3. is not .* list .* each node"),
        ("rank_order: [[0, 1]]", "lists for 1 node.s., nodes is 2"),
        ("rank_order: [[0, 1, 2], [3]]", "node 0 is not a list of 2 ranks"),
        ("rank_order: [[0, x], [2, 3]]", "'x'. of node 0 is not a list of 2 ranks"),
        ("rank_order: [[0, 1], [2, 2]]", "rank_order .* rank 3 is not among"),
        ("links: fast", "links 'fast' is not a list of key: value"),
        ("links: {net: {}}", "links: unknown key net .*known are domain, node, network"),
        ("links: {node: {}}", "links.node .* needs one of gigabytes_per_second and"),
        ("links: {node: {gigabits_per_second: 8, gigabytes_per_second: 1}}", "links.node .* needs one of"),
        ("links: {network: {gigabits_per_second: -1}}", "links.network.gigabits_per_second -1 is not a positive"),
        ("links: {network: {gigabits_per_second: .nan}}", "links.network.gigabits_per_second nan is not"),
        ("links: {network: {gigabits_per_second: 1, microseconds: fast}}", "links.network.microseconds 'fast' is not"),
        ("links: {network: {gigabits_per_second: 1, source: 7}}", "links.network.source 7 is not text"),
        ("links: {network: {gigabits_per_second: 1, latency: 7}}", "links.network: unknown key latency .value 7."),
        (DEVICE_LINE.format(""), "key device.gigabytes_per_second is missing"),
        *((DEVICE_LINE.format(f", gigabytes_per_second: 3, shares: {shares}"), "device.shares .* not one of v100, a100")
          for shares in ("V100", "[v100]", "1")),
    ]),
]  # fmt: skip


@pytest.mark.parametrize(("text", "message"), MISTAKES)
def test_a_mistake_names_the_file_the_key_and_the_value(tmp_path: Path, text: str, message: str):
    path = write(tmp_path, text + "\n")
    with pytest.raises(ValueError, match=f"--cluster-file {path}:? .*{message}"):
        read_cluster(path)


def test_a_file_that_is_not_there_or_not_text_is_a_users_error(tmp_path: Path):
    with pytest.raises(ValueError, match=r"--cluster-file nowhere.yaml cannot be read: .*No such file"):
        read_cluster("nowhere.yaml")
    path = tmp_path / "cluster.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="cannot be read"):
        read_cluster(path)


DEVICE = Device("a GPU", 989.0, 80.0, 3350.0, "its maker")
LINKS = Links(domain=Link(450.0, 3.25, "measured over local"), network=Link(0.0125, None, "measured over cross"))
CLUSTERS = {
    "bare": Cluster(num_nodes=1, ranks_per_node=4),
    "ordered": Cluster(num_nodes=2, ranks_per_node=4, domain_size=2, order=(0, 2, 4, 6, 1, 3, 5, 7)),
    "measured": Cluster(num_nodes=2, ranks_per_node=4, links=LINKS),
    "known": Cluster(num_nodes=2, ranks_per_node=4, links=LINKS, device=DEVICE),
    "calibrated": Cluster(num_nodes=2, ranks_per_node=4, device=DEVICE._replace(shares="h100", price_per_hour=2.5)),
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
