"""`--measure-links`: how fast each axis's wire is, from all-gathers of two sizes at start-up.

An all-gather over n ranks of b bytes each takes (n-1) (latency + b / bandwidth) around a ring, and two values of b give
both. All groups of an axis run at once, as in training: ranks of a node that share an adapter share it here too, and
the bandwidth is one rank's part. gloo or NCCL may send otherwise; the result is the ring that would take as long.
"""

from __future__ import annotations

import itertools
import statistics
import time

import torch

from megazpp.parallel.axis import MeshAxis
from megazpp.parallel.dims import ParallelDims
from megazpp.topology.cluster import LINK_KINDS, MEASURED, Link, LinkKind, Links

REPEATS = 5
SMALL_BYTES = 256  # so few that a limited uplink lets them pass at once: what they take is latency
LARGE_TOTAL_BYTES = {"cpu": 2 << 20, "cuda": 256 << 20}  # of all ranks: seconds at 100 Mbit/s, 5 ms at 50 GB/s


def measure_links(dims: ParallelDims, device: torch.device) -> tuple[Links, list[str]]:
    """Time the tp, cp, local, cross and island axes; every rank calls it. Counts no traffic.

    Returns:
        The cluster's links with those measured, of two axes on one kind the slower; and a line for each axis.
    """
    layout, found, lines = dims.layout, dict[LinkKind, Link](), []
    with dims.counter.paused():
        for axis in (dims.tp, dims.cp, dims.local, dims.cross, dims.island):
            if axis.size == 1:
                continue
            sizes = SMALL_BYTES, LARGE_TOTAL_BYTES[device.type] // axis.size
            small, large = ((size, _time_all_gather(axis, dims.world, size, device)) for size in sizes)
            kind = max((layout.link(axis.name, rank) for rank in axis.ranks), key=LINK_KINDS.index)
            link, figures = fit_link(axis.size, small, large), "too noisy to tell"
            if link is not None:
                figures = f"{link.gigabytes_per_second:.3g} GB/s per rank, {link.microseconds:.3g} us"
                senders = 1
                if kind == "network":  # a rank's part of it, times the ranks of the node whose successors are elsewhere
                    cluster, node = layout.cluster, layout.cluster.node_of(axis.ranks[axis.rank])
                    beside = range(node * cluster.ranks_per_node, (node + 1) * cluster.ranks_per_node)
                    senders = sum(layout.link(axis.name, cluster.rank_at(p)) == "network" for p in beside) or 1
                measured = Link(link.gigabytes_per_second * senders, link.microseconds, f"{MEASURED} over {axis.name}")
                found[kind] = min(measured, found.get(kind, measured))
            lines.append(
                f"measured {axis.name} ({axis.size} ranks, slowest link: {kind}): {figures}; all ranks at once, median "
                f"of {REPEATS} all-gathers of {sizes[0]} and {sizes[1]} bytes per rank"
            )
    return (layout.cluster.links or Links())._replace(**found), lines


def fit_link(num_ranks: int, small: tuple[int, float], large: tuple[int, float]) -> Link | None:
    """Bandwidth of a rank and latency of a message; None where the large all-gather was not slower.

    Args:
        small, large: bytes per rank of an all-gather, and its seconds on the slowest rank.
    """
    slope = (large[1] - small[1]) / (large[0] - small[0])  # seconds per byte, n-1 times
    if slope <= 0:
        return None
    latency = max(0.0, small[1] - slope * small[0]) / (num_ranks - 1)
    return Link((num_ranks - 1) / slope / 1e9, latency * 1e6)


def _time_all_gather(axis: MeshAxis, world: MeshAxis, bytes_per_rank: int, device: torch.device) -> float:
    """Seconds on the slowest rank: the median of a few after one to connect and warm up."""
    mine = torch.zeros(bytes_per_rank, dtype=torch.uint8, device=device)
    out = torch.empty(bytes_per_rank * axis.size, dtype=torch.uint8, device=device)
    moments = [time.perf_counter()]
    for _ in range(1 + REPEATS):
        axis.all_gather(mine, out=out)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        moments.append(time.perf_counter())
    seconds = [end - start for start, end in itertools.pairwise(moments)]
    median = torch.tensor(statistics.median(seconds[1:]), dtype=torch.float64, device=device)
    return world.max_(median).item()
