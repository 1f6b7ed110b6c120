"""`Cluster`: nodes, the placement of ranks on them, and the performance of links and devices.

A position is a place for one rank in the cluster. Positions are numbered node by node and, inside a node, domain by
domain. `Cluster.order` gives the rank at each position, so a launcher may number ranks in any way:

    Cluster(num_nodes=2, ranks_per_node=4, domain_size=2, order=(0, 2, 4, 6, 1, 3, 5, 7))

    position    0   1   2   3      4   5   6   7
    rank       [0   2] [4   6]    [1   3] [5   7]         [ ] a domain: ranks connected by the fastest kind of link
               node 0             node 1

A domain (elsewhere called fast domain) may be a part of a node (two GPUs with an NVLink bridge), a node (NVSwitch) or
several nodes (an NVLink rack). The local domain of a rank is its node or its domain, whichever is larger. Traffic
inside a local domain counts as "local" (usually intra-node), traffic between local domains as "cross" (inter-node).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

LinkKind = Literal["domain", "node", "network"]
LINK_KINDS: tuple[LinkKind, ...] = ("domain", "node", "network")  # kinds of links between ranks, the fastest kind first
# First word of `Link.source` if --measure-links has measured the link. A device whose speed --measure-links has
# measured has a calibration of this name.
MEASURED = "measured"
# Calibrations of --plan: types of GPUs, and "measured" for a device whose speed --measure-links has measured
CALIBRATION_NAMES = ("v100", "a100", "h100", "h100_500w", "h800", MEASURED)
MOST_RANKS = 1 << 20  # largest number of ranks; larger lists of ranks would take too much memory and time


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A cluster of equal nodes, with the placement of ranks and the performance of its links.

    Attributes:
        num_nodes: number of nodes.
        ranks_per_node: number of ranks on each node.
        domain_size: number of ranks in a fast domain, which the fastest kind of link connects; None if each node is a
            fast domain.
        order: rank at each position; None if each rank's number equals its position.
        links: bandwidth and latency of the known kinds of links; None if nothing is known.
        device: device of each rank; None if no cluster file describes it.
        host: host memory of each node; None if no cluster file describes it.
        notices: messages for the user about the cluster, printed at the start.
    Raises:
        ValueError: there are no ranks or more than MOST_RANKS; fast domains are neither equal parts of a node nor equal
            groups of whole nodes; or `order` is not a permutation of all ranks. Messages use a cluster file's keys.
    """

    num_nodes: int
    ranks_per_node: int
    domain_size: int | None = None
    order: tuple[int, ...] | None = None
    links: Links | None = None
    device: Device | None = None
    host: Host | None = None
    notices: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        sizes = f"nodes {self.num_nodes} x ranks_per_node {self.ranks_per_node}"
        if min(self.num_nodes, self.ranks_per_node) < 1:
            raise ValueError(f"{sizes}: a cluster needs at least one node and one rank per node")
        if self.world_size > MOST_RANKS:
            raise ValueError(f"{sizes}: a cluster can have at most {MOST_RANKS} ranks; lower one of the two numbers")
        domain = self.ranks_per_domain
        if domain not in (fitting := nested_sizes(self.ranks_per_node, self.world_size)):
            raise ValueError(
                f"fast_domain {domain}: {self.num_nodes} node(s) of {self.ranks_per_node} rank(s) cannot be divided "
                f"into fast domains of {domain} rank(s); possible sizes are {', '.join(map(str, fitting))}"
            )
        if self.order is not None:
            missing = set(range(self.world_size)).difference(self.order)
            if missing or len(self.order) != self.world_size:
                absent = f"; rank {min(missing)} is missing" if missing else ""
                raise ValueError(
                    f"rank_order lists {len(self.order)} ranks, but the cluster has {self.world_size}{absent}: "
                    "list each rank once"
                )

    @property
    def world_size(self) -> int:
        """The number of ranks in the cluster."""
        return self.num_nodes * self.ranks_per_node

    @property
    def ranks_per_domain(self) -> int:
        """The number of ranks in a fast domain, which the fastest kind of link connects."""
        return self.ranks_per_node if self.domain_size is None else self.domain_size

    @property
    def local_domain_size(self) -> int:
        """The number of ranks in a local domain: a node or a fast domain, whichever is larger."""
        return max(self.ranks_per_domain, self.ranks_per_node)

    @property
    def num_local_domains(self) -> int:
        """The number of local domains (nodes or fast domains, whichever are larger) in the cluster."""
        return self.world_size // self.local_domain_size

    @property
    def is_block_order(self) -> bool:
        """True if each rank's number equals its position, so that ranks are numbered node by node."""
        return self.order is None or self.order == tuple(range(self.world_size))

    def rank_at(self, position: int) -> int:
        """Return the rank at a position of the cluster. Positions are numbered node by node and domain by domain."""
        return position if self.order is None else self.order[position]

    def position_of(self, rank: int) -> int:
        """Return the position of a rank in the cluster. Positions are numbered node by node and domain by domain."""
        return rank if self.order is None else self._positions[rank]

    def node_of(self, rank: int) -> int:
        """Return the index of the node on which a rank is."""
        return self.position_of(rank) // self.ranks_per_node

    def domain_of(self, rank: int) -> int:
        """Return the index of the fast domain to which a rank belongs."""
        return self.position_of(rank) // self.ranks_per_domain

    def local_domain_of(self, rank: int) -> int:
        """Return the index of the local domain (node or fast domain, whichever is larger) to which a rank belongs."""
        return self.position_of(rank) // self.local_domain_size

    def link_between(self, rank: int, other: int) -> LinkKind:
        """Return the fastest kind of link that connects two ranks.

        The kind is "domain" inside a fast domain, "node" elsewhere inside a local domain, otherwise "network".
        """
        if self.domain_of(rank) == self.domain_of(other):
            return "domain"
        return "node" if self.local_domain_of(rank) == self.local_domain_of(other) else "network"

    @cached_property
    def _positions(self) -> dict[int, int]:
        """The position of each rank, by rank; empty if each rank's number equals its position (`order` is None)."""
        return {rank: position for position, rank in enumerate(self.order or ())}


def nested_sizes(inner: int, total: int) -> list[int]:
    """Return all divisors of `total` that are divisors or multiples of `inner`, ascending; `inner` must divide `total`.

    For example, these are the possible sizes of equal groups of ranks in a cluster of `total` ranks with `inner` ranks
    per node: each group is a fraction of a node, or several whole nodes.
    """
    return _divisors(inner) + [inner * times for times in _divisors(total // inner)[1:]]


def _divisors(number: int) -> list[int]:
    """Return all divisors of `number`, ascending."""
    small = [size for size in range(1, math.isqrt(max(number, 0)) + 1) if number % size == 0]
    return small + [number // size for size in reversed(small) if size * size != number]


class Link(NamedTuple):
    """Bandwidth and latency of one kind of link.

    Attributes:
        gigabytes_per_second: bandwidth in one direction, in 1e9 bytes per second. For the kinds "domain" and "node" it
            is the bandwidth of one rank, for "network" the bandwidth of one node with all its network adapters.
        microseconds: latency of a small message; None if unknown.
        source: origin of bandwidth and latency, for the log: "measured over AXIS", a data sheet, or a file.
    """

    gigabytes_per_second: float
    microseconds: float | None = None
    source: str = ""

    @property
    def is_measured(self) -> bool:
        """True if --measure-links measured the bandwidth; False for another source, such as a data sheet."""
        return self.source.startswith(MEASURED)

    def __str__(self) -> str:
        text = f"{self.gigabytes_per_second:.4g} GB/s"
        return text if self.microseconds is None else f"{text}, {self.microseconds:.4g} us"


class Links(NamedTuple):
    """The links of a cluster by kind; a field is None if nothing is known about links of that kind."""

    domain: Link | None = None  # the links between the ranks of a fast domain (NVLink, NVSwitch)
    node: Link | None = None  # the links between the fast domains of a node (PCIe, shared memory)
    network: Link | None = None  # the links between nodes, over the nodes' network adapters

    @property
    def known(self) -> dict[LinkKind, Link]:
        """The kinds of links that are known, each with its bandwidth and latency, fastest kind first."""
        return {kind: link for kind, link in zip(LINK_KINDS, self, strict=True) if link is not None}

    def describe(self) -> str:
        """Return a log line with bandwidth, latency and source of all known kinds of links."""
        texts = [f"{kind} {link} ({link.source or 'no source given'})" for kind, link in self.known.items()]
        return f"links: {'; '.join(texts) or 'none known'}"


class Host(NamedTuple):
    """The host memory of a node, in which --optimizer-cpu-offload keeps fp32 weights, moments and gradients."""

    gigabytes: float  # host memory of a node that is available to the job, in 1e9 bytes
    gigabytes_per_second: float  # bandwidth between host memory and one device, per direction, while all devices copy
    source: str = ""  # origin of the memory size and the bandwidth, for example a data sheet; "" if unknown


class Device(NamedTuple):
    """The speed and memory size of a GPU from its data sheet, or of a CPU rank from measurements.

    Only a CPU rank has the two rates of lossless deltas (encode, decode). A GPU encodes and decodes lossless deltas at
    the bandwidth of its memory.
    """

    name: str
    teraflops: float  # dense 16-bit peak rate, in 1e12 floating-point operations per second
    gigabytes: float  # size of the device's memory, in 1e9 bytes
    gigabytes_per_second: float  # bandwidth of the device's memory, in 1e9 bytes per second
    source: str = ""  # origin of the device's rates and memory size: a data sheet, or "measured: ..."
    # One of CALIBRATION_NAMES, which selects the fractions of the device's peak rates that --plan assumes as
    # achievable; None if unknown
    calibration: str | None = None
    price_per_hour: float | None = None  # price of one GPU, in any currency
    # Rates at which a CPU rank encodes lossless deltas, and updates weights by them, in 1e9 bytes of weights per second
    encode_gigabytes_per_second: float | None = None
    decode_gigabytes_per_second: float | None = None

    @property
    def is_cpu(self) -> bool:
        """True for a CPU rank, whose intra-node communication occupies the cores on which it computes."""
        return self.encode_gigabytes_per_second is not None
