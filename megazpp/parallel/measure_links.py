"""`--measure-links`: how fast each axis's wire is, from all-gathers of two sizes at start-up.

An all-gather over n ranks sends (n-1) messages of b bytes from each, one after the other around a ring, so it takes

    (n-1) (latency + b / bandwidth)

and two values of b give both. All groups of an axis run at once, as they do in training: ranks of a node that share an
adapter share it here too, and the bandwidth is one rank's part. gloo and NCCL may send
otherwise than by that ring; what comes out is the ring that would take as long.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from megazpp.parallel.axis import MeshAxis
from megazpp.parallel.dims import ParallelDims
from megazpp.topology.cluster import LINK_KINDS, MEASURED, Link, LinkKind, Links
from megazpp.topology.layout import Layout

REPEATS = 5
SMALL_BYTES = 256  # so few that a limited uplink lets them pass at once: what they take is latency
LARGE_TOTAL_BYTES = {
    "cpu": 2 << 20,
    "cuda": 256 << 20,
}  # of all ranks of a group: seconds at 100 Mbit/s, 5 ms at 50 GB/s


class AxisTime(NamedTuple):
    """Seconds of all-gathers of `bytes_per_rank` over an axis, on the slowest rank."""

    bytes_per_rank: int
    seconds: float


def measure_links(dims: ParallelDims, device: torch.device, *, announce: Callable[[str], None]) -> Links:
    """Time the tp, local and cross axes; every rank calls it. Counts no traffic.

    Args:
        announce: gets one line per axis.
    Returns:
        The cluster's links with the measured ones in place; of two axes on one kind of link the slower.
    """
    cluster, found = dims.layout.cluster, dict[LinkKind, Link]()
    with dims.counter.paused():
        for axis in (dims.tp, dims.local, dims.cross):
            if axis.size == 1:
                continue
            large = LARGE_TOTAL_BYTES[device.type] // axis.size
            small_time, large_time = (_time_all_gather(axis, dims.world, size, device) for size in (SMALL_BYTES, large))
            kind = max((dims.layout.link(axis.name, rank) for rank in axis.ranks), key=LINK_KINDS.index)
            link = fit_link(axis.size, small_time, large_time)
            announce(_describe(axis, kind, link, large))
            if link is None:
                continue
            # a rank's part of the network, times the ranks of the node that sent into it
            senders = _senders_into_network(dims.layout, axis) if kind == "network" else 1
            measured = Link(link.gigabytes_per_second * senders, link.microseconds, f"{MEASURED} over {axis.name}")
            found[kind] = min(measured, found.get(kind, measured))
    return (cluster.links or Links())._replace(**found)


def fit_link(num_ranks: int, small: AxisTime, large: AxisTime) -> Link | None:
    """Bandwidth of a rank and latency of a message, from two all-gathers; None where the large one was not slower."""
    more_bytes = large.bytes_per_rank - small.bytes_per_rank
    slope = (large.seconds - small.seconds) / more_bytes  # seconds per byte, n-1 times
    if slope <= 0:
        return None
    latency = max(0.0, small.seconds - slope * small.bytes_per_rank) / (num_ranks - 1)
    return Link((num_ranks - 1) / slope / 1e9, latency * 1e6)


def _senders_into_network(layout: Layout, axis: MeshAxis) -> int:
    """Ranks of this rank's node whose successor along the axis is on another one."""
    cluster = layout.cluster
    first = cluster.node_of(axis.ranks[axis.rank]) * cluster.ranks_per_node
    ranks = (cluster.rank_at(first + index) for index in range(cluster.ranks_per_node))
    return max(1, sum(layout.link(axis.name, rank) == "network" for rank in ranks))


def _time_all_gather(axis: MeshAxis, world: MeshAxis, bytes_per_rank: int, device: torch.device) -> AxisTime:
    """The median of a few after one to connect and warm up; of the slowest rank."""
    mine = torch.zeros(bytes_per_rank, dtype=torch.uint8, device=device)
    out = torch.empty(bytes_per_rank * axis.size, dtype=torch.uint8, device=device)
    seconds = []
    for _ in range(1 + REPEATS):
        _synchronize(device)
        began = time.perf_counter()
        axis.all_gather(mine, out=out)
        _synchronize(device)
        seconds.append(time.perf_counter() - began)
    median = torch.tensor(statistics.median(seconds[1:]), dtype=torch.float64, device=device)
    return AxisTime(bytes_per_rank, world.max_(median).item())


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _describe(axis: MeshAxis, kind: LinkKind, link: Link | None, large: int) -> str:
    figures = "too noisy to tell"
    if link is not None:
        figures = f"{link.gigabytes_per_second:.3g} GB/s per rank, {link.microseconds:.3g} us"
    return (
        f"measured {axis.name} ({axis.size} ranks, slowest link: {kind}): {figures}; all ranks at once, median "
        f"of {REPEATS} all-gathers of {SMALL_BYTES} and {large} bytes per rank"
    )
