"""Derivation of the cluster (nodes, fast domains, placement of ranks) from each rank's description of its host.

The ranks in one network namespace of one booted kernel form a node. Host names do not matter: two containers that share
kernel and namespace are one node, and a machine that is divided into network namespaces is several nodes.

Ranks whose GPUs are connected by NVLink form a fast domain inside a node. A multi-node NVLink fabric forms a domain of
whole nodes.

    ranks, placed by `srun -m cyclic`                resulting cluster
    host a: 0 2 4 6   (NVLink pairs 0-2, 4-6)        2 nodes x 4, domains of 2,
    host b: 1 3 5 7   (NVLink pairs 1-3, 5-7)        order 0 2 4 6 1 3 5 7

Inside a node, ranks are ordered by the PCI address of their GPU, or without GPUs by local rank. In clusters of equal
nodes, GPUs at equal positions then use the same rail (the network switch of one adapter per node).

This file handles only integers and strings. parallel/host_discovery.py queries the machine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

from megazpp.topology.cluster import Cluster

SWITCH = "switch"  # denotes an NVSwitch in the list of a GPU's NVLink peers
OVERRIDE = (
    "To override the detection, describe the machine with --cluster-file, or use --emulate-nodes N to group the ranks "
    "in their order into N nodes"
)


@dataclass(frozen=True)
class Gpu:
    """A rank's GPU as NVML describes it. Fields that NVML does not know are empty."""

    uuid: str
    name: str = ""  # product name
    pci: str = ""  # PCI address, for instance "0000:1b:00.0"
    fabric: str = ""  # multi-node NVLink domain, identified by the fabric's cluster UUID and clique ID
    nvlink_peers: tuple[str, ...] = ()  # PCI addresses of the GPUs to which NVLinks lead; `SWITCH` for NVSwitches


@dataclass(frozen=True, kw_only=True)
class HostInfo:
    """A rank's description of its host, from which rank 0 derives the cluster."""

    host: str  # name of the host
    boot_id: str = ""  # boot ID of the running kernel; empty if the system hides it
    network_namespace: int = 0  # inode of the process's network namespace; 0 if the system hides it
    local_rank: int = 0  # index of the rank on its node, assigned by the launcher
    gpu: Gpu | None = None  # GPU with which this rank computes and communicates; None if it communicates on the CPU
    notice: str = ""  # message for the user about unknown NVLink connections, or ""


def cluster_from_hosts(infos: Sequence[HostInfo]) -> Cluster:
    """Derive the cluster from the descriptions of all ranks' hosts.

    Args:
        infos: each rank's description of its host, by rank.
    Raises:
        ValueError: only some ranks have a GPU; two ranks use the same GPU; nodes or fast domains differ in their number
            of ranks; or a multi-node NVLink fabric includes only a part of a node. The message names the hosts and says
            which placement would work.
    """
    # ---- nodes: ranks with the same kernel and network namespace; all nodes must have the same number of ranks
    _check_gpus(infos)
    nodes = _group(range(len(infos)), lambda rank: _node(infos[rank]))
    sizes = Counter(map(len, nodes))
    if len(sizes) > 1:
        usual = max(sizes, key=lambda size: (sizes[size], size))
        listed = "; ".join(
            f"{size} on {_spell(infos, [rank for node in nodes if len(node) == size for rank in node])}"
            for size in sorted(sizes, reverse=True)
        )
        raise ValueError(
            f"the hosts differ in their number of ranks: {listed}. Start {min(sizes)} on each of the {len(nodes)} "
            f"hosts, or {usual} on each of {sizes[usual]} hosts"
        )

    # ---- fast domains: the groups of ranks that NVLink connects; the nodes, if NVLink connects no ranks
    keys: dict[int, Hashable] = {}
    for node in nodes:
        for rank, first in _joined(infos, node).items():
            gpu = infos[rank].gpu
            keys[rank] = gpu.fabric if gpu is not None and gpu.fabric else first
    domains = _group(range(len(infos)), keys.__getitem__)
    domains = nodes if all(len(domain) == 1 for domain in domains) else domains
    _check_domains(infos, nodes, domains)

    # ---- order of the positions: domains by their first rank, and ranks inside a domain by PCI address or local rank
    def place(rank: int) -> tuple[str, int, int]:
        """Return the key by which the ranks of a domain are sorted: PCI address of the GPU, local rank, rank."""
        gpu = infos[rank].gpu
        return (gpu.pci if gpu is not None else "", infos[rank].local_rank, rank)

    first_of_domain = {rank: domain[0] for domain in domains for rank in domain}
    nodes = sorted(nodes, key=lambda node: (min(first_of_domain[rank] for rank in node), node[0]))
    parts = [part for node in nodes for part in _group(sorted(node, key=place), first_of_domain.__getitem__)]
    order = tuple(rank for part in parts for rank in part)
    return Cluster(
        num_nodes=len(nodes),
        ranks_per_node=len(nodes[0]),
        domain_size=None if len(domains[0]) == len(nodes[0]) else len(domains[0]),
        order=None if order == tuple(range(len(infos))) else order,
    )


def describe_hosts(infos: Sequence[HostInfo]) -> str:
    """Return a log line with the hosts, the ranks on each, and the number of GPUs of each product name.

    `infos` has each rank's description of its host, by rank.
    """
    gpus = Counter(info.gpu.name for info in infos if info.gpu is not None)
    devices = ", ".join(f"{count} x {name}" for name, count in gpus.items()) or "no GPU"
    return f"hosts: {_spell(infos, range(len(infos)), 8)}; {devices}"


def spread_notices(infos: Sequence[HostInfo], cluster: Cluster) -> tuple[str, ...]:
    """Return a warning about the first node whose ranks are on several hosts; () if there is no such node.

    Args:
        infos: each rank's description of its host, by rank; empty on ranks other than 0, for which the result is ().
        cluster: the cluster that --cluster-file or --emulate-nodes describes.
    """
    order, size = cluster.order or range(len(infos)), cluster.ranks_per_node
    for node in range(cluster.num_nodes if infos else 0):
        ranks = order[node * size : (node + 1) * size]
        if len({_node(infos[rank]) for rank in ranks}) > 1:
            return (
                f"WARNING: node {node} of the cluster that --cluster-file or --emulate-nodes describes has "
                f"{_spell(infos, ranks)}: the messages between these hosts are counted, and planned, as if they stayed "
                "inside a node; correct the number or the order of the ranks, or leave the flag out",
            )
    return ()


def _node(info: HostInfo) -> Hashable:
    """Return the key of a rank's node: the boot ID of its kernel, and its network namespace.

    The host's name replaces the boot ID if the system hides the boot ID.
    """
    return (info.boot_id or info.host, info.network_namespace)


def _group(ranks: Iterable[int], key: Callable[[int], Hashable]) -> list[list[int]]:
    """Divide `ranks` into groups, for example nodes, and return the ranks of each group.

    Ranks for which the function `key` returns equal values form a group. The groups have the order in which their
    first ranks occur in `ranks`.
    """
    groups: dict[Hashable, list[int]] = {}
    for rank in ranks:
        groups.setdefault(key(rank), []).append(rank)
    return list(groups.values())


def _check_gpus(infos: Sequence[HostInfo]) -> None:
    """Raise a ValueError if only some ranks have a GPU, or if two ranks use the same GPU."""
    without = [rank for rank, info in enumerate(infos) if info.gpu is None]
    if without and len(without) < len(infos):
        having = [rank for rank, info in enumerate(infos) if info.gpu is not None]
        raise ValueError(
            f"some ranks have a GPU and others have none: a GPU on {_spell(infos, having)}; none on "
            f"{_spell(infos, without)}. Give every rank a GPU, or use --distributed-backend gloo"
        )
    used: dict[Hashable, int] = {}
    for rank, info in enumerate(infos):
        if info.gpu is not None:
            other = used.setdefault((_node(info), info.gpu.uuid), rank)
            if other != rank:
                raise ValueError(
                    f"ranks {other} and {rank} use the same GPU {info.gpu.uuid} of {info.host}. Start one rank per "
                    "GPU, and give each rank a different GPU (CUDA_VISIBLE_DEVICES, srun --gpus-per-task)"
                )


def _joined(infos: Sequence[HostInfo], node: list[int]) -> dict[int, int]:
    """Find the ranks of a node that NVLink connects: map each rank of the node to the lowest rank of its NVLink group.

    Two ranks are in one group if NVLinks connect their GPUs directly, over the GPUs of other ranks, or over a switch. A
    rank without such links is a group of its own.

    Args:
        infos: each rank's description of its host, by rank.
        node: ranks of the node.
    """
    # `by_end` maps the end of an NVLink to a rank of this node: the PCI address of a GPU to the rank that uses the GPU,
    # and SWITCH to the first rank with NVLinks to a switch. A GPU that no rank uses joins no ranks.
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
    """Raise a ValueError if fast domains differ in size, or if a domain spans several nodes but not all their ranks.

    Args:
        infos: each rank's description of its host, by rank.
        nodes: ranks of each node.
        domains: ranks of each fast domain.
    """
    sizes = Counter(map(len, domains))
    if len(sizes) > 1:
        odd = min(sizes, key=lambda size: (sizes[size], size))
        ranks = [rank for domain in domains if len(domain) == odd for rank in domain]
        listed = ", ".join(f"{count} of {size} ranks" for size, count in sorted(sizes.items(), reverse=True))
        raise ValueError(
            f"NVLink connects the ranks into domains of different sizes: {listed}. The domains of {odd} rank(s) are on "
            f"{_spell(infos, ranks)}. Start {min(sizes)} rank(s) in every domain. {OVERRIDE}"
        )
    node_of = {rank: number for number, node in enumerate(nodes) for rank in node}
    for domain in domains:
        touched = {node_of[rank] for rank in domain}
        if len(touched) > 1 and len(domain) != len(touched) * len(nodes[0]):
            raise ValueError(
                f"a multi-node NVLink domain has {len(domain)} ranks on {len(touched)} hosts with {len(nodes[0])} "
                f"ranks each, so it includes only a part of a host: {_spell(infos, domain)}. Only domains of whole "
                f"hosts are supported. {OVERRIDE}"
            )


def _spell(infos: Sequence[HostInfo], ranks: Sequence[int], most: int = 4) -> str:
    """Return the hosts of `ranks`, and the ranks on each host, as text: "alpha (rank 0 1), beta (rank 2 3) and 2 more".

    The text names at most `most` hosts, and at most `most` ranks of each host.
    """
    hosts = _group(ranks, lambda rank: (infos[rank].host, _node(infos[rank])))
    words = []
    for host in hosts[:most]:
        few = " ".join(map(str, host[:most])) + (" ..." if len(host) > most else "")
        words.append(f"{infos[host[0]].host} (rank {few})")
    return ", ".join(words) + (f" and {len(hosts) - most} more" if len(hosts) > most else "")
