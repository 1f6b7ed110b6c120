"""A cluster comes from a file, an emulation or the launcher; files read as they were written, mistakes have names."""

import textwrap
from pathlib import Path

from helpers.refusals import not_refused, table

from megazpp.topology import cluster_file
from megazpp.topology.cluster import Cluster, Device, Link, Links
from megazpp.topology.cluster_file import NO_DEVICE, ClusterConfig, cluster_text, detect_cluster, read_cluster
from megazpp.topology.layout import plan_layout

SHIPPED = Path(__file__).parents[2] / "configs" / "clusters"
CYCLIC = (0, 2, 4, 6, 1, 3, 5, 7)


def write(folder: Path, text: str) -> Path:
    path = folder / "cluster.yaml"
    path.write_text(text)
    return path


# ---- which cluster it is ----------------------------------------------------------------------------------------


def test_the_cluster_comes_from_the_launcher_or_is_emulated():
    none, auto = ClusterConfig(), ClusterConfig(emulate_nodes="auto")
    assert detect_cluster(8, none, {}) == Cluster(num_nodes=1, ranks_per_node=8)
    assert detect_cluster(8, none, {"LOCAL_WORLD_SIZE": "4"}) == Cluster(num_nodes=2, ranks_per_node=4)
    assert detect_cluster(8, none, {"SLURM_NTASKS_PER_NODE": "2"}) == Cluster(num_nodes=4, ranks_per_node=2)
    emulated = detect_cluster(8, ClusterConfig(emulate_nodes=2), {"LOCAL_WORLD_SIZE": "8"})
    assert emulated == Cluster(num_nodes=2, ranks_per_node=4)
    several = detect_cluster(8, auto, {"LOCAL_WORLD_SIZE": "2"})
    assert (several, several.notices) == (Cluster(num_nodes=4, ranks_per_node=2), ())


def test_emulate_nodes_auto_makes_two_nodes_of_one_machine_where_they_fit_and_says_so():
    for world, tp, nodes in ((4, 1, 2), (4, 2, 2), (2, 1, 2), (1, 1, 1), (2, 2, 1), (3, 1, 1), (4, 4, 1)):
        cluster = detect_cluster(world, ClusterConfig(emulate_nodes="auto"), {}, tp=tp)
        assert cluster == Cluster(num_nodes=nodes, ranks_per_node=world // nodes), (world, tp)
        [notice] = cluster.notices
        assert notice.startswith(f"--emulate-nodes auto: {world} rank")
        assert ("treated as 2 nodes" in notice) == (nodes == 2)
        plan_layout(cluster, tp=tp, replicas=1)


def test_a_cluster_file_describes_the_job_whatever_the_launcher_and_the_tiny_config_say(tmp_path):
    path = str(write(tmp_path, "nodes: 2\nranks_per_node: 4\nfast_domain: 2\nrank_order: cyclic\n"))
    expected = Cluster(num_nodes=2, ranks_per_node=4, domain_size=2, order=CYCLIC)
    for emulated in (None, "auto"):
        for env in ({}, {"LOCAL_WORLD_SIZE": "8"}):
            assert detect_cluster(8, ClusterConfig(cluster_file=path, emulate_nodes=emulated), env) == expected


def test_a_cluster_that_is_not_the_job_s_is_refused(tmp_path):
    path = str(write(tmp_path, "nodes: 2\nranks_per_node: 4\n"))
    rows = [
        (
            4,
            {"cluster_file": path},
            {},
            f"--cluster-file {path}: nodes 2 x ranks_per_node 4 are 8 ranks, the job has 4",
        ),
        (8, {"cluster_file": path, "emulate_nodes": 2}, {}, f"--cluster-file {path} and --emulate-nodes 2"),
        (8, {"emulate_nodes": 3}, {}, "--emulate-nodes 3 does not divide the 8 ranks"),
        (8, {"emulate_nodes": 3}, {}, "1, 2, 4 or 8"),
        (8, {}, {"LOCAL_WORLD_SIZE": "3"}, "8 ranks do not divide into nodes of 3 (LOCAL_WORLD_SIZE)"),
        (8, {}, {"LOCAL_WORLD_SIZE": "3"}, "for instance 3 on each of 2 node(s)"),
    ]
    assert not not_refused(rows, lambda world, config, env: detect_cluster(world, ClusterConfig(**config), env))


# ---- files ------------------------------------------------------------------------------------------------------


def test_the_docstring_example(tmp_path):
    assert cluster_file.__doc__ is not None
    path = write(tmp_path, textwrap.dedent(cluster_file.__doc__.partition("\n")[2]))
    assert read_cluster(path) == Cluster(
        num_nodes=2,
        ranks_per_node=4,
        domain_size=2,
        order=CYCLIC,
        links=Links(
            domain=Link(56.25, None, "GA102 whitepaper"),
            node=Link(31.5, None, str(path)),
            network=Link(12.5, 5.0, str(path)),
        ),
        device=Device("H100", 989.0, 80.0, 3350.0, "NVIDIA H100 Tensor Core GPU data sheet", "h100", 2.5),
    )


def test_nodes_and_ranks_per_node_are_enough_and_an_order_has_three_forms(tmp_path):
    for line, order in (
        ("", None),
        ("rank_order: block", None),
        ("rank_order: cyclic", (0, 2, 4, 1, 3, 5)),
        ("rank_order: [[5, 4, 0], [1, 2, 3]]", (5, 4, 0, 1, 2, 3)),
    ):
        path = write(tmp_path, f"nodes: 2\nranks_per_node: 3\n{line}\n")
        assert read_cluster(path) == Cluster(num_nodes=2, ranks_per_node=3, order=order), line


def test_every_shipped_file_names_its_device_and_network_and_every_figure_its_source():
    shipped = {path.stem: read_cluster(path) for path in SHIPPED.glob("*.yaml")}
    for name, cluster in shipped.items():
        path = SHIPPED / f"{name}.yaml"
        comments = " ".join(line.lstrip("# ") for line in path.read_text().splitlines() if line.startswith("#"))
        assert cluster.device is not None, name
        assert cluster.device.source != str(path), name
        assert cluster.links is not None, name
        assert cluster.links.network is not None, name
        for link in filter(None, cluster.links):
            assert link.source in comments, name
        assert plan_layout(cluster, tp=2, replicas=1).tp == 2, name
    dgx, rack, pairs = (shipped[name] for name in ("dgx_h100_8x_100gbit", "gb200_nvl72", "nvlink_pairs"))
    assert (dgx.num_nodes, dgx.ranks_per_node, dgx.ranks_per_domain) == (8, 8, 8)
    assert dgx.links is not None
    assert dgx.links.network == Link(12.5, None, "IEEE 802.3 100 Gbit/s Ethernet")
    assert (rack.ranks_per_node, rack.local_domain_size, pairs.ranks_per_domain) == (4, 72, 2)


WHOLE_FILES = [  # text, words of the message
    ("ranks_per_node: 2", "key nodes is missing"),
    ("nodes: 2", "key ranks_per_node is missing"),
    ("nodes: 0\nranks_per_node: 2", "nodes 0 is not a positive whole number"),
    ("nodes: 1000000000000\nranks_per_node: 8\nrank_order: cyclic", "nodes 1000000000000 x ranks_per_node 8"),
    (f"nodes: 0x{'f' * 5000}\nranks_per_node: 8", "an integer has more digits than are read"),
    ("nodes: true\nranks_per_node: 2", "nodes True is not"),
    ("nodes: 2\nranks_per_node: 2.5", "ranks_per_node 2.5 is not"),
    ("nodes: 2\nranks_per_node: two", "ranks_per_node 'two' is not"),
    ("nodes: 2\nnodes: 3\nranks_per_node: 2", "is not YAML: key nodes twice"),
    ("- nodes\n- 2", "the file ['nodes', 2] is not"),
    ("", "the file (empty) is not"),
    ("nodes: [", "is not YAML"),
]
LINES = """
    fast_domain: -1                                           | fast_domain -1 is not
    fast_domain:                                              | fast_domain None is not
    fast_domain: 3                                            | fast_domain 3: 2 node(s) of 2
    rank_oder: block                                          | unknown key rank_oder (value 'block'); known are nodes
    rank_order: random                                        | rank_order 'random' is not block, cyclic or
    rank_order: [0, 1, 2, 3]                                  | rank_order [0, 1, 2, 3] is not block
    rank_order: [[0, 1]]                                      | lists for 1 node(s), nodes is 2
    rank_order: [[0, 1, 2], [3]]                              | of node 0 is not a list of 2 ranks
    rank_order: [[0, x], [2, 3]]                              | [0, 'x'] of node 0 is not a list of 2 ranks
    rank_order: [[0, 1], [2, 2]]                              | rank 3 is not among
    links: fast                                               | links 'fast' is not a list of key: value
    links: {net: {}}                                          | links: unknown key net
    links: {node: {}}                                         | links.node {} needs one of gigabytes_per_second and
    links: {node: {gigabits_per_second: 8, gigabytes_per_second: 1}} | needs one of
    links: {network: {gigabits_per_second: -1}}               | links.network.gigabits_per_second -1 is not a positive
    links: {network: {gigabits_per_second: .nan}}             | links.network.gigabits_per_second nan is not
    links: {network: {gigabits_per_second: 1, microseconds: fast}} | links.network.microseconds 'fast' is not
    links: {network: {gigabits_per_second: 1, source: 7}}     | links.network.source 7 is not text
    links: {network: {gigabits_per_second: 1, latency: 7}}    | links.network: unknown key latency (value 7)
    device: {name: X, teraflops: 1, gigabytes: 2}             | key device.gigabytes_per_second is missing
    device: {name: X, teraflops: 1, gigabytes: 2, gigabytes_per_second: 3, shares: V100} | device.shares 'V100' is not
    device: {name: X, teraflops: 1, gigabytes: 2, gigabytes_per_second: 3, shares: [v100]} | device.shares ['v100'] is
    device: {name: X, teraflops: 1, gigabytes: 2, gigabytes_per_second: 3, shares: 1} | device.shares 1 is not one of
"""


def test_a_mistake_names_the_file_the_key_and_the_value(tmp_path):
    lines = [(f"nodes: 2\nranks_per_node: 2\n{line}", message) for line, message in table(LINES)]
    named = [(text, f"--cluster-file {tmp_path / 'cluster.yaml'}") for text, _ in (*WHOLE_FILES, *lines)]
    assert not not_refused([*WHOLE_FILES, *lines, *named], lambda text: read_cluster(write(tmp_path, text + "\n")))


def test_a_file_that_is_not_there_or_not_text_is_a_users_error(tmp_path):
    path = tmp_path / "cluster.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    nowhere = "--cluster-file nowhere.yaml cannot be read: [Errno 2] No such file"
    assert not not_refused([("nowhere.yaml", nowhere), (path, f"--cluster-file {path} cannot be read")], read_cluster)


def test_a_cluster_is_read_back_as_it_was(tmp_path):
    device = Device("a GPU", 989.0, 80.0, 3350.0, "its maker")
    links = Links(domain=Link(450.0, 3.25, "measured over local"), network=Link(0.0125, None, "measured over cross"))
    for cluster in (
        Cluster(num_nodes=1, ranks_per_node=4),
        Cluster(num_nodes=2, ranks_per_node=4, domain_size=2, order=CYCLIC),
        Cluster(num_nodes=2, ranks_per_node=4, links=links),
        Cluster(num_nodes=2, ranks_per_node=4, links=links, device=device),
        Cluster(num_nodes=2, ranks_per_node=4, device=device._replace(shares="h100", price_per_hour=2.5)),
    ):
        text = cluster_text(cluster)
        assert read_cluster(write(tmp_path, text)) == cluster
        assert (NO_DEVICE in text) == (cluster.device is None)


def test_a_latency_too_short_to_tell_is_left_out(tmp_path):
    links = Links(network=Link(1.0, 0.0, "measured over cross"))
    path = write(tmp_path, cluster_text(Cluster(num_nodes=2, ranks_per_node=1, links=links)))
    assert read_cluster(path).links == Links(network=Link(1.0, None, "measured over cross"))
