"""From what the ranks say of their machines to the cluster."""

from __future__ import annotations

import pickle
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megazpp.topology.cluster import Cluster, Link, Links
from megazpp.topology.hosts import SWITCH, Gpu, HostInfo, cluster_from_hosts, describe_hosts


def pci(index: int) -> str:
    return f"0000:{0x1B + 0x10 * index:02x}:00.0"


def cpu(host: str, local_rank: int = 0, namespace: int = 1) -> HostInfo:
    return HostInfo(host=host, boot_id=f"boot-{host}", network_namespace=namespace, local_rank=local_rank)


def gpu(host: str, index: int, *, peers: tuple[str, ...] = (), fabric: str = "", local_rank: int | None = None):
    device = Gpu(f"{host}-{index}", "NVIDIA H100 80GB HBM3", pci(index), fabric, peers)
    return replace(cpu(host, index if local_rank is None else local_rank), gpu=device)


def switched(host: str, index: int) -> HostInfo:
    return gpu(host, index, peers=(SWITCH,))


def paired(host: str, index: int) -> HostInfo:
    return gpu(host, index, peers=(pci(index ^ 1),))


def test_block_order_is_the_identity():
    infos = [cpu(host, index) for host in "ab" for index in range(4)]
    assert cluster_from_hosts(infos) == Cluster(num_nodes=2, ranks_per_node=4)


def test_cyclic_order_is_found():
    infos = [cpu("ab"[rank % 2], rank // 2) for rank in range(8)]
    assert cluster_from_hosts(infos) == Cluster(num_nodes=2, ranks_per_node=4, order=(0, 2, 4, 6, 1, 3, 5, 7))


@given(st.integers(1, 4), st.integers(1, 5), st.randoms(use_true_random=False))
def test_any_shuffled_order_puts_each_rank_on_its_host_and_equal_positions_on_equal_slots(
    nodes: int, size: int, rng: random.Random
):
    infos = [switched(f"host{node}", index) for node in range(nodes) for index in range(size)]
    rng.shuffle(infos)
    cluster = cluster_from_hosts(infos)
    assert (cluster.num_nodes, cluster.ranks_per_node, cluster.domain_size) == (nodes, size, None)
    order = cluster.order or range(nodes * size)
    for position, rank in enumerate(order):
        node, slot = divmod(position, size)
        assert infos[rank].host == infos[order[node * size]].host
        assert infos[rank].gpu.pci == pci(slot)


def test_namespaces_of_one_machine_are_nodes_and_containers_that_share_one_are_not():
    namespaces = [cpu("vm", rank % 4, namespace=rank // 4) for rank in range(8)]
    assert cluster_from_hosts(namespaces) == Cluster(num_nodes=2, ranks_per_node=4)
    containers = [replace(cpu("vm"), host=f"container{rank}") for rank in range(4)]
    assert cluster_from_hosts(containers) == Cluster(num_nodes=1, ranks_per_node=4)


def test_equal_host_names_on_different_machines_are_two_nodes_and_without_a_boot_id_the_name_decides():
    assert cluster_from_hosts([replace(cpu("a"), host="localhost"), replace(cpu("b"), host="localhost")]).num_nodes == 2
    hidden = [replace(cpu(host), boot_id="") for host in "aabb"]
    assert cluster_from_hosts(hidden) == Cluster(num_nodes=2, ranks_per_node=2)


def test_an_isolated_gpu_per_task_is_placed_by_its_bus_address():
    """Every task sees one GPU as device 0, and the launcher gave them out from the last to the first."""
    infos = [gpu("a", index, peers=(SWITCH,), local_rank=0) for index in (3, 2, 1, 0)]
    assert cluster_from_hosts(infos) == Cluster(num_nodes=1, ranks_per_node=4, order=(3, 2, 1, 0))


def test_gpus_without_nvlink_and_single_gpus_of_pairs_share_what_the_node_has():
    assert cluster_from_hosts([gpu("a", i) for i in range(4)]) == Cluster(num_nodes=1, ranks_per_node=4)
    assert cluster_from_hosts([paired("a", i) for i in (0, 2)]) == Cluster(num_nodes=1, ranks_per_node=2)


def test_an_nvswitch_makes_the_node_one_domain():
    infos = [switched(host, index) for host in "ab" for index in range(8)]
    assert cluster_from_hosts(infos) == Cluster(num_nodes=2, ranks_per_node=8)


def test_nvlink_pairs_are_domains_and_stand_side_by_side():
    infos = [paired("a", index) for index in range(4)]
    assert cluster_from_hosts(infos) == Cluster(num_nodes=1, ranks_per_node=4, domain_size=2)
    apart = [gpu("a", index, peers=(pci((index + 2) % 4),)) for index in range(4)]
    assert cluster_from_hosts(apart) == Cluster(num_nodes=1, ranks_per_node=4, domain_size=2, order=(0, 2, 1, 3))


def test_a_link_that_one_end_reports_joins_both_and_unused_gpus_join_nobody():
    one_sided = [gpu("a", 0, peers=(pci(1),)), gpu("a", 1), gpu("a", 2, peers=(pci(3),)), gpu("a", 3)]
    assert cluster_from_hosts(one_sided).domain_size == 2
    over_an_unused_one = [gpu("a", 0, peers=(pci(1),)), gpu("a", 2, peers=(pci(1),))]
    assert cluster_from_hosts(over_an_unused_one) == Cluster(num_nodes=1, ranks_per_node=2)


def test_equal_bus_addresses_on_two_hosts_are_two_gpus():
    infos = [paired(host, index) for host in "ab" for index in range(2)]
    assert cluster_from_hosts(infos) == Cluster(num_nodes=2, ranks_per_node=2)


def rack_order(racks: int, nodes: int) -> list[HostInfo]:
    """One rank after another goes to the next rack: nodes of a rack are never neighbours."""
    return [
        gpu(f"rack{rack}-{node}", index, peers=(SWITCH,), fabric=f"cluster{rack}/7")
        for node in range(nodes)
        for rack in range(racks)
        for index in range(4)
    ]


def test_the_nodes_of_a_72_gpu_rack_are_one_domain_and_stand_side_by_side():
    infos = rack_order(2, 18)
    cluster = cluster_from_hosts(infos)
    assert (cluster.num_nodes, cluster.ranks_per_node, cluster.domain_size) == (36, 4, 72)
    assert cluster.order is not None
    for domain in (cluster.order[:72], cluster.order[72:]):
        assert len({infos[rank].gpu.fabric for rank in domain}) == 1
    assert cluster.order[:8] == (0, 1, 2, 3, 8, 9, 10, 11)


def test_two_cliques_of_a_fabric_are_two_domains():
    infos = [gpu(f"n{n}", i, fabric=f"cluster/{n // 2}") for n in range(4) for i in range(2)]
    assert cluster_from_hosts(infos) == Cluster(num_nodes=4, ranks_per_node=2, domain_size=4)


# ---- what does not fit ------------------------------------------------------------------------------------------


def refused(infos: list[HostInfo]) -> str:
    with pytest.raises(ValueError, match="What would fit") as caught:
        cluster_from_hosts(infos)
    return str(caught.value)


def test_unequal_hosts_are_named_with_what_would_fit():
    message = refused([*(cpu("a", i) for i in range(4)), *(cpu("b", i) for i in range(4)), cpu("short"), cpu("short")])
    assert "4 on a (rank 0 1 2 3), b (rank 4 5 6 7); 2 on short (rank 8 9)" in message
    assert "What would fit: 2 on each of the 3 hosts, or 4 on each of 2 hosts" in message


def test_a_host_without_a_gpu_among_hosts_with_one_is_named():
    message = refused([switched("good", 0), switched("good", 1), cpu("bad"), cpu("bad", 1)])
    assert "a GPU on good (rank 0 1); none on bad (rank 2 3)" in message


def test_a_gpu_used_twice_is_named_with_both_ranks():
    message = refused([switched("a", 0), switched("b", 0), switched("b", 0), switched("a", 1)])
    assert "ranks 1 and 2 use the same GPU b-0 of b" in message


def test_domains_of_unequal_size_name_the_odd_host():
    infos = [*(paired("a", i) for i in range(4)), gpu("b", 0), gpu("b", 1), paired("b", 2), paired("b", 3)]
    message = refused(infos)
    assert "3 of 2 ranks, 2 of 1 ranks; those of 1 are on b (rank 4 5)" in message
    assert "--emulate-nodes" in message


def test_a_fabric_that_takes_a_part_of_a_host_names_it():
    infos = [gpu(f"n{n}", i, fabric=f"cluster/{i}") for n in range(2) for i in range(2)]
    assert "n0 (rank 0), n1 (rank 2)" in refused(infos)


def test_a_thousand_hosts_are_not_all_listed():
    message = refused([cpu(f"host{n}", i) for n in range(1000) for i in range(8)] + [cpu("last")])
    assert "8 on host0 (rank 0 1 2 3 ...)" in message
    assert "and 996 more; 1 on last (rank 8000)" in message
    assert len(message) < 500


# ---- words ------------------------------------------------------------------------------------------------------


def test_the_log_line_names_hosts_and_gpus():
    infos = [switched(host, index) for host in "ab" for index in (0, 1)]
    line = describe_hosts(infos)
    assert line == ("hosts: a (rank 0 1), b (rank 2 3); 4 x NVIDIA H100 80GB HBM3")
    assert pickle.loads(pickle.dumps(infos)) == infos


def test_the_log_line_says_where_figures_come_from():
    known = Links(Link(450.0, source="data sheet of X"), None, Link(12.5, 3.0))
    assert known.describe() == "links: domain 450 GB/s (data sheet of X); network 12.5 GB/s, 3 us (no source given)"
    assert Links().describe() == "links: none known"
