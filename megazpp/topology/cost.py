"""What wires and devices take: alpha-beta for every collective, a roofline for every operation.

A collective of n ranks is so many messages one after the other, each with a latency, and so many bytes that each rank
sends, at the rate of the slowest wire it rides. Ranks of a node that send over the network at once share its adapters;
each brings its bytes there on a path of its own, first the one, then the other.

    ring        all-gather, reduce-scatter    n - 1 messages,        (n - 1)/n of the buffer
                all-reduce                    2 (n - 1) messages,    twice that
    tree        all-reduce                    up and down a chain inside each of m domains and a tree of log2(m) levels
                                              between them, twice that               whichever of both is faster
    pairwise    all-to-all                    n - 1 messages,        (n - 1)/n of the buffer
    two hops    an all-gather inside nodes behind one across them, or an all-to-all across behind one inside: two
                collectives here, because that is what they are in zero/

Each message of a ring has the latency of its own link (NCCL's tuning.cc counts the same way): of 384 ranks in 24 nodes
23 links are the network's.

A product [m, k] x [k, n] is computed in tiles of 128 x 128, the last of each row and column not full; it takes as long
as its full tiles at a share of the peak, or as its bytes from memory, whichever is longer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megazpp.topology.cluster import Device, Link, LinkKind
from megazpp.topology.layout import Layout
from megazpp.topology.shares import Shares

TILE = 128  # cuBLAS's usual thread block; NVIDIA, Matrix Multiplication Background User's Guide, "tile quantization"

# Until a message has gone from one rank to the next, in microseconds, where a cluster file does not say: NCCL's own
# model (src/graph/tuning.cc, hwLat, protocol Simple, 2.18): NVLink ring and tree, PCI, network.
RING_MICROSECONDS = {"domain": 3.4, "node": 5.7, "network": 14.0}
TREE_MICROSECONDS = {"domain": 4.0, "node": 6.0, "network": 14.0}
CALL_MICROSECONDS = 8.4  # of every collective (the same file, baseLat)


@dataclass(frozen=True, kw_only=True)
class DeviceCost:
    """How long operations take on a device."""

    device: Device
    shares: Shares

    def matrix_seconds(self, m: int, n: int, k: int, batch: float, touched_bytes: int) -> float:
        """A product of [m, k] and [k, n], `batch` times."""
        tiles = math.ceil(m / TILE) * math.ceil(n / TILE)
        flops = 2.0 * tiles * TILE * TILE * k * batch
        return max(flops / (1e12 * self.device.teraflops * self.shares.matrix), self.memory_seconds(touched_bytes))

    def memory_seconds(self, touched_bytes: int) -> float:
        """A pass that reads and writes so many bytes."""
        return touched_bytes / (1e9 * self.device.gigabytes_per_second * self.shares.memory)


class AxisCost:
    """How long collectives of one axis take.

    Args:
        layout: who is where; its cluster's links have to be known for the wires that the axis rides.
        axis: which.
    Raises:
        ValueError: a link that the axis rides is not in the cluster file.
    """

    def __init__(self, layout: Layout, axis: str, shares: Shares) -> None:
        self._size = layout.axis_size(axis)
        counts = layout.links(axis)
        self._byte_seconds = 0.0
        for kind in counts:
            link = _known(layout, kind, axis)
            senders = max(counts[kind] / layout.cluster.num_nodes, 1.0) if kind == "network" else 1.0
            byte_seconds = senders / (link.gigabytes_per_second * (1.0 if link.is_measured else shares.of(kind)))
            if kind == "network" and not link.is_measured:
                byte_seconds += 1.0 / shares.uplink
            self._byte_seconds = max(self._byte_seconds, 1e-9 * byte_seconds)
        hops = layout.hops(axis)
        self._ring = sum(hops[kind] * _latency(layout, kind, axis, RING_MICROSECONDS) for kind in hops)
        domains = hops.get("network", 0) + 1
        chain = self._size / domains - 1
        inside = max((_latency(layout, kind, axis, TREE_MICROSECONDS) for kind in hops if kind != "network"), default=0)
        across = _latency(layout, "network", axis, TREE_MICROSECONDS) if domains > 1 else 0.0
        self._tree = chain * inside + math.log2(domains) * across

    def seconds(self, collective: str, sent_bytes: int) -> float:
        """A collective in which each rank sends `sent_bytes`."""
        if self._size == 1:
            return 0.0
        latency = min(2 * self._ring, 2 * self._tree) if collective == "all_reduce" else self._ring
        return 1e-6 * CALL_MICROSECONDS + latency + sent_bytes * self._byte_seconds


def _known(layout: Layout, kind: LinkKind, axis: str) -> Link:
    links = layout.cluster.links
    if links is None or kind not in links.known:
        raise ValueError(f"--cluster-file: links.{kind} is not given, and axis {axis} rides it")
    return links.known[kind]


def _latency(layout: Layout, kind: LinkKind, axis: str, default: dict[str, float]) -> float:
    """Seconds until a message has gone over a link."""
    link = _known(layout, kind, axis)
    return 1e-6 * (default[kind] if link.microseconds is None else link.microseconds)
