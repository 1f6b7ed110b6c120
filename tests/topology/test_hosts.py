"""From what the ranks say of their machines to the cluster."""

from collections.abc import Callable
from dataclasses import replace

from helpers.refusals import not_refused
from hypothesis import given
from hypothesis import strategies as st

from megazpp.topology.cluster import Cluster
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


def hosts(names: str, size: int, make: Callable[[str, int], HostInfo]) -> list[HostInfo]:
    return [make(host, index) for host in names for index in range(size)]


def fabric(node: int, index: int, clique: int) -> HostInfo:
    return gpu(f"n{node}", index, fabric=f"cluster/{clique}")


CLUSTERS: dict[str, tuple[list[HostInfo], Cluster]] = {
    "block order": (hosts("ab", 4, cpu), Cluster(num_nodes=2, ranks_per_node=4)),
    "cyclic order": (
        [cpu("ab"[rank % 2], rank // 2) for rank in range(8)],
        Cluster(num_nodes=2, ranks_per_node=4, order=(0, 2, 4, 6, 1, 3, 5, 7)),
    ),
    "network namespaces are nodes": (
        [cpu("vm", rank % 4, namespace=rank // 4) for rank in range(8)],
        Cluster(num_nodes=2, ranks_per_node=4),
    ),
    "containers that share one are not": (
        [replace(cpu("vm"), host=f"container{rank}") for rank in range(4)],
        Cluster(num_nodes=1, ranks_per_node=4),
    ),
    "equal names of two machines": (
        [replace(cpu("a"), host="localhost"), replace(cpu("b"), host="localhost")],
        Cluster(num_nodes=2, ranks_per_node=1),
    ),
    "without a boot id the name decides": (
        [replace(cpu(host), boot_id="") for host in "aabb"],
        Cluster(num_nodes=2, ranks_per_node=2),
    ),
    # every task sees one GPU as device 0, and the launcher gave them out from the last to the first
    "isolated GPUs stand by bus address": (
        [gpu("a", index, peers=(SWITCH,), local_rank=0) for index in (3, 2, 1, 0)],
        Cluster(num_nodes=1, ranks_per_node=4, order=(3, 2, 1, 0)),
    ),
    "no NVLink": (hosts("a", 4, gpu), Cluster(num_nodes=1, ranks_per_node=4)),
    "single GPUs of pairs": ([paired("a", i) for i in (0, 2)], Cluster(num_nodes=1, ranks_per_node=2)),
    "NVSwitches": (hosts("ab", 8, switched), Cluster(num_nodes=2, ranks_per_node=8)),
    "NVLink pairs": (hosts("a", 4, paired), Cluster(num_nodes=1, ranks_per_node=4, domain_size=2)),
    "pairs that are apart come to stand side by side": (
        [gpu("a", index, peers=(pci((index + 2) % 4),)) for index in range(4)],
        Cluster(num_nodes=1, ranks_per_node=4, domain_size=2, order=(0, 2, 1, 3)),
    ),
    "links that one end reports": (
        [gpu("a", 0, peers=(pci(1),)), gpu("a", 1), gpu("a", 2, peers=(pci(3),)), gpu("a", 3)],
        Cluster(num_nodes=1, ranks_per_node=4, domain_size=2),
    ),
    "unused GPUs join nobody": (
        [gpu("a", 0, peers=(pci(1),)), gpu("a", 2, peers=(pci(1),))],
        Cluster(num_nodes=1, ranks_per_node=2),
    ),
    "equal bus addresses of two hosts": (hosts("ab", 2, paired), Cluster(num_nodes=2, ranks_per_node=2)),
    "two cliques of a fabric": (
        [fabric(node, index, node // 2) for node in range(4) for index in range(2)],
        Cluster(num_nodes=4, ranks_per_node=2, domain_size=4),
    ),
}


def test_the_cluster_that_hosts_are():
    for name, (infos, cluster) in CLUSTERS.items():
        assert cluster_from_hosts(infos) == cluster, name


@given(st.integers(1, 4), st.integers(1, 5), st.randoms(use_true_random=False))
def test_any_shuffled_order_puts_each_rank_on_its_host_and_equal_positions_on_equal_slots(nodes, size, rng):
    infos = [switched(f"host{node}", index) for node in range(nodes) for index in range(size)]
    rng.shuffle(infos)
    cluster = cluster_from_hosts(infos)
    assert (cluster.num_nodes, cluster.ranks_per_node, cluster.domain_size) == (nodes, size, None)
    order = cluster.order or range(nodes * size)
    for position, rank in enumerate(order):
        node, slot = divmod(position, size)
        assert infos[rank].host == infos[order[node * size]].host
        assert infos[rank].gpu.pci == pci(slot)


def test_the_nodes_of_a_72_gpu_rack_are_one_domain_and_stand_side_by_side():
    """Though one node after another belongs to the next rack."""
    infos = [
        gpu(f"rack{rack}-{node}", index, peers=(SWITCH,), fabric=f"cluster{rack}/7")
        for node in range(18)
        for rack in range(2)
        for index in range(4)
    ]
    cluster = cluster_from_hosts(infos)
    assert (cluster.num_nodes, cluster.ranks_per_node, cluster.domain_size) == (36, 4, 72)
    assert cluster.order is not None
    for domain in (cluster.order[:72], cluster.order[72:]):
        assert len({infos[rank].gpu.fabric for rank in domain}) == 1
    assert cluster.order[:8] == (0, 1, 2, 3, 8, 9, 10, 11)


def test_what_does_not_fit_is_named_with_its_hosts_and_what_would():
    uneven = [*hosts("ab", 4, cpu), cpu("short"), cpu("short")]
    thousand = [*(cpu(f"host{n}", i) for n in range(1000) for i in range(8)), cpu("last")]
    mixed = [*hosts("a", 4, paired), gpu("b", 0), gpu("b", 1), paired("b", 2), paired("b", 3)]
    rows = [
        (uneven, "4 on a (rank 0 1 2 3), b (rank 4 5 6 7); 2 on short (rank 8 9). What would fit: 2 on each of the 3"),
        (uneven, "4 on each of 2"),
        (thousand, "8 on host0 (rank 0 1 2 3 ...)"),
        (thousand, "and 996 more; 1 on last (rank 8000). What would fit"),
        ([*hosts("g", 2, switched), cpu("bad"), cpu("bad", 1)], "a GPU on g (rank 0 1); none on bad (rank 2 3). What"),
        (
            [switched("a", 0), *2 * [switched("b", 0)], switched("a", 1)],
            "ranks 1 and 2 use the same GPU b-0 of b. What",
        ),
        (mixed, "3 of 2 ranks, 2 of 1 ranks; those of 1 are on b (rank 4 5). What would fit"),
        (mixed, "--emulate-nodes"),
        ([fabric(node, index, index) for node in range(2) for index in range(2)], "n0 (rank 0), n1 (rank 2). What"),
    ]
    assert not not_refused(rows, cluster_from_hosts)


def test_the_log_line_names_hosts_and_gpus():
    line = describe_hosts(hosts("ab", 2, switched))
    assert line == "hosts: a (rank 0 1), b (rank 2 3); 4 x NVIDIA H100 80GB HBM3"
