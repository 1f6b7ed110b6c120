"""Test how a cluster is built from the descriptions that all ranks send of their hosts and GPUs."""

import functools
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from helpers.refusals import not_refused
from hypothesis import given
from hypothesis import strategies as st

from megazpp.topology.cluster import Cluster
from megazpp.topology.hosts import SWITCH, Gpu, HostInfo, cluster_from_hosts


def pci(index: int) -> str:
    return f"0000:{0x1B + 0x10 * index:02x}:00.0"


def cpu(host: str, local_rank: int = 0, namespace: int = 1) -> HostInfo:
    return HostInfo(host=host, boot_id=f"boot-{host}", network_namespace=namespace, local_rank=local_rank)


def gpu(host: str, index: int, *, peers: tuple[str, ...] = (), fabric: str = "", local_rank: int | None = None):
    device = Gpu(f"{host}-{index}", "NVIDIA H100 80GB HBM3", pci(index), fabric, peers)
    return replace(cpu(host, index if local_rank is None else local_rank), gpu=device)


switched = functools.partial(gpu, peers=(SWITCH,))


def paired(host: str, index: int) -> HostInfo:
    return gpu(host, index, peers=(pci(index ^ 1),))


def hosts(names: str, size: int, make: Callable[[str, int], HostInfo]) -> list[HostInfo]:
    return [make(host, index) for host in names for index in range(size)]


def racks(numbers: str) -> list[HostInfo]:
    """Return the descriptions of ranks in NVLink racks, two ranks per node.

    The i-th character of `numbers` names the rack of node i.
    """
    placed = itertools.product(enumerate(numbers), (0, 1))
    return [switched(f"n{node}", index, fabric=f"cluster/{number}") for (node, number), index in placed]


def cluster(nodes: int, ranks_per_node: int, domain_size: int | None = None, order: Any = None) -> Cluster:
    return Cluster(num_nodes=nodes, ranks_per_node=ranks_per_node, domain_size=domain_size, order=order)


CLUSTERS: dict[str, tuple[list[HostInfo], Cluster]] = {
    "block order": (hosts("ab", 4, cpu), cluster(2, 4)),
    "cyclic order": ([cpu("ab"[rank % 2], rank // 2) for rank in range(6)], cluster(2, 3, order=(0, 2, 4, 1, 3, 5))),
    "network namespaces are nodes": ([cpu("vm", rank % 4, namespace=rank // 4) for rank in range(8)], cluster(2, 4)),
    "containers that share a namespace are one node": (
        [replace(cpu("vm"), host=name) for name in "abcd"],
        cluster(1, 4),
    ),
    "two machines of the same name": ([replace(cpu(name), host="localhost") for name in "ab"], cluster(2, 1)),
    "without a boot id the host name decides": ([replace(cpu(name), boot_id="") for name in "aabb"], cluster(2, 2)),
    # Every rank sees only one GPU, as device 0, and the launcher has assigned the GPUs from the last to the first
    "isolated GPUs are sorted by bus address": (
        [gpu("a", index, peers=(SWITCH,), local_rank=0) for index in (3, 2, 1, 0)],
        cluster(1, 4, order=(3, 2, 1, 0)),
    ),
    "no NVLink": (hosts("a", 4, gpu), cluster(1, 4)),
    "one GPU of each pair": ([paired("a", 0), paired("a", 2)], cluster(1, 2)),
    "NVSwitches": (hosts("ab", 8, switched), cluster(2, 8)),
    "NVLink pairs": (hosts("a", 4, paired), cluster(1, 4, 2)),
    "separated pairs become adjacent": (
        [gpu("a", index, peers=(pci((index + 2) % 4),)) for index in range(4)],
        cluster(1, 4, 2, order=(0, 2, 1, 3)),
    ),
    "links that only one end reports": (
        [gpu("a", 0, peers=(pci(1),)), gpu("a", 1), gpu("a", 2, peers=(pci(3),)), gpu("a", 3)],
        cluster(1, 4, 2),
    ),
    "unused GPUs connect no ranks": ([gpu("a", 0, peers=(pci(1),)), gpu("a", 2, peers=(pci(1),))], cluster(1, 2)),
    "the same bus addresses on two hosts": (hosts("ab", 2, paired), cluster(2, 2)),
    "racks": (racks("0011"), cluster(4, 2, 4)),
    "the nodes of a rack become adjacent": (racks("0101"), cluster(4, 2, 4, order=(0, 1, 4, 5, 2, 3, 6, 7))),
}


@pytest.mark.parametrize(("infos", "expected"), CLUSTERS.values(), ids=CLUSTERS)
def test_cluster_from_hosts_finds_nodes_domains_and_order(infos, expected):
    assert cluster_from_hosts(infos) == expected


@given(st.integers(1, 4), st.integers(1, 5), st.randoms(use_true_random=False))
def test_shuffled_ranks_keep_their_host_and_slot(nodes, size, rng):
    infos = [switched(f"host{node}", index) for node in range(nodes) for index in range(size)]
    rng.shuffle(infos)
    found = cluster_from_hosts(infos)
    assert (found.num_nodes, found.ranks_per_node, found.domain_size) == (nodes, size, None)
    at = [infos[found.rank_at(position)] for position in range(nodes * size)]
    for position, info in enumerate(at):
        assert info.host == at[position - position % size].host
        assert info.gpu.pci == pci(position % size)


def test_inconsistent_hosts_are_rejected_by_name_with_advice():
    uneven = [*hosts("ab", 4, cpu), cpu("short"), cpu("short")]
    thousand = [*(cpu(f"host{n}", i) for n in range(1000) for i in range(8)), cpu("last")]
    twice = [switched("a", 0), switched("b", 0), switched("b", 0), switched("a", 1)]
    mixed = [*hosts("a", 4, paired), gpu("b", 0), gpu("b", 1), paired("b", 2), paired("b", 3)]
    split = [gpu(host, index, fabric=f"cluster/{index}") for host in ("n0", "n1") for index in (0, 1)]
    rows = [
        (uneven, "4 on a (rank 0 1 2 3), b (rank 4 5 6 7); 2 on short (rank 8 9). Start 2 on each of the 3"),
        (uneven, "4 on each of 2"),
        (thousand, "8 on host0 (rank 0 1 2 3 ...)"),
        (thousand, "and 996 more; 1 on last (rank 8000). Start"),
        ([*hosts("g", 2, switched), cpu("bad"), cpu("bad", 1)], "a GPU on g (rank 0 1); none on bad (rank 2 3). Give"),
        (twice, "ranks 1 and 2 use the same GPU b-0 of b. Start"),
        (mixed, "3 of 2 ranks, 2 of 1 ranks. The domains of 1 rank(s) are on b (rank 4 5). Start"),
        (mixed, "--emulate-nodes"),
        (split, "n0 (rank 0), n1 (rank 2). Only domains of whole hosts are"),
    ]
    assert not not_refused(rows, cluster_from_hosts)
