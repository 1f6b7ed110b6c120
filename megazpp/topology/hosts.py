"""From what each rank says of its machine to the cluster: nodes, fast domains, who stands where.

A node is one network namespace of one booted kernel, whatever its processes call the host: two containers that share
both are one node, and a machine split into network namespaces is several. Inside it, ranks whose GPUs NVLink joins
form a domain; a multi-node NVLink fabric is a domain of whole nodes.

    ranks as srun deals them out cyclically          the cluster
    host a: 0 2 4 6   (NVLink pairs 0-2, 4-6)        2 nodes x 4, domains of 2,
    host b: 1 3 5 7   (NVLink pairs 1-3, 5-7)        order 0 2 4 6 1 3 5 7

Inside a node ranks stand in the order of their GPUs' PCI addresses (without GPUs: of the launcher's local ranks), so
equal positions of two nodes use the same rail. Pure integers and strings; parallel/host_discovery.py asks the machine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

from megazpp.topology.cluster import Cluster

SWITCH = "switch"  # among a GPU's NVLink peers: an NVSwitch
OVERRIDE = "--cluster-file describes the machine by hand, --emulate-nodes N takes the ranks in their order as N nodes"


@dataclass(frozen=True)
class Gpu:
    """One GPU as NVML sees it; what could not be found out is empty."""

    uuid: str
    name: str = ""
    pci: str = ""  # bus address, "0000:1b:00.0"
    fabric: str = ""  # of a multi-node NVLink domain: cluster and clique
    nvlink_peers: tuple[str, ...] = ()  # PCI addresses of the GPUs at the other end of its NVLinks, and `SWITCH`


@dataclass(frozen=True, kw_only=True)
class HostInfo:
    """A rank's description of the machine it is on."""

    host: str
    boot_id: str = ""  # the running kernel's; empty where the system hides it
    network_namespace: int = 0  # inode of the process's
    local_rank: int = 0  # the launcher's
    gpu: Gpu | None = None  # the one this rank computes and communicates with, None on a CPU
    notice: str = ""  # something the user should read, or nothing


def cluster_from_hosts(infos: Sequence[HostInfo]) -> Cluster:
    """The cluster that the ranks find themselves on.

    Raises:
        ValueError: some ranks have a GPU and others none; two ranks use one GPU; the nodes differ in their number of
            ranks, or the domains; a fabric holds part of a node. The message names hosts and says what would fit.
    """
    _check_gpus(infos)
    nodes = _group(range(len(infos)), lambda rank: _node(infos[rank]))
    _check_equal_nodes(infos, nodes)
    domains = _nvlink_domains(infos, nodes)
    _check_domains(infos, nodes, domains)
    first_of_domain = {rank: domain[0] for domain in domains for rank in domain}
    nodes = sorted(nodes, key=lambda node: (min(first_of_domain[rank] for rank in node), node[0]))
    domain_of = {rank: number for number, domain in enumerate(domains) for rank in domain}
    order = tuple(rank for node in nodes for rank in _by_position(infos, node, domain_of))
    return Cluster(
        num_nodes=len(nodes),
        ranks_per_node=len(nodes[0]),
        domain_size=None if len(domains[0]) == len(nodes[0]) else len(domains[0]),
        order=None if order == tuple(range(len(infos))) else order,
    )


def describe_hosts(infos: Sequence[HostInfo]) -> str:
    """One line for the log: the hosts with their ranks, and the GPUs."""
    gpus = Counter(info.gpu.name for info in infos if info.gpu is not None)
    devices = ", ".join(f"{count} x {name}" for name, count in gpus.items()) or "no GPU"
    return f"hosts: {_spell(infos, range(len(infos)), 8)}; {devices}"


def _node(info: HostInfo) -> Hashable:
    return (info.boot_id or info.host, info.network_namespace)


def _group(ranks: Iterable[int], key: Callable[[int], Hashable]) -> list[list[int]]:
    """`ranks` with equal keys together; groups in the order in which `ranks` comes to them."""
    groups: dict[Hashable, list[int]] = {}
    for rank in ranks:
        groups.setdefault(key(rank), []).append(rank)
    return list(groups.values())


def _check_gpus(infos: Sequence[HostInfo]) -> None:
    without = [rank for rank, info in enumerate(infos) if info.gpu is None]
    if without and len(without) < len(infos):
        having = [rank for rank, info in enumerate(infos) if info.gpu is not None]
        raise ValueError(
            f"some ranks have a GPU and others have none: a GPU on {_spell(infos, having)}; none on "
            f"{_spell(infos, without)}. What would fit: a GPU for every rank, or --distributed-backend gloo"
        )
    used: dict[Hashable, int] = {}
    for rank, info in enumerate(infos):
        if info.gpu is not None:
            other = used.setdefault((_node(info), info.gpu.uuid), rank)
            if other != rank:
                raise ValueError(
                    f"ranks {other} and {rank} use the same GPU {info.gpu.uuid} of {info.host}. What would fit: as "
                    "many ranks on a host as it has GPUs, each with its own (CUDA_VISIBLE_DEVICES, --gpus-per-task)"
                )


def _check_equal_nodes(infos: Sequence[HostInfo], nodes: list[list[int]]) -> None:
    sizes = Counter(map(len, nodes))
    if len(sizes) == 1:
        return
    usual = max(sizes, key=lambda size: (sizes[size], size))
    listed = "; ".join(
        f"{size} on {_spell(infos, [rank for node in nodes if len(node) == size for rank in node])}"
        for size in sorted(sizes, reverse=True)
    )
    raise ValueError(
        f"the hosts differ in their number of ranks: {listed}. What would fit: {min(sizes)} on each of the "
        f"{len(nodes)} hosts, or {usual} on each of {sizes[usual]} hosts"
    )


def _nvlink_domains(infos: Sequence[HostInfo], nodes: list[list[int]]) -> list[list[int]]:
    """Ranks that NVLink joins, in the order of their first rank; the nodes where it joins none."""
    keys: dict[int, Hashable] = {}
    for node in nodes:
        for rank, first in _joined(infos, node).items():
            gpu = infos[rank].gpu
            keys[rank] = gpu.fabric if gpu is not None and gpu.fabric else first
    domains = _group(range(len(infos)), keys.__getitem__)
    return nodes if all(len(domain) == 1 for domain in domains) else domains


def _joined(infos: Sequence[HostInfo], node: list[int]) -> dict[int, int]:
    """Each rank of a node -> the first rank that NVLinks lead it to, directly, over other ranks' GPUs or a switch."""
    group = {rank: {rank} for rank in node}
    by_end: dict[str, int] = {gpu.pci: rank for rank in node if (gpu := infos[rank].gpu) is not None and gpu.pci}
    for rank in node:
        gpu = infos[rank].gpu
        for end in gpu.nvlink_peers if gpu is not None else ():
            other = by_end.setdefault(end, rank) if end == SWITCH else by_end.get(end, rank)
            if group[other] is not group[rank]:
                group[rank] |= group[other]
                for member in group[rank]:
                    group[member] = group[rank]
    return {rank: min(group[rank]) for rank in node}


def _check_domains(infos: Sequence[HostInfo], nodes: list[list[int]], domains: list[list[int]]) -> None:
    sizes = Counter(map(len, domains))
    if len(sizes) > 1:
        odd = min(sizes, key=lambda size: (sizes[size], size))
        ranks = [rank for domain in domains if len(domain) == odd for rank in domain]
        listed = ", ".join(f"{count} of {size} ranks" for size, count in sorted(sizes.items(), reverse=True))
        raise ValueError(
            f"NVLink joins the ranks in domains of different sizes: {listed}; those of {odd} are on "
            f"{_spell(infos, ranks)}. What would fit: {min(sizes)} rank(s) in every domain; {OVERRIDE}"
        )
    node_of = {rank: number for number, node in enumerate(nodes) for rank in node}
    for domain in domains:
        touched = {node_of[rank] for rank in domain}
        if len(touched) > 1 and len(domain) != len(touched) * len(nodes[0]):
            raise ValueError(
                f"a multi-node NVLink domain holds {len(domain)} ranks of {len(touched)} hosts with {len(nodes[0])} "
                f"ranks each, so it takes only a part of a host: {_spell(infos, domain)}. What would fit: domains of "
                f"whole hosts; {OVERRIDE}"
            )


def _by_position(infos: Sequence[HostInfo], node: list[int], domain_of: dict[int, int]) -> list[int]:
    """The ranks of a node domain by domain, both by PCI address or local rank."""

    def place(rank: int) -> tuple[str, int, int]:
        gpu = infos[rank].gpu
        return (gpu.pci if gpu is not None else "", infos[rank].local_rank, rank)

    parts = _group(sorted(node, key=place), domain_of.__getitem__)
    return [rank for part in parts for rank in part]


def _spell(infos: Sequence[HostInfo], ranks: Sequence[int], most: int = 4) -> str:
    """Hosts with the ranks meant, the first few of each."""
    hosts = _group(ranks, lambda rank: (infos[rank].host, _node(infos[rank])))
    words = []
    for host in hosts[:most]:
        few = " ".join(map(str, host[:most])) + (" ..." if len(host) > most else "")
        words.append(f"{infos[host[0]].host} (rank {few})")
    return ", ".join(words) + (f" and {len(hosts) - most} more" if len(hosts) > most else "")
