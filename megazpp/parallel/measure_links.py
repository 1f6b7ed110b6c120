"""Measure at start-up the links of each axis, from all-gathers of two sizes, and the ranks' device.

`--measure-links` asks for it, and so does `--zero-weight-delta auto` if nothing is known about the links. It takes less
than a second: the sizes depend on the speed that a first all-gather reaches.

The model is a ring: an all-gather over n ranks with b bytes each takes (n-1) (latency + b / bandwidth). Measurements
with two values of b determine latency and bandwidth. gloo or NCCL may use another algorithm. The result then describes
the ring that would take the same time.

All groups of an axis run at once, as in training. Ranks that share a network adapter therefore share it in the
measurement too, and the measured bandwidth is one rank's part.

The device's speed is the slowest rank's, in matrix products of the run's shape, in copies and, on a CPU, in lossless
deltas. All ranks run at once, so each has its share of the cores.
"""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch.nn import functional

from megazpp.kernels.weight_delta import decode, encode, message_bytes
from megazpp.parallel.axis import MeshAxis
from megazpp.parallel.dims import ParallelDims
from megazpp.topology.cluster import LINK_KINDS, MEASURED, Device, Link, LinkKind, Links

REPEATS = 5  # timed all-gathers per size
SMALL_BYTES = 256  # bytes per rank of the small all-gather, few enough that its time is only latency
COPIED_BYTES = {"cpu": 32 << 20, "cuda": 256 << 20}  # more than the caches of a CPU core or of a GPU hold
PRODUCT_FLOPS = {"cpu": 5e8, "cuda": 2e12}  # fewest FLOPs per timing of matrix products, about 0.03 s or less
LARGE_TOTAL_BYTES = {"cpu": 16 << 20, "cuda": 256 << 20}  # largest all-gather; 256 MiB: 5 ms at 50 GB/s
TRIAL_TOTAL_BYTES = 256 << 10  # all-gather whose time determines the size of the large one; more than a burst holds
LARGE_SECONDS = 0.04  # time of a large all-gather on a slow link
DELTA_WEIGHTS = 1 << 20  # weights of a delta; its 2 MB stay in the cache of a core, like a unit's weights


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
            trial, largest = TRIAL_TOTAL_BYTES // axis.size, LARGE_TOTAL_BYTES[device.type] // axis.size
            wanted = int(trial * LARGE_SECONDS / _time_all_gather(axis, dims.world, trial, device))
            sizes = SMALL_BYTES, max(trial, min(wanted, largest))
            small, large = ((size, _time_all_gather(axis, dims.world, size, device)) for size in sizes)
            kind = max((layout.link(axis.name, rank) for rank in axis.ranks), key=LINK_KINDS.index)
            link, senders = fit_link(axis.size, small, large), 1
            if kind == "network":
                # A network link describes a whole node: multiply one rank's bandwidth by the number of this node's
                # ranks that send to another node.
                cluster, node = layout.cluster, layout.cluster.node_of(axis.ranks[axis.rank])
                beside = range(node * cluster.ranks_per_node, (node + 1) * cluster.ranks_per_node)
                senders = sum(layout.link(axis.name, cluster.rank_at(p)) == "network" for p in beside) or 1
            measured = Link(link.gigabytes_per_second * senders, link.microseconds, f"{MEASURED} over {axis.name}")
            found[kind] = min(measured, found.get(kind, measured))
            figures = f"{link.gigabytes_per_second:.3g} GB/s per rank, {link.microseconds:.3g} us"
            lines.append(
                f"measured {axis.name} ({axis.size} ranks, slowest link: {kind}): {figures}; all ranks at once, median "
                f"of {REPEATS} all-gathers of {sizes[0]} and {sizes[1]} bytes per rank"
            )
    return (layout.cluster.links or Links())._replace(**found), lines


def fit_link(num_ranks: int, small: tuple[int, float], large: tuple[int, float]) -> Link:
    """Return the bandwidth of one rank and the latency of one message.

    At least half of the large all-gather's time counts as bandwidth, because other load on the machine may delay the
    small one.

    Args:
        num_ranks: number of ranks of the all-gather.
        small: bytes per rank of the small all-gather, and its seconds on the slowest rank.
        large: the same for the large all-gather.
    """
    seconds = max(large[1] - small[1], large[1] / 2)
    slope = seconds / (large[0] - small[0])  # (n-1) / bandwidth, in seconds per byte
    latency = max(0.0, small[1] - slope * small[0]) / (num_ranks - 1)
    return Link((num_ranks - 1) / slope / 1e9, latency * 1e6)


def _time_all_gather(axis: MeshAxis, world: MeshAxis, bytes_per_rank: int, device: torch.device) -> float:
    """Return the median seconds of an all-gather on the slowest rank."""
    mine = torch.zeros(bytes_per_rank, dtype=torch.uint8, device=device)
    out = torch.empty(bytes_per_rank * axis.size, dtype=torch.uint8, device=device)
    return _time(lambda: axis.all_gather(mine, out=out), world, device, average=statistics.median)


def measure_device(
    dims: ParallelDims, device: torch.device, dtype: torch.dtype, *, tokens: int, hidden: int, lr: float, name: str
) -> Device:
    """Measure the devices of all ranks, and return this rank's with the slowest rank's speed. All ranks call this.

    Args:
        dims: axes of the job.
        device: device of this rank.
        dtype: dtype of the matrix products, the run's compute dtype.
        tokens: rows of the matrix products, a micro-batch's tokens.
        hidden: inner size of the matrix products, which have four times as many columns, as in an MLP.
        lr: learning rate of the weight update whose lossless delta is encoded and decoded.
        name: name of the device.
    """
    flops = 2.0 * tokens * hidden * 4 * hidden
    repeats = max(1, round(PRODUCT_FLOPS[device.type] / flops))
    with dims.counter.paused():
        product = _time_products(dims.world, device, dtype, tokens, hidden, repeats)
        copy = _time_copy(dims.world, device)
        deltas = _measure_deltas(dims.world, device, dtype, lr) if device.type == "cpu" and dtype.itemsize == 2 else {}
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)  # a run reports the peak of its training
        memory = torch.cuda.get_device_properties(device).total_memory
    else:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // dims.layout.cluster.ranks_per_node
    return Device(
        name,
        teraflops=float(f"{flops * repeats / product / 1e12:.3g}"),
        gigabytes=float(f"{memory / 1e9:.4g}"),
        gigabytes_per_second=float(f"{2 * COPIED_BYTES[device.type] / copy / 1e9:.3g}"),
        source=f"{MEASURED}: [{tokens}, {hidden}] x [{hidden}, {4 * hidden}] products in {str(dtype)[6:]}, copies",
        calibration=MEASURED,
        **deltas,
    )


def _time_products(
    world: MeshAxis, device: torch.device, dtype: torch.dtype, tokens: int, hidden: int, repeats: int
) -> float:
    """Return the seconds of `repeats` products, each of [tokens, hidden] and [hidden, 4 hidden]."""
    sizes = (tokens, hidden), (4 * hidden, hidden)
    x, weight = (torch.linspace(-1, 1, m * n, device=device).to(dtype).view(m, n) for m, n in sizes)

    def multiply() -> None:
        for _ in range(repeats):
            functional.linear(x, weight)

    return _time(multiply, world, device)


def _time_copy(world: MeshAxis, device: torch.device) -> float:
    """Return the seconds of a copy of COPIED_BYTES."""
    source = torch.zeros(COPIED_BYTES[device.type] // 4, device=device)
    target = torch.empty_like(source)
    return _time(lambda: target.copy_(source), world, device)


def _measure_deltas(world: MeshAxis, device: torch.device, dtype: torch.dtype, lr: float) -> dict[str, float]:
    """Return the two figures of `Device` about lossless deltas, for weights that a step of AdamW has changed."""
    generator = torch.Generator().manual_seed(0)
    weights, change = (torch.randn(DELTA_WEIGHTS, generator=generator) for _ in range(2))
    old, new = (0.02 * weights).to(dtype), (0.02 * weights + lr * change.clamp_(-1, 1)).to(dtype)
    message = torch.zeros(1, message_bytes(DELTA_WEIGHTS), dtype=torch.uint8)
    encoding = _time(lambda: encode(new, old, message[0]), world, device)
    copies = old.repeat(2 + REPEATS, 1).unsqueeze(1)  # each is decoded once
    left = iter(copies)
    decoding = _time(lambda: decode(message, next(left)), world, device)
    figures = {"encode_gigabytes_per_second": encoding, "decode_gigabytes_per_second": decoding}
    return {name: float(f"{old.nbytes / seconds / 1e9:.3g}") for name, seconds in figures.items()}


def _time(
    work: Callable[[], object],
    world: MeshAxis,
    device: torch.device,
    *,
    average: Callable[[Sequence[float]], float] = statistics.fmean,
) -> float:
    """Return the seconds of `work` on the slowest rank, as each rank's average without the first call, which warms up.

    The average is the mean for work that each rank does alone: ranks that share a core run in turns, so most calls
    either have the whole core or wait. Collectives keep the ranks together, so their median leaves out disturbances.
    """
    moments = [time.perf_counter()]
    for _ in range(1 + REPEATS):
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        moments.append(time.perf_counter())
    seconds = [end - start for start, end in itertools.pairwise(moments)]
    own = torch.tensor(average(seconds[1:]), dtype=torch.float64, device=device)
    return world.max_(own).item()
