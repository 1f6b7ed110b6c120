"""The machine: nodes, the ranks of each and their positions, and the figures of wires and devices.

Every rank has a position. Positions go node by node and, inside a node, domain by domain; `order` says which rank sits
at each, so that a launcher may number ranks as it likes:

    Cluster(num_nodes=2, ranks_per_node=4, domain_size=2, order=(0, 2, 4, 6, 1, 3, 5, 7))

    position    0   1   2   3      4   5   6   7
    rank       [0   2] [4   6]    [1   3] [5   7]         [ ] a domain: its ranks share the fastest wire
               node 0             node 1

A domain may be smaller than a node (two GPUs on an NVLink bridge), a node (NVSwitch) or several nodes (an NVLink rack).
The larger of node and domain is the local domain: traffic inside it is "local", between them "cross".
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

LinkKind = Literal["domain", "node", "network"]
LINK_KINDS: tuple[LinkKind, ...] = ("domain", "node", "network")  # fastest first
CALIBRATION_NAMES = ("v100", "a100", "h100", "h800")  # calibrations of --plan
MEASURED = "measured"  # how the source of a measured figure begins
MOST_RANKS = 1 << 20  # of a cluster; an order, and the groups of an axis, are lists of ranks


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
        ValueError: no ranks or more than MOST_RANKS, domains that fit neither nodes nor the whole, or an order that is
            no order of all ranks; in the words of a cluster file.
    """

    num_nodes: int
    ranks_per_node: int
    domain_size: int | None = None
    order: tuple[int, ...] | None = None
    links: Links | None = None
    device: Device | None = None
    notices: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        sizes = f"nodes {self.num_nodes} x ranks_per_node {self.ranks_per_node}"
        if min(self.num_nodes, self.ranks_per_node) < 1:
            raise ValueError(f"{sizes}: a cluster has at least one of each")
        if self.world_size > MOST_RANKS:
            raise ValueError(f"{sizes}: a cluster has at most {MOST_RANKS} ranks")
        domain = self.ranks_per_domain
        if domain not in (fitting := nested_sizes(self.ranks_per_node, self.world_size)):
            raise ValueError(
                f"fast_domain {domain}: {self.num_nodes} node(s) of {self.ranks_per_node} rank(s) do not "
                f"divide into domains of that size; {', '.join(map(str, fitting))} would fit"
            )
        if self.order is not None:
            missing = set(range(self.world_size)).difference(self.order)
            if missing or len(self.order) != self.world_size:
                absent = f", and rank {min(missing)} is not among them" if missing else ""
                raise ValueError(f"rank_order has {len(self.order)} ranks, the cluster {self.world_size}{absent}")

    @property
    def world_size(self) -> int:
        return self.num_nodes * self.ranks_per_node

    @property
    def ranks_per_domain(self) -> int:
        return self.ranks_per_node if self.domain_size is None else self.domain_size

    @property
    def local_domain_size(self) -> int:
        """Ranks of a local domain, inside which traffic is "local"."""
        return max(self.ranks_per_domain, self.ranks_per_node)

    @property
    def num_local_domains(self) -> int:
        return self.world_size // self.local_domain_size

    @property
    def is_block_order(self) -> bool:
        """True if ranks are numbered by position."""
        return self.order is None or self.order == tuple(range(self.world_size))

    def rank_at(self, position: int) -> int:
        return position if self.order is None else self.order[position]

    def position_of(self, rank: int) -> int:
        return rank if self.order is None else self._positions[rank]

    def node_of(self, rank: int) -> int:
        return self.position_of(rank) // self.ranks_per_node

    def domain_of(self, rank: int) -> int:
        return self.position_of(rank) // self.ranks_per_domain

    def local_domain_of(self, rank: int) -> int:
        return self.position_of(rank) // self.local_domain_size

    def link_between(self, rank: int, other: int) -> LinkKind:
        """The wire between two ranks: the fastest one that both are on."""
        if self.domain_of(rank) == self.domain_of(other):
            return "domain"
        return "node" if self.local_domain_of(rank) == self.local_domain_of(other) else "network"

    @cached_property
    def _positions(self) -> dict[int, int]:
        return {rank: position for position, rank in enumerate(self.order or ())}


def nested_sizes(inner: int, total: int) -> list[int]:
    """Sizes of equal parts of `total` that are part of an `inner` or made of several; `inner` divides `total`."""
    return _divisors(inner) + [inner * times for times in _divisors(total // inner)[1:]]


def _divisors(number: int) -> list[int]:
    small = [size for size in range(1, math.isqrt(max(number, 0)) + 1) if number % size == 0]
    return small + [number // size for size in reversed(small) if size * size != number]


class Link(NamedTuple):
    """One kind of wire.

    Attributes:
        gigabytes_per_second: in one direction (1e9 bytes); for "domain" and "node" what one rank can send, for
            "network" what one node can send with all its adapters together.
        microseconds: from sending a small message to its arrival; None where nobody knows.
    """

    gigabytes_per_second: float
    microseconds: float | None = None
    source: str = ""

    @property
    def is_measured(self) -> bool:
        """True if the rate is what programs reach, and not what a data sheet promises."""
        return self.source.startswith(MEASURED)

    def __str__(self) -> str:
        text = f"{self.gigabytes_per_second:.4g} GB/s"
        return text if self.microseconds is None else f"{text}, {self.microseconds:.4g} us"


class Links(NamedTuple):
    """The wires of a cluster, by what they connect; None where nothing is known."""

    domain: Link | None = None  # between ranks of one fast domain (NVLink, NVSwitch)
    node: Link | None = None  # between domains of one node (PCIe, shared memory)
    network: Link | None = None  # between nodes

    @property
    def known(self) -> dict[LinkKind, Link]:
        return {kind: link for kind, link in zip(LINK_KINDS, self, strict=True) if link is not None}

    def describe(self) -> str:
        """One line for the log: each figure with its source."""
        texts = [f"{kind} {link} ({link.source or 'no source given'})" for kind, link in self.known.items()]
        return f"links: {'; '.join(texts) or 'none known'}"


class Device(NamedTuple):
    """A GPU. Figures are data sheets'; each file of configs/clusters says where they were looked up."""

    name: str
    teraflops: float  # dense 16-bit peak
    gigabytes: float  # memory (1e9 bytes)
    gigabytes_per_second: float  # of that memory
    source: str = ""
    calibration: str | None = None  # how much of these figures programs reach: one of CALIBRATION_NAMES
    price_per_hour: float | None = None  # of one, in any currency
