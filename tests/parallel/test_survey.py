"""The ranks' own answers become the cluster: what a host says of itself, and how all of them come together."""

from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from helpers.ranks import ranks

from megazpp.parallel.survey import describe_host, settle_cluster, share_survey
from megazpp.parallel.worker import Worker
from megazpp.topology.cluster import Cluster
from megazpp.topology.cluster_file import ClusterConfig
from megazpp.topology.hosts import HostInfo


def info(host: str, local_rank: int = 0) -> HostInfo:
    return HostInfo(host=host, boot_id=host, local_rank=local_rank, notice=f"{host} is odd")


def survey(store_file: str, hosts: list[str]) -> tuple[Cluster, tuple[str, ...]] | str:
    """This rank says that it is on hosts[rank]."""
    rank, size = dist.get_rank(), dist.get_world_size()
    store = dist.FileStore(store_file, size)
    try:
        cluster = share_survey(store, rank, size, info(hosts[rank], hosts[:rank].count(hosts[rank])))
    except ValueError as error:
        return str(error)
    return cluster, cluster.notices


def test_all_ranks_get_the_cluster_of_a_launcher_that_deals_ranks_out(tmp_path):
    found = ranks(4).run(survey, str(tmp_path / "store"), ["a", "b", "a", "b"])
    assert [cluster for cluster, _ in found] == [Cluster(num_nodes=2, ranks_per_node=2, order=(0, 2, 1, 3))] * 4
    hosts = "hosts: a (rank 0 2), b (rank 1 3); no GPU"
    assert found[0][1] == (hosts, "a is odd", "b is odd")  # each host's notice once


def test_what_is_wrong_with_a_host_reaches_every_rank_in_the_same_words(tmp_path):
    found = ranks(4).run(survey, str(tmp_path / "store"), ["a", "a", "a", "lonely"])
    assert "1 on lonely (rank 3)" in found[0]
    assert found == found[:1] * 4


def worker(store: dist.Store, rank: int = 0, world_size: int = 1) -> Worker:
    return Worker(torch.device("cpu"), rank, world_size, rank, store, timeout=timedelta(minutes=1))


def test_a_cluster_that_the_flags_describe_is_not_surveyed():
    announced = Cluster(num_nodes=2, ranks_per_node=2)
    alone = worker(dist.HashStore(), 0, 4)  # a survey would wait for three ranks
    for config in (ClusterConfig(emulate_nodes=2), ClusterConfig(cluster_file="cluster.yaml")):
        assert settle_cluster(alone, config, announced, tp=1) is announced


def test_the_survey_overrules_what_the_launcher_announced():
    found = settle_cluster(worker(dist.HashStore()), ClusterConfig(), Cluster(num_nodes=4, ranks_per_node=1), tp=1)
    assert found == Cluster(num_nodes=1, ranks_per_node=1)
    assert found.notices[0].startswith("hosts: ")


def settle(store_file: str) -> Cluster:
    rank, size = dist.get_rank(), dist.get_world_size()
    own = worker(dist.FileStore(store_file, size), rank, size)
    return settle_cluster(own, ClusterConfig(emulate_nodes="auto"), Cluster(num_nodes=4, ranks_per_node=1), tp=1)


def test_one_machine_is_made_two_nodes_by_emulate_nodes_auto_whatever_the_launcher_said(tmp_path):
    found = ranks(4).run(settle, str(tmp_path / "store"))
    assert found == [Cluster(num_nodes=2, ranks_per_node=2)] * 4


# ---- one host ---------------------------------------------------------------------------------------------------


def test_a_machine_is_described_with_its_boot_and_its_network_namespace_where_it_has_them(tmp_path):
    here = describe_host(0, torch.device("cpu"))
    assert len(here.boot_id) == 36
    assert here.network_namespace == Path("/proc/self/ns/net").stat().st_ino
    assert here.gpu is None
    assert describe_host(3, torch.device("cpu"), root=tmp_path) == HostInfo(host=here.host, local_rank=3)
