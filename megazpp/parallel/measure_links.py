"""`--measure-links`: measure bandwidth and latency of each axis's links at start-up, from all-gathers of two sizes.

The model is a ring: an all-gather over n ranks with b bytes each takes (n-1) (latency + b / bandwidth). Measurements
with two values of b determine latency and bandwidth. gloo or NCCL may use another algorithm. The result then describes
the ring that would take the same time.

All groups of an axis run at once, as in training. Ranks that share a network adapter therefore share it in the
measurement too, and the measured bandwidth is one rank's part.
"""

from __future__ import annotations

import itertools
import statistics
import time

import torch

from megazpp.parallel.axis import MeshAxis
from megazpp.parallel.dims import ParallelDims
from megazpp.topology.cluster import LINK_KINDS, MEASURED, Link, LinkKind, Links

REPEATS = 5  # timed all-gathers per size
SMALL_BYTES = 256  # bytes per rank of the small all-gather, few enough that its time is only latency
LARGE_TOTAL_BYTES = {"cpu": 2 << 20, "cuda": 256 << 20}  # total of the large one; 256 MiB take about 5 ms at 50 GB/s


def measure_links(dims: ParallelDims, device: torch.device) -> tuple[Links, list[str]]:
    """Measure the links of the axes tp, cp, local, cross and replica_group. Traffic is not counted.

    All ranks call this.

    Args:
        dims: axes of the job.
        device: device of the messages.
    Returns:
        The cluster's links updated with the measured ones, and a log line for each axis. If two axes use the same kind
        of link, the slower measurement is kept.
    """
    layout, found, lines = dims.layout, dict[LinkKind, Link](), []
    with dims.counter.paused():
        for axis in (dims.tp, dims.cp, dims.local, dims.cross, dims.replica_group):
            if axis.size == 1:
                continue
            sizes = SMALL_BYTES, LARGE_TOTAL_BYTES[device.type] // axis.size
            small, large = ((size, _time_all_gather(axis, dims.world, size, device)) for size in sizes)
            kind = max((layout.link(axis.name, rank) for rank in axis.ranks), key=LINK_KINDS.index)
            link, figures = fit_link(axis.size, small, large), "too noisy to measure"
            if link is not None:
                figures = f"{link.gigabytes_per_second:.3g} GB/s per rank, {link.microseconds:.3g} us"
                senders = 1
                if kind == "network":
                    # A network link describes a whole node: multiply one rank's bandwidth by the number of this node's
                    # ranks that send to another node.
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
    """Return the bandwidth of one rank and the latency of one message, None if the large all-gather was not slower.

    Args:
        num_ranks: number of ranks of the all-gather.
        small: bytes per rank of the small all-gather, and its seconds on the slowest rank.
        large: the same for the large all-gather.
    """
    slope = (large[1] - small[1]) / (large[0] - small[0])  # (n-1) / bandwidth, in seconds per byte
    if slope <= 0:
        return None
    latency = max(0.0, small[1] - slope * small[0]) / (num_ranks - 1)
    return Link((num_ranks - 1) / slope / 1e9, latency * 1e6)


def _time_all_gather(axis: MeshAxis, world: MeshAxis, bytes_per_rank: int, device: torch.device) -> float:
    """Return the seconds of one all-gather on the slowest rank.

    The first all-gather, which connects and warms up, is dropped. Each rank takes the median of the others.
    """
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
