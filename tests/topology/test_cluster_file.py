"""Test how a run finds its cluster: from a cluster file, an emulation or the launcher.

Also test the errors about cluster files, and that a written file reads back as the same cluster.
"""

import os
import textwrap
from pathlib import Path
from typing import Any

import pytest
from helpers.refusals import not_refused, table
from helpers.small_run import ROOT

from megazpp.topology import cluster_file
from megazpp.topology.cluster import Cluster, Device, Host, Link, Links
from megazpp.topology.cluster_file import ClusterConfig, cluster_text, detect_cluster, read_cluster
from megazpp.topology.plan import plan_layout

CYCLIC = (0, 2, 4, 6, 1, 3, 5, 7)


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "cluster.yaml"


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


# ---- choice between cluster file, emulation and launcher ----------------------------------------------------------


def detect(world: int = 8, file: Any = None, nodes: Any = None, env: Any = {}, *, tp: int = 1) -> Cluster:  # noqa: B006
    config = ClusterConfig(cluster_file=file and str(file), emulate_nodes=nodes)
    return detect_cluster(world, config, env, tp=tp)


def test_cluster_comes_from_launcher_or_emulation():
    assert detect() == Cluster(num_nodes=1, ranks_per_node=8)
    assert detect(env={"LOCAL_WORLD_SIZE": "4"}) == Cluster(num_nodes=2, ranks_per_node=4)
    assert detect(env={"SLURM_NTASKS_PER_NODE": "2"}) == Cluster(num_nodes=4, ranks_per_node=2)
    mpirun = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}
    flux = {"FLUX_TASK_RANK": "0", "FLUX_JOB_SIZE": "8", "FLUX_JOB_NNODES": "2"}
    for env in (mpirun, flux, mpirun | {"SLURM_NTASKS_PER_NODE": "2"}):
        assert detect(env=env) == Cluster(num_nodes=2, ranks_per_node=4)
    assert detect(nodes=2, env={"LOCAL_WORLD_SIZE": "8"}) == Cluster(num_nodes=2, ranks_per_node=4)
    several = detect(nodes="auto", env={"LOCAL_WORLD_SIZE": "2"})
    assert (several, several.notices) == (Cluster(num_nodes=4, ranks_per_node=2), ())


def test_emulate_nodes_auto_makes_two_nodes_if_they_fit_with_notice():
    for world, tp, nodes in ((4, 1, 2), (4, 2, 2), (2, 1, 2), (1, 1, 1), (2, 2, 1), (3, 1, 1), (4, 4, 1)):
        cluster = detect(world, nodes="auto", tp=tp)
        assert cluster == Cluster(num_nodes=nodes, ranks_per_node=world // nodes), (world, tp)
        [notice] = cluster.notices
        assert notice.startswith(f"--emulate-nodes auto: {world} rank")
        assert ("treated as 2 nodes" in notice) == (nodes == 2)
        plan_layout(cluster, tp=tp, replicas=1)


def test_emulate_nodes_auto_keeps_one_node_if_no_flag_distinguishes_nodes():
    config = ClusterConfig(emulate_nodes="auto")
    found = detect_cluster(4, config, {}, distinguishes_nodes=False)
    assert (found, found.notices) == (Cluster(num_nodes=1, ranks_per_node=4), ())
    assert detect_cluster(4, config, {"LOCAL_WORLD_SIZE": "2"}, distinguishes_nodes=False).num_nodes == 2


def test_cluster_file_overrides_launcher_and_auto_emulation(path):
    written(path, "nodes: 2\nranks_per_node: 4\nfast_domain: 2\nrank_order: cyclic\n")
    expected = Cluster(num_nodes=2, ranks_per_node=4, domain_size=2, order=CYCLIC)
    assert detect(file=path, nodes="auto") == detect(file=path, env={"LOCAL_WORLD_SIZE": "8"}) == expected


def test_cluster_that_does_not_match_the_jobs_ranks_is_rejected(path):
    written(path, "nodes: 2\nranks_per_node: 4\n")
    three = {"LOCAL_WORLD_SIZE": "3"}
    rows = [
        (4, path, None, {}, f"--cluster-file {path}: nodes 2 x ranks_per_node 4 are 8 ranks, but the job has 4"),
        (8, path, 2, {}, f"--cluster-file {path} and --emulate-nodes 2"),
        (8, None, 3, {}, "--emulate-nodes 3 does not divide the 8 ranks"),
        (8, None, 3, {}, "1, 2, 4 or 8"),
        (8, None, None, three, "8 ranks do not divide into nodes of 3 (LOCAL_WORLD_SIZE)"),
        (8, None, None, {"LOCAL_WORLD_SIZE": "x"}, "LOCAL_WORLD_SIZE=x, which is not a number"),
        (8, None, None, {"LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE=0, which is not a number of at least 1"),
        (8, None, None, {"SLURM_NTASKS_PER_NODE": "2(x2)"}, "SLURM_NTASKS_PER_NODE=2(x2), which is not a number"),
        (8, None, None, three, "for instance 3 on each of 2 node(s)"),
    ]
    assert not not_refused(rows, detect)


# ---- contents of cluster files ----------------------------------------------------------------------------------


def test_cluster_file_docstring_example(path):
    written(path, textwrap.dedent(cluster_file.__doc__.partition("\n")[2]))
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
        host=Host(500.0, 20.0, str(path)),
    )
    again = read_cluster(written(path, cluster_text(read_cluster(path))))
    assert again.host == Host(500.0, 20.0, str(path))


@pytest.mark.parametrize(
    ("order", "expected"),
    table("""
        block                    | 0 1 2 3 4 5
        cyclic                   | 0 2 4 1 3 5
        [[5, 4, 0], [1, 2, 3]]   | 5 4 0 1 2 3
    """),
)
def test_rank_order_may_be_block_cyclic_or_a_list_per_node(order, expected, path):
    cluster = read_cluster(written(path, f"nodes: 2\nranks_per_node: 3\nrank_order: {order}\n"))
    assert " ".join(str(cluster.rank_at(position)) for position in range(6)) == expected


def test_shipped_cluster_files_name_device_network_and_sources():
    shipped = {path: read_cluster(path) for path in (ROOT / "configs/clusters").glob("*.yaml")}
    for path, cluster in shipped.items():
        comments = " ".join(line.lstrip("# ") for line in path.read_text().splitlines() if line.startswith("#"))
        assert cluster.device.source != str(path)
        assert cluster.links.network is not None, path
        assert [link.source for link in cluster.links if link is not None and link.source not in comments] == [], path
        assert plan_layout(cluster, tp=2, replicas=1).tp == 2
    named = {path.stem: cluster for path, cluster in shipped.items()}
    rack, pairs = named["gb200_nvl72"], named["nvlink_pairs"]
    assert (rack.ranks_per_node, rack.local_domain_size, pairs.ranks_per_domain) == (4, 72, 2)


WHOLE_FILES = [  # (text of a cluster file, a piece of the error message)
    ("ranks_per_node: 2", "key nodes is missing"),
    ("nodes: 0\nranks_per_node: 2", "nodes 0 is not a positive whole number"),
    ("nodes: 1000000000000\nranks_per_node: 8\nrank_order: cyclic", "nodes 1000000000000 x ranks_per_node 8"),
    ("nodes: true\nranks_per_node: 2", "nodes True is not"),
    ("nodes: 2\nranks_per_node: 2.5", "ranks_per_node 2.5 is not"),
    ("nodes: 2\nnodes: 3\nranks_per_node: 2", "is not YAML: key nodes is given twice"),
    ("", "the file (empty) is not"),
    ("nodes: [", "is not YAML"),
]
LINES = """
    fast_domain:                                              | fast_domain None is not
    fast_domain: 3                                            | fast_domain 3: 2 node(s) of 2
    rank_oder: block                                          | unknown key rank_oder (value 'block'); known keys are
    rank_order: random                                        | rank_order 'random' is not block, cyclic or
    rank_order: [[0, 1]]                                      | lists for 1 node(s), but nodes is 2
    rank_order: [[0, 1, 2], [3]]                              | of node 0 is not a list of 2 ranks
    rank_order: [[0, x], [2, 3]]                              | [0, 'x'] of node 0 is not a list of 2 ranks
    links: fast                                               | links 'fast' is not a mapping of keys to values
    links: {net: {}}                                          | links: unknown key net
    links: {node: {}}                                         | links.node {} needs exactly one of gigabytes_per_second
    links: {node: {gigabits_per_second: 8, gigabytes_per_second: 1}} | needs exactly one of
    links: {network: {gigabits_per_second: .nan}}             | links.network.gigabits_per_second nan is not
    links: {network: {gigabits_per_second: 1, microseconds: fast}} | links.network.microseconds 'fast' is not
    links: {network: {gigabits_per_second: 1, source: 7}}     | links.network.source 7 is not text
    links: {network: {gigabits_per_second: 1, latency: 7}}    | links.network: unknown key latency (value 7)
    device: {name: X, teraflops: 1, gigabytes: 2, gigabytes_per_second: 3, encode_gigabytes_per_second: 4} | needs both
    device: {name: X, teraflops: 1, gigabytes: 2}             | key device.gigabytes_per_second is missing
    device: {name: X, teraflops: 1, gigabytes: 2, gigabytes_per_second: 3, calibration: V100} | 'V100' is not one
    device: {name: X, teraflops: 1, gigabytes: 2, gigabytes_per_second: 3, calibration: [v100]} | ['v100'] is not
"""


def test_cluster_file_error_names_file_key_and_value(path):
    lines = [(f"nodes: 2\nranks_per_node: 2\n{line}", message) for line, message in table(LINES)]
    named = [(text, f"--cluster-file {path}") for text, _ in (*WHOLE_FILES, *lines)]
    assert not not_refused([*WHOLE_FILES, *lines, *named], lambda text: read_cluster(written(path, text + "\n")))


def test_unreadable_cluster_file_is_a_value_error(path):
    path.write_bytes(b"\xff\xfe\x00")
    fifo, deep = path.with_name("fifo"), path.with_name("deep.yaml")
    os.mkfifo(fifo)
    deep.write_text("[" * 1_000)
    rows = [
        ("nowhere.yaml", "--cluster-file nowhere.yaml cannot be read: No such file or directory"),
        (path, f"--cluster-file {path} cannot be read: 'utf-8' codec can't decode"),
        (path.parent, f"--cluster-file {path.parent} cannot be read: it is not a regular file"),
        (fifo, f"--cluster-file {fifo} cannot be read: it is not a regular file"),
        (deep, f"--cluster-file {deep}: its brackets are nested too deeply"),
    ]
    assert not not_refused(rows, read_cluster)


def test_shipped_cluster_file_is_found_from_every_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shipped, own = "configs/clusters/dgx_h100.yaml", "configs/clusters/mine.yaml"
    ranks = read_cluster(shipped).world_size
    Path(own).parent.mkdir(parents=True)
    Path(own).write_text("nodes: 3\nranks_per_node: 5")
    assert (ranks % 8, read_cluster(own).world_size, read_cluster(shipped).world_size) == (0, 15, ranks)
    # a file in the working directory takes precedence over a shipped file
    Path(shipped).write_text("nodes: 3\nranks_per_node: 7")
    assert read_cluster(shipped).world_size == 21


GPU = Device("a GPU", 989.0, 80.0, 3350.0, "its maker")
LINKS = Links(domain=Link(450.0, 3.25, "measured over local"), network=Link(0.0125, None, "measured over cross"))


def test_cluster_text_round_trips(path):
    for fields in (
        {},
        {"domain_size": 2, "order": CYCLIC, "links": LINKS, "device": GPU},
        {"device": GPU._replace(calibration="h100", price_per_hour=2.5)},
        {"device": GPU._replace(encode_gigabytes_per_second=0.5, decode_gigabytes_per_second=1.5)},
    ):
        cluster = Cluster(num_nodes=2, ranks_per_node=4, **fields)
        text = cluster_text(cluster)
        assert read_cluster(written(path, text)) == cluster


@pytest.mark.slow
def test_message_about_a_hostile_file_is_short(path):
    """Check that messages quote no huge value. YAML aliases of aliases give a file of few bytes such a value."""
    aliases = "\n".join(f"  - &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12))
    rows = [
        ("[" * 1_000, "its brackets are nested too deeply"),
        (f"x:\n  - &a0 [1]\n{aliases}\nnodes: *a11\nranks_per_node: 1\n", "unknown key x"),
        (f"rank_order:\n  - &a0 [1]\n{aliases}\nnodes: 12\nranks_per_node: 1\n", "of node 1 is not a list of 1 ranks"),
    ]
    assert not_refused(rows, lambda text: read_cluster(written(path, text))) == []
    for text, _ in rows:
        with pytest.raises(ValueError, match="--cluster-file") as caught:
            read_cluster(written(path, text))
        assert len(str(caught.value)) < 500


def test_unmeasurably_short_latency_is_left_out(path):
    links = Links(network=Link(1.0, 0.0, "measured over cross"))
    written(path, cluster_text(Cluster(num_nodes=2, ranks_per_node=1, links=links)))
    assert read_cluster(path).links == Links(network=Link(1.0, None, "measured over cross"))
