"""The layout of ranks: pure integers, from a cluster and the parallel degrees to mesh coordinates.

Positions (topology/cluster.py) go node by node and domain by domain, so neighbours share the fastest wire. The
innermost positions go to tensor parallelism, the rest of a local domain (node or fast domain, the larger) to the local
axis, local domains to the cross axis (ranks with the same local index: one rail), groups of these to replicas, and
groups of replicas to islands, which take local steps (diloco/outer.py). Context parallelism splits samples among
neighbours of the same tp index: a cp group is `cp` of a shard group's ranks that follow each other (of replicas, where
shards have one rank). Parameters are sharded over all of them as they are without it.

    position = (((island * replicate + replica) * cross + domain in replica) * local + local index) * tp + tp index

    2 nodes x 4 ranks, tp 2      block order: node 0: [0 1] [2 3]     cyclic order: node 0: [0 2] [4 6]
                                              node 1: [4 5] [6 7]                   node 1: [1 3] [5 7]
        tp groups                {0 1} {2 3} {4 5} {6 7}              {0 2} {4 6} {1 3} {5 7}
        local groups             {0 2} {1 3} {4 6} {5 7}              {0 4} {2 6} {1 5} {3 7}
        cross groups             {0 4} {1 5} {2 6} {3 7}              {0 1} {2 3} {4 5} {6 7}
        shard groups             {0 2 4 6} {1 3 5 7}                  {0 4 1 5} {2 6 3 7}     shard = cross x local

A rank's index along shard is cross index x local size + local index, whatever the order (zero/gather.py relies on it).
Tensor parallelism over more ranks than a local domain has takes whole ones; the local axis then has one rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from megazpp.base.flags import wrong_types
from megazpp.topology.cluster import LINK_KINDS, Cluster, LinkKind, nested_sizes

AXES = ("tp", "cp", "local", "cross", "shard", "replicate", "island")
NODE = "node"  # tp x local: the ranks of a node that share a copy of the model; only Muon's traffic has this axis
DATA_AXES = ("shard", "local", "cross")  # those that weights and gradients travel on, whole or in two hops
WIRES = ("tp", "local", "cross")  # what bytes are counted by: those of other axes go over one of these
COORDINATES = ("replicate", "cross", "local", "tp")  # of a rank in its island, outermost first
CLUSTER_SIZES = ("num_nodes", "ranks_per_node", "domain_size")


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Mesh sizes, outermost first; a rank's coordinates follow from its position in the cluster."""

    cluster: Cluster
    replicate: int
    cross: int
    local: int
    tp: int
    island: int = 1
    cp: int = 1
    ep: int = 1

    @property
    def shard(self) -> int:
        """Ranks that the parameters, gradients and moments of one model copy are spread over."""
        return self.cross * self.local

    @property
    def data(self) -> int:
        """Ranks that see different samples."""
        return self.island * self.replicate * self.shard // self.cp

    def for_experts(self) -> Layout:
        """Return the layout of the experts' parameters, on the same ranks.

        `ep` neighboring ranks of a node take the place of tensor parallelism: each holds other experts, whole. The
        remaining ranks of tp x local are the local axis. All outer axes stay as they are.
        """
        inside = self.tp * self.local
        assert inside % self.ep == 0, f"{self.ep} expert-parallel ranks of {inside}"
        return replace(self, tp=self.ep, local=inside // self.ep, cp=1, ep=1)

    @property
    def coordinates(self) -> tuple[str, ...]:
        """The axes that tell ranks apart, outermost first."""
        return ("island", *COORDINATES) if self.island > 1 else COORDINATES

    def axis_size(self, axis: str) -> int:
        return self._stride_and_size(axis)[1]

    def axis_ranks(self, axis: str, rank: int) -> tuple[int, ...]:
        """The global ranks of the group of `axis` that `rank` belongs to, in axis order.

        `axis` is "tp", "cp", "local", "cross", "shard" (cross x local), "replicate", "island" or "node" (local x tp).
        """
        return self._group(axis, self.cluster.position_of(rank))

    def axis_groups(self, axis: str) -> Iterator[tuple[int, ...]]:
        """Every group of `axis` once, each in axis order; all ranks get them in the same order."""
        stride, size = self._stride_and_size(axis)
        for block in range(0, self.cluster.world_size, stride * size):
            for first in range(block, block + stride):
                yield self._group(axis, first)

    def mesh_ranks(self) -> tuple[int, ...]:
        """All ranks in the order of a mesh [replicate, shard, tp]."""
        return self.cluster.order or tuple(range(self.cluster.world_size))

    @property
    def groups_ascend(self) -> bool:
        """True if the ranks of every group ascend in axis order, as torch's process groups have them by default."""
        return self.cluster.is_block_order or all(
            list(group) == sorted(group) for axis in AXES for group in self.axis_groups(axis)
        )

    def link(self, axis: str, rank: int) -> LinkKind:
        """The link from `rank` to its successor in the ring of `axis`."""
        stride, size = self._stride_and_size(axis)
        position = self.cluster.position_of(rank)
        index = position // stride % size
        successor = position + ((index + 1) % size - index) * stride
        return self.cluster.link_between(rank, self.cluster.rank_at(successor))

    def links(self, axis: str) -> dict[LinkKind, int]:
        """Ranks that send over each kind of link in the rings of `axis`, fastest kind first; {} for an axis of 1."""
        if self.axis_size(axis) == 1:
            return {}
        cluster, sizes = self.cluster, (self.cluster.ranks_per_domain, self.cluster.local_domain_size)
        return _by_kind(cluster.world_size, *(self._rings_inside(axis, size) for size in sizes))

    def hops(self, axis: str) -> dict[LinkKind, int]:
        """The links from each rank of rank 0's group of `axis` to the next, without the one that closes the ring."""
        (stride, size), position = self._stride_and_size(axis), self.cluster.position_of(0)
        first = position - position // stride % size * stride
        last = first + (size - 1) * stride

        parts = (self.cluster.ranks_per_domain, self.cluster.local_domain_size)  # a link is inside one, or between two
        inside = (size - 1 - (last // part - first // part) if stride < part else 0 for part in parts)
        return _by_kind(size - 1, *inside)

    def wire(self, axis: str, rank: int) -> str:
        """The wire on which `rank`'s traffic along `axis` is counted: "tp", "local" or "cross" (between domains)."""
        if self.link(axis, rank) == "network":
            return "cross"
        return "tp" if axis == "tp" else "local"

    @property
    def notices(self) -> tuple[str, ...]:
        """Lines where context parallelism leaves a node, or tensor parallelism the fastest wire, with the prices."""
        cluster, tp, cp = self.cluster, self.tp, self.cp
        across: tuple[str, ...] = ()
        if "network" in self.links("cp"):
            price = f"each rank sends {16 * (cp - 1) / cp / tp:g} x --hidden-size bytes per token of its own and layer"
            across = (f"warning: --context-parallel-size {cp} spans {local_domains(cluster)}: {price} in 16 bit",)
        if cluster.ranks_per_domain % tp == 0:
            return across
        flag, size = f"--tensor-model-parallel-size {tp}", cluster.local_domain_size
        price = f"each rank sends {16 * (tp - 1) / tp:g} x --hidden-size bytes per token and layer in 16 bit"
        if tp > size:
            spans = f"{tp // size} {local_domains(cluster)} of {size} ranks"
            return (*across, f"warning: {flag} spans {spans}: {price}, and as much crosses each of their uplinks")
        return (
            *across,
            f"{flag} does not fit into the {cluster.ranks_per_domain} ranks that share the fastest wire, so tensor "
            f"parallelism also takes the slower links of a node: {price}",
        )

    def describe(self) -> str:
        """One line for the log."""
        c = self.cluster
        domains = f" (fastest wire among {c.ranks_per_domain})" if c.ranks_per_domain != c.ranks_per_node else ""
        first, more = " ".join(map(str, self.mesh_ranks()[:8])), " ..." if c.world_size > 8 else ""
        order = "" if c.is_block_order else f", ranks in the order {first}{more}"
        return (
            f"{c.num_nodes} node(s) x {c.ranks_per_node} rank(s){domains}{order}: tensor parallel {self.tp}, "
            + (f"context parallel {self.cp}, " if self.cp > 1 else "")
            + (f"expert parallel {self.ep}, " if self.ep > 1 else "")
            + f"shards {self.shard} ({self.cross} across {local_domains(c)} x {self.local} inside), replicas "
            f"{self.replicate}" + (f", islands {self.island}" if self.island > 1 else "")
        )

    def _rings_inside(self, axis: str, part: int) -> int:
        """The number of ranks whose successors in the rings of `axis` are in the same part of `part` positions."""
        stride, size = self._stride_and_size(axis)
        span, world = stride * size, self.cluster.world_size
        if part % span == 0:
            return world
        if span % part == 0:
            return world // part * max(part - stride, 0)
        period = math.lcm(span, part)
        successors = (p + stride if p // stride % size < size - 1 else p + stride - span for p in range(period))
        return world // period * sum(p // part == other // part for p, other in enumerate(successors))

    def _group(self, axis: str, position: int) -> tuple[int, ...]:
        stride, size = self._stride_and_size(axis)
        first = position - position // stride % size * stride
        positions = range(first, first + size * stride, stride)
        order = self.cluster.order
        return tuple(positions) if order is None else tuple(order[position] for position in positions)

    def _stride_and_size(self, axis: str) -> tuple[int, int]:
        """Positions between neighbours along `axis`, and its ranks."""
        return {
            "tp": (1, self.tp),
            "cp": (self.tp, self.cp),
            "local": (self.tp, self.local),
            "cross": (self.tp * self.local, self.cross),
            "shard": (self.tp, self.shard),
            "replicate": (self.tp * self.shard, self.replicate),
            NODE: (1, self.tp * self.local),
            "island": (self.tp * self.shard * self.replicate, self.island),
        }[axis]


def plan_layout(
    cluster: Cluster,
    *,
    tp: int,
    replicas: int,
    islands: int = 1,
    cp: int = 1,
    cp_across: bool = False,
    ep: int = 1,
) -> Layout:
    """Fit the degrees onto the cluster.

    Args:
        tp: tensor-parallel degree: divides a local domain, or is made of whole ones.
        replicas: copies of the sharded model in an island (HSDP); its data ranks for unsharded data parallelism.
        islands: parts of the cluster that train a model each: whole local domains.
        cp: context-parallel degree: divides the ranks of a local domain that share a tensor-parallel index; with
            `cp_across` it may also be made of all of those of several domains.
        ep: expert-parallel degree: divides the ranks of a local domain that share a copy of the model.
    Raises:
        ValueError: a degree does not divide what it splits; the message names the flag and what would fit.
    """
    domain, world = cluster.local_domain_size, cluster.world_size
    assert cluster.num_local_domains % islands == 0, f"{islands} islands of {cluster.num_local_domains} local domains"
    of_island = world // islands
    if tp < 1 or (domain % tp and (tp % domain or of_island % tp)):
        raise ValueError(
            f"--tensor-model-parallel-size {tp} must divide the {domain} ranks of a {local_domains(cluster)[:-1]} or "
            f"span whole ones ({cluster.num_nodes} node(s) x {cluster.ranks_per_node} ranks"
            + (f", {islands} islands" if islands > 1 else "")
            + f"); {numbers(nested_sizes(domain, of_island))} would fit"
            + (f", or a multiple of {tp} ranks on each node (--nproc)" if tp > 1 else "")
        )
    per_domain = max(domain // tp, 1)
    data = of_island // tp
    inside, beyond = nested_sizes(per_domain, per_domain), nested_sizes(per_domain, data)
    if cp not in (beyond if cp_across else inside):
        more = [size for size in beyond if size not in inside]
        raise ValueError(
            f"--context-parallel-size {cp} does not divide the {per_domain} ranks of a {local_domains(cluster)[:-1]} "
            f"that --tensor-model-parallel-size {tp} leaves; {numbers(inside)} would fit"
            + (f", and {numbers(more)} with --allow-cp-across-nodes" if more and not cp_across else "")
        )
    fitting = [data // size for size in reversed(nested_sizes(per_domain, data))]
    if replicas not in fitting:
        raise ValueError(
            f"--num-distributed-optimizer-instances {replicas} does not divide the {data} data ranks into equal copies "
            f"that are whole {local_domains(cluster)} or an even part of one ({per_domain} data ranks each); "
            f"{numbers(fitting)} would fit"
        )
    local = min(data // replicas, per_domain)
    cross = data // replicas // local
    if ep not in (fitting := nested_sizes(min(tp * local, domain), min(tp * local, domain))):
        raise ValueError(
            f"--expert-model-parallel-size {ep} does not divide the {min(tp * local, domain)} ranks of a "
            f"{local_domains(cluster)[:-1]} that share a copy of the model; {numbers(fitting)} would fit"
        )
    return Layout(cluster=cluster, replicate=replicas, cross=cross, local=local, tp=tp, island=islands, cp=cp, ep=ep)


def layout_record(layout: Layout) -> dict[str, Any]:
    """The integers that a layout follows from, as JSON has them; figures of links and devices are left out."""
    cluster = {name: getattr(layout.cluster, name) for name in (*CLUSTER_SIZES, "order")}
    names = (*layout.coordinates, *(axis for axis in ("cp", "ep") if getattr(layout, axis) > 1))
    return cluster | {name: getattr(layout, name) for name in names}


def layout_from_record(record: Mapping[str, Any]) -> Layout:
    """The layout that a record was made of.

    Raises:
        ValueError: a field is missing or no integer, or the sizes do not fit each other.
    """
    of_cluster: dict[str, Any] = {name: record.get(name) for name in (*CLUSTER_SIZES, "order")}
    of_layout: dict[str, Any] = {name: record.get(name) for name in COORDINATES}
    of_layout |= {name: record.get(name, 1) for name in ("island", "cp", "ep")}
    if wrong_types(Cluster, of_cluster) or wrong_types(Layout, of_layout):
        raise ValueError(f"{dict(record)} is no record of a layout")
    order = of_cluster["order"]
    cluster = Cluster(**of_cluster | {"order": order and tuple(order)})
    layout = Layout(cluster=cluster, **of_layout)
    if min(of_layout.values()) < 1 or layout.data * layout.cp * layout.tp != cluster.world_size:
        sizes = " x ".join(map(str, of_layout.values()))
        raise ValueError(f"axes of {sizes} ranks are not the {cluster.world_size} of the cluster")
    return layout


def _by_kind(total: int, in_domain: int, in_local_domain: int) -> dict[LinkKind, int]:
    counts = (in_domain, in_local_domain - in_domain, total - in_local_domain)
    return {kind: count for kind, count in zip(LINK_KINDS, counts, strict=True) if count}


def local_domains(cluster: Cluster) -> str:
    return "nodes" if cluster.local_domain_size == cluster.ranks_per_node else "domains"


def numbers(values: list[int]) -> str:
    return ", ".join(map(str, values))
