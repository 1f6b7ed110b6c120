"""What the machine is: nodes, the ranks of each, which of them share the fastest wire, and who sits where.

Every rank has a position. Positions go node by node and, inside a node, domain by domain; `order` says which rank sits
at each, so that a launcher may number ranks as it likes:

    Cluster(num_nodes=2, ranks_per_node=4, domain_size=2, order=(0, 2, 4, 6, 1, 3, 5, 7))

    position    0   1   2   3      4   5   6   7
    rank       [0   2] [4   6]    [1   3] [5   7]         [ ] a domain: its ranks share the fastest wire
               node 0             node 1

A domain may be smaller than a node (two GPUs on an NVLink bridge), a node (NVSwitch) or several nodes (an NVLink rack).
The larger of node and domain is an island: traffic inside it is "local", between islands "cross".
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal

from megazpp.flags import flag
from megazpp.topology.cluster_file import ClusterFile, cluster_file_text, read_cluster_file
from megazpp.topology.device import Device
from megazpp.topology.links import LinkKind, Links


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """How the cluster is described when it is not simply what the launcher says."""

    cluster_file: str | None = flag(
        None,
        "YAML file with nodes, ranks per node, fast domains, rank order and links (megazpp/topology/cluster_file.py)",
    )
    emulate_nodes: int | Literal["auto"] | None = flag(
        None,
        "treat the ranks of one machine as this many nodes of equal size; traffic is then counted as if; auto: 2 where "
        "the ranks of one machine divide into two nodes of whole tensor-parallel groups",
    )
    measure_links: bool = flag(
        False,
        "time all-gathers over each axis at start-up and show what its wire does: a few seconds on slow wires; the run "
        "folder's cluster.yaml keeps it for --cluster-file",
    )


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """`num_nodes` nodes of `ranks_per_node` ranks.

    Attributes:
        domain_size: ranks that share the fastest wire; None: the ranks of a node.
        order: the rank at each position; None: ranks are numbered by position.
        links: figures of the wires, where known.
        device: what a rank computes with, where a file says it.
        notices: lines to show.
    Raises:
        ValueError: domains that fit neither nodes nor the whole, or an order that is no order of all ranks; in the
            words of a cluster file.
    """

    num_nodes: int
    ranks_per_node: int
    domain_size: int | None = None
    order: tuple[int, ...] | None = None
    links: Links | None = None
    device: Device | None = None
    notices: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        fitting = nested_sizes(self.ranks_per_node, self.world_size)
        if self.domain_size not in (None, *fitting):
            raise ValueError(
                f"fast_domain {self.domain_size}: {self.num_nodes} node(s) of {self.ranks_per_node} rank(s) do not "
                f"divide into domains of that size; {', '.join(map(str, fitting))} would fit"
            )
        if self.order is not None:
            _check_order(self.order, self.world_size)

    @property
    def world_size(self) -> int:
        return self.num_nodes * self.ranks_per_node

    @property
    def ranks_per_domain(self) -> int:
        return self.ranks_per_node if self.domain_size is None else self.domain_size

    @property
    def island_size(self) -> int:
        """Ranks of an island, inside which traffic is "local"."""
        return max(self.ranks_per_domain, self.ranks_per_node)

    @property
    def num_islands(self) -> int:
        return self.world_size // self.island_size

    @property
    def is_block_order(self) -> bool:
        """Whether ranks are numbered by position."""
        return self.order is None or self.order == tuple(range(self.world_size))

    def rank_at(self, position: int) -> int:
        return position if self.order is None else self.order[position]

    def position_of(self, rank: int) -> int:
        return rank if self.order is None else self._positions[rank]

    def node_of(self, rank: int) -> int:
        return self.position_of(rank) // self.ranks_per_node

    def domain_of(self, rank: int) -> int:
        return self.position_of(rank) // self.ranks_per_domain

    def island_of(self, rank: int) -> int:
        return self.position_of(rank) // self.island_size

    def link_between(self, rank: int, other: int) -> LinkKind:
        """The wire between two ranks: the fastest one that both are on."""
        if self.domain_of(rank) == self.domain_of(other):
            return "domain"
        return "node" if self.island_of(rank) == self.island_of(other) else "network"

    @cached_property
    def _positions(self) -> tuple[int, ...]:
        assert self.order is not None
        positions = [0] * len(self.order)
        for position, rank in enumerate(self.order):
            positions[rank] = position
        return tuple(positions)


def nested_sizes(inner: int, total: int) -> list[int]:
    """Sizes of equal parts of `total` that are part of an `inner` or made of several; `inner` divides `total`."""
    parts = [size for size in range(1, inner + 1) if inner % size == 0]
    count = total // inner
    return parts + [inner * times for times in range(2, count + 1) if count % times == 0]


def _check_order(order: tuple[int, ...], world_size: int) -> None:
    if len(order) != world_size:
        raise ValueError(f"rank_order has {len(order)} ranks, the cluster {world_size}")
    seen: set[int] = set()
    for rank in order:
        if not 0 <= rank < world_size or rank in seen:
            problem = "appears twice" if rank in seen else f"is not one of the ranks 0 to {world_size - 1}"
            raise ValueError(f"rank_order: rank {rank} {problem}")
        seen.add(rank)


def read_cluster(path: str | Path) -> Cluster:
    """The cluster that a file describes.

    Raises:
        ValueError: naming the file, the key and the value.
    """
    file = read_cluster_file(path)
    try:
        return Cluster(
            num_nodes=file.nodes,
            ranks_per_node=file.ranks_per_node,
            domain_size=file.fast_domain,
            order=file.rank_order,
            links=file.links,
            device=file.device,
        )
    except ValueError as error:
        raise ValueError(f"--cluster-file {path}: {error}") from None


def cluster_text(cluster: Cluster) -> str:
    """What `read_cluster` reads back as the same cluster: what a run has found out, for the next plan; no notices."""
    size = (cluster.num_nodes, cluster.ranks_per_node, cluster.domain_size)
    return cluster_file_text(ClusterFile(*size, cluster.order, cluster.links, cluster.device))


def detect_cluster(
    world_size: int, config: ClusterConfig, env: Mapping[str, str] = os.environ, *, tp: int = 1
) -> Cluster:
    """The cluster of a file, an emulated one, or the one that a launcher's environment describes.

    Args:
        world_size: ranks of the job.
        config: `cluster_file` describes all of it; `emulate_nodes` splits one machine into several.
        env: LOCAL_WORLD_SIZE (torchrun, our launcher) or SLURM_NTASKS_PER_NODE give the ranks per node; without
            them the job is one node.
        tp: the tensor-parallel degree, whose groups `emulate_nodes` "auto" keeps whole.
    Raises:
        ValueError: the ranks do not divide into equal nodes, or are not those of the file.
    """
    if config.cluster_file is not None:
        return _cluster_of_file(config.cluster_file, config, world_size)
    if isinstance(config.emulate_nodes, int):
        if config.emulate_nodes < 1 or world_size % config.emulate_nodes:
            raise ValueError(
                f"--emulate-nodes {config.emulate_nodes} does not divide the {world_size} ranks of this job: a number "
                f"of nodes that would fit is {_one_of(nested_sizes(world_size, world_size))}; or change --nproc"
            )
        return Cluster(num_nodes=config.emulate_nodes, ranks_per_node=world_size // config.emulate_nodes)
    local = int(env.get("LOCAL_WORLD_SIZE") or env.get("SLURM_NTASKS_PER_NODE") or world_size)
    if world_size % local:
        name = "LOCAL_WORLD_SIZE" if env.get("LOCAL_WORLD_SIZE") else "SLURM_NTASKS_PER_NODE"
        raise ValueError(
            f"{world_size} ranks do not divide into nodes of {local} ({name}): nodes have to hold equally many ranks, "
            f"for instance {local} on each of {max(world_size // local, 1)} node(s)"
        )
    if config.emulate_nodes == "auto" and world_size == local:
        return _two_nodes_if_they_fit(world_size, tp)
    return Cluster(num_nodes=world_size // local, ranks_per_node=local)


def _cluster_of_file(path: str, config: ClusterConfig, world_size: int) -> Cluster:
    if isinstance(config.emulate_nodes, int):
        raise ValueError(
            f"--cluster-file {path} and --emulate-nodes {config.emulate_nodes} both say what the nodes are: give one"
        )
    cluster = read_cluster(path)
    if cluster.world_size != world_size:
        raise ValueError(
            f"--cluster-file {path}: nodes {cluster.num_nodes} x ranks_per_node {cluster.ranks_per_node} are "
            f"{cluster.world_size} ranks, the job has {world_size} (on one machine: --nproc {cluster.world_size})"
        )
    return cluster


def _one_of(sizes: list[int]) -> str:
    return ", ".join(map(str, sizes[:-1])) + f" or {sizes[-1]}" if len(sizes) > 1 else str(sizes[0])


def _two_nodes_if_they_fit(world_size: int, tp: int) -> Cluster:
    """One machine as two nodes, or as it is where a node would not hold whole tensor-parallel groups."""
    if tp < 1 or world_size % (2 * tp):
        notice = f"--emulate-nodes auto: {world_size} rank(s) on one machine stay one node (not 2 x tp {tp})"
        return Cluster(num_nodes=1, ranks_per_node=world_size, notices=(notice,))
    notice = f"--emulate-nodes auto: {world_size} ranks on one machine are treated as 2 nodes"
    return Cluster(num_nodes=2, ranks_per_node=world_size // 2, notices=(notice,))
