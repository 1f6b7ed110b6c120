"""The layout: a rank's coordinates on all mesh axes, computed from the cluster and the parallel degrees.

A position is a place for one rank. Positions are numbered node by node and domain by domain (topology/cluster.py), so
the fastest links connect neighboring positions. The axes are nested, innermost first:

    tp             consecutive positions
    local          the tensor-parallel groups of a local domain (a node or a fast domain, whichever is larger)
    cross          ranks of different local domains with the same local index and the same tensor-parallel index. They
                   use the same rail: network adapters with equal numbers in their nodes, which one switch connects
    replicate      copies of the sharded model
    replica_group  groups that each train a copy of the model with DiLoCo (diloco/outer.py)

    position = (((group * replicate + replica) * cross + domain in replica) * local + local index) * tp + tp index

Context parallelism (cp) splits each sample over consecutive ranks of a shard group, or over replicas if a shard group
has one rank. Parameters are sharded over all ranks of the shard group, as without context parallelism.

    2 nodes x 4 ranks, tp 2      block order: node 0: [0 1] [2 3]     cyclic order: node 0: [0 2] [4 6]
                                              node 1: [4 5] [6 7]                   node 1: [1 3] [5 7]
        tp groups                {0 1} {2 3} {4 5} {6 7}              {0 2} {4 6} {1 3} {5 7}
        local groups             {0 2} {1 3} {4 6} {5 7}              {0 4} {2 6} {1 5} {3 7}
        cross groups             {0 4} {1 5} {2 6} {3 7}              {0 1} {2 3} {4 5} {6 7}
        shard groups             {0 2 4 6} {1 3 5 7}                  {0 4 1 5} {2 6 3 7}     shard = cross x local

A rank's index along shard is (cross index) x (local size) + (local index), no matter how the launcher numbers the
ranks; zero/gather.py relies on this. If the tensor-parallel degree exceeds the ranks of a local domain, tensor
parallelism spans several whole local domains, and the local axis has one rank.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from megazpp.topology.cluster import LINK_KINDS, Cluster, LinkKind

AXES = ("tp", "cp", "local", "cross", "shard", "replicate", "replica_group")
NODE = "node"  # axis tp x local: the ranks of a node that share a model copy; only Muon communicates along it
EXPERT_AXES = ("ep", "expert local", "expert shard")  # axes of experts' parameters, see `Layout.for_experts`
# Axes that communicate weights and gradients: shard in one ring, or local and cross in two hops
DATA_AXES = ("shard", "local", "cross")
WIRES = ("tp", "local", "cross")  # classes of counted traffic; what is sent along an axis of AXES counts under these
PCIE, HOST = "pcie", "host"  # wire and axis of copies between a device and host memory (--optimizer-cpu-offload)
UPLOAD, DOWNLOAD = "upload", "download"  # copies to the device, and copies from the device, in the byte counts
# Names of the wires, and of the traffic between DiLoCo's replica groups, in the log and in reports
WIRE_NAMES = {"tp": "tp", "local": "intra-node", "cross": "inter-node", "replica_group": "replica-group", PCIE: "PCIe"}
COORDINATES = ("replicate", "cross", "local", "tp")  # coordinates of a rank in its replica group, outermost first


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The sizes of the mesh axes on a cluster. A rank's coordinates follow from its position, see the top of this file.

    Attributes:
        cluster: nodes and placement of ranks.
        replicate: number of copies of the sharded model in a replica group.
        cross: number of local domains (nodes, or larger fast domains) over which a copy is sharded.
        local: number of shards inside a local domain.
        tp: tensor-parallel degree.
        replica_group: number of DiLoCo's replica groups; 1 without DiLoCo.
        cp: context-parallel degree.
        ep: expert-parallel degree; the experts' parameters use the layout `for_experts`.
    """

    cluster: Cluster
    replicate: int
    cross: int
    local: int
    tp: int
    replica_group: int = 1
    cp: int = 1
    ep: int = 1

    @property
    def shard(self) -> int:
        """The number of ranks over which the parameters, gradients and moments of a model copy are sharded."""
        return self.cross * self.local

    @property
    def data(self) -> int:
        """The data-parallel size: the number of equal parts into which the samples of each global batch are split."""
        return self.replica_group * self.replicate * self.shard // self.cp

    def for_experts(self) -> Layout:
        """Return the layout of the parameters of a mixture of experts, on the same ranks.

        In the result the field `tp` is the expert-parallel degree: `ep` neighboring ranks of a node hold different
        experts, and no expert is split. The local axis has tp x local / ep ranks. The outer axes do not change.
        """
        inside = self.tp * self.local
        assert inside % self.ep == 0, f"{self.ep} expert-parallel ranks of {inside}"
        return replace(self, tp=self.ep, local=inside // self.ep, cp=1, ep=1)

    @property
    def has_expert_axes(self) -> bool:
        """True if the axes of experts' parameters have other ranks than the axes of all other parameters."""
        return self.ep != self.tp

    @property
    def coordinates(self) -> tuple[str, ...]:
        """The names of the axes whose indices identify a rank, outermost first."""
        return ("replica_group", *COORDINATES) if self.replica_group > 1 else COORDINATES

    def axis_size(self, axis: str) -> int:
        """Return the number of ranks in a group of `axis`."""
        return self._stride_and_size(axis)[1]

    def axis_ranks(self, axis: str, rank: int) -> tuple[int, ...]:
        """Return the global ranks of the group of `axis` that contains `rank`, in axis order.

        `axis` is one of `AXES`, `EXPERT_AXES` or "node" (local x tp). The axis "shard" is cross x local.
        """
        return self._group(axis, self.cluster.position_of(rank))

    def axis_groups(self, axis: str) -> Iterator[tuple[int, ...]]:
        """Yield the global ranks of each process group along `axis`, as a tuple in axis order.

        The groups together contain every rank of the job once. Their order is the same on all ranks.
        """
        stride, size = self._stride_and_size(axis)
        for block in range(0, self.cluster.world_size, stride * size):
            for first in range(block, block + stride):
                yield self._group(axis, first)

    def mesh_ranks(self) -> tuple[int, ...]:
        """Return all ranks in the order of the flattened device mesh [replica_group, replicate, shard, tp]."""
        return self.cluster.order or tuple(range(self.cluster.world_size))

    @property
    def groups_ascend(self) -> bool:
        """True if the ranks of all groups of all axes ascend. torch before 2.13 supports only such process groups."""
        return self.cluster.is_block_order or all(
            list(group) == sorted(group) for axis in AXES for group in self.axis_groups(axis)
        )

    def link(self, axis: str, rank: int) -> LinkKind:
        """Return the kind of link from `rank` to its successor in the ring of `axis`."""
        stride, size = self._stride_and_size(axis)
        position = self.cluster.position_of(rank)
        index = position // stride % size
        successor = position + ((index + 1) % size - index) * stride
        return self.cluster.link_between(rank, self.cluster.rank_at(successor))

    def links(self, axis: str) -> dict[LinkKind, int]:
        """Return how many ranks of the cluster send over each kind of link in the rings of `axis`, by kind.

        The fastest kind is first. Kinds over which no rank sends are left out, so the result is {} for an axis of one
        rank.
        """
        if self.axis_size(axis) == 1:
            return {}
        cluster, sizes = self.cluster, (self.cluster.ranks_per_domain, self.cluster.local_domain_size)
        return _by_kind(cluster.world_size, *(self._rings_inside(axis, size) for size in sizes))

    def hops(self, axis: str) -> dict[LinkKind, int]:
        """Return how many links of each kind connect consecutive ranks in rank 0's group of `axis`, a chain of ranks.

        Kinds without links are left out. In contrast to a ring, no link leads from the last rank to the first rank.
        """
        (stride, size), position = self._stride_and_size(axis), self.cluster.position_of(0)
        first = position - position // stride % size * stride
        last = first + (size - 1) * stride

        # Count the links of the chain whose two ranks are in the same domain, first for fast domains, then for local
        # domains. These are all links except those that cross a border between domains. If neighbors in the chain are
        # at least a domain apart, all links cross a border.
        parts = (self.cluster.ranks_per_domain, self.cluster.local_domain_size)
        inside = (size - 1 - (last // part - first // part) if stride < part else 0 for part in parts)
        return _by_kind(size - 1, *inside)

    def wire(self, axis: str, rank: int) -> str:
        """Return the wire, the class of traffic under which the bytes that `rank` sends along `axis` are counted.

        The wire is "cross" if the rank sends to another local domain, else "tp" for the axis tp, and "local" for all
        other axes.
        """
        return _wire(axis, self.link(axis, rank))

    def wires(self, axis: str, rank: int) -> tuple[str, ...]:
        """Return the wire from `rank` to each rank of its group of `axis`, in axis order.

        The bytes of an all-to-all, in which a rank sends to every other rank, are counted under these wires. The entry
        of `rank` itself has no meaning.
        """
        return tuple(_wire(axis, self.cluster.link_between(rank, other)) for other in self.axis_ranks(axis, rank))

    def network_share(self, axis: str) -> float:
        """Return the fraction of an all-to-all's bytes that crosses the network, as a mean over all ranks.

        In an all-to-all, each rank of a group of `axis` sends equal parts to all other ranks of the group.
        """
        (stride, size), part = self._stride_and_size(axis), self.cluster.local_domain_size
        span, far = stride * size, 0
        if size == 1 or part % span == 0:  # every group is inside one local domain
            return 0.0
        if stride % part == 0:  # all ranks of a group are in different local domains
            return 1.0
        # In the general case the pattern of groups and local domains repeats after the least common multiple of their
        # sizes. Count the pairs of ranks in different local domains in one such period.
        period = math.lcm(span, part)
        for first in (block + offset for block in range(0, period, span) for offset in range(stride)):
            together = Counter(position // part for position in range(first, first + span, stride))
            far += sum(inside * (size - inside) for inside in together.values())
        return far / (period * (size - 1))

    @property
    def notices(self) -> tuple[str, ...]:
        """Messages for the user if tensor or context parallelism uses slow links, with the bytes that this costs."""
        cluster, tp, cp = self.cluster, self.tp, self.cp
        across: tuple[str, ...] = ()
        if "network" in self.links("cp"):
            price = f"each rank sends {16 * (cp - 1) / cp / tp:g} x --hidden-size bytes per layer and local token"
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
            f"{flag} does not fit into the {cluster.ranks_per_domain} ranks that the fastest links connect, so tensor "
            f"parallelism also uses slower links inside a node: {price}",
        )

    def describe(self) -> str:
        """Return a log line with the cluster and the size of each axis."""
        c = self.cluster
        domains = f" (fastest links among {c.ranks_per_domain})" if c.ranks_per_domain != c.ranks_per_node else ""
        first, more = " ".join(map(str, self.mesh_ranks()[:8])), " ..." if c.world_size > 8 else ""
        order = "" if c.is_block_order else f", ranks in the order {first}{more}"
        return (
            f"{c.num_nodes} node(s) x {c.ranks_per_node} rank(s){domains}{order}: tensor parallel {self.tp}, "
            + (f"context parallel {self.cp}, " if self.cp > 1 else "")
            + (f"expert parallel {self.ep}, " if self.ep > 1 else "")
            + f"shards {self.shard} ({self.cross} across {local_domains(c)} x {self.local} inside), replicas "
            f"{self.replicate}" + (f", replica groups {self.replica_group}" if self.replica_group > 1 else "")
        )

    def _rings_inside(self, axis: str, part: int) -> int:
        """Return how many ranks of the cluster send to a rank of their own domain in the rings of `axis`.

        Args:
            axis: name of the axis.
            part: number of positions in a domain, either a fast domain or a local domain.
        """
        stride, size = self._stride_and_size(axis)
        span, world = stride * size, self.cluster.world_size
        if part % span == 0:  # every ring lies inside one domain, so each rank sends inside its domain
            return world
        # Neighbors in a ring are `stride` positions apart, so `stride` rings interleave. If these rings together occupy
        # whole domains, the last `stride` ranks of each domain send to another domain.
        if span % part == 0:
            return world // part * max(part - stride, 0)
        # In the general case the pattern of rings and domains repeats after the least common multiple of their sizes.
        # Count the ranks that send inside their domain in one such period, and multiply by the number of periods.
        period = math.lcm(span, part)
        successors = (p + stride if p // stride % size < size - 1 else p + stride - span for p in range(period))
        return world // period * sum(p // part == other // part for p, other in enumerate(successors))

    def _group(self, axis: str, position: int) -> tuple[int, ...]:
        """Return the global ranks of the group of `axis` that contains `position`, in axis order."""
        stride, size = self._stride_and_size(axis)
        first = position - position // stride % size * stride
        positions = range(first, first + size * stride, stride)
        order = self.cluster.order
        return tuple(positions) if order is None else tuple(order[position] for position in positions)

    def _stride_and_size(self, axis: str) -> tuple[int, int]:
        """Return the distance in positions between neighbors along `axis`, and the number of ranks along `axis`."""
        return {
            "tp": (1, self.tp),
            "cp": (self.tp, self.cp),
            "local": (self.tp, self.local),
            "cross": (self.tp * self.local, self.cross),
            "shard": (self.tp, self.shard),
            "replicate": (self.tp * self.shard, self.replicate),
            NODE: (1, self.tp * self.local),
            "ep": (1, self.ep),
            "expert local": (self.ep, self.tp * self.local // self.ep),
            "expert shard": (self.ep, self.tp * self.shard // self.ep),
            "replica_group": (self.tp * self.shard * self.replicate, self.replica_group),
        }[axis]


def _wire(axis: str, link: LinkKind) -> str:
    """Return the wire, the class of counted traffic, of bytes that are sent along `axis` over the link kind `link`."""
    if link == "network":
        return "cross"
    return "tp" if axis == "tp" else "local"


def _by_kind(total: int, in_domain: int, in_local_domain: int) -> dict[LinkKind, int]:
    """Return the number of links of each kind in the rings or the chain of an axis, by kind, fastest kind first.

    Kinds without links are left out.

    Args:
        total: number of all links between neighbors along the axis.
        in_domain: number of these links whose two ranks are in one fast domain.
        in_local_domain: number of these links whose two ranks are in one local domain (a node or a fast domain,
            whichever is larger). It includes `in_domain`.
    """
    counts = (in_domain, in_local_domain - in_domain, total - in_local_domain)
    return {kind: count for kind, count in zip(LINK_KINDS, counts, strict=True) if count}


def local_domains(cluster: Cluster) -> str:
    """Return the word for the cluster's local domains in messages: "nodes", or "domains" if they span several nodes."""
    return "nodes" if cluster.local_domain_size == cluster.ranks_per_node else "domains"
