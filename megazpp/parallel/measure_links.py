"""Measure at start-up the bandwidth and latency of each mesh axis, and the speed of the ranks' devices.

`--measure-links` requests the measurement, and so does `--zero-weight-delta auto` if nothing is known about the links.
Each axis is measured by all-gathers of two sizes. The time of an additional first all-gather determines the larger
size, so that the measurement takes less than a second.

The model is a ring: an all-gather over n ranks with b bytes each takes (n-1) (latency + b / bandwidth). Measurements
with two values of b determine latency and bandwidth. gloo or NCCL may use another algorithm. The result then describes
the ring that would take the same time.

All process groups of an axis are measured at the same time, as they run in training. If several ranks share a network
adapter, the measured bandwidth is therefore the fraction that one rank gets.

The device's speed is measured by matrix products of the run's shape, by copies and, on a CPU, by lossless deltas. The
result is the speed of the slowest rank. All ranks run at the same time, so CPU ranks share the cores as in training.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch.nn import functional

from megazpp.base.memory import host_memory
from megazpp.kernels.weight_delta import decode, encode, message_bytes
from megazpp.parallel.axis import MeshAxis
from megazpp.parallel.dims import ParallelDims
from megazpp.topology.cluster import LINK_KINDS, MEASURED, Device, Link, LinkKind, Links

REPEATS = 5  # number of timed calls of each measured function, after one call for warm-up
SMALL_BYTES = 256  # bytes per rank of the small all-gather, few enough that latency alone determines its time
# By device type: bytes of the copy that measures memory bandwidth, more than the caches of the device hold
COPIED_BYTES = {"cpu": 32 << 20, "cuda": 256 << 20}
# By device type: least FLOPs in one timed call, which repeats a matrix product and takes about 0.03 s or less
PRODUCT_FLOPS = {"cpu": 5e8, "cuda": 2e12}
# By device type: largest size in bytes of a measured all-gather's result. At 50 GB/s, 256 MiB take 5 ms.
LARGE_TOTAL_BYTES = {"cpu": 16 << 20, "cuda": 256 << 20}
# Size in bytes of the result of a first all-gather, whose time determines the size of the large all-gather. A
# rate-limited link sends a short burst at full speed; this all-gather is longer than such a burst.
TRIAL_TOTAL_BYTES = 256 << 10
LARGE_SECONDS = 0.04  # intended time of the large all-gather; it is shorter if LARGE_TOTAL_BYTES limits the size
DELTA_WEIGHTS = 1 << 20  # number of weights in a measured lossless delta; their 2 MB fit the cache of a CPU core


def measure_links(dims: ParallelDims, device: torch.device) -> tuple[Links, list[str]]:
    """Measure bandwidth and latency of the links along tp, cp, local, cross and replica_group. All ranks call this.

    The traffic counter ignores the messages of the measurement.

    Args:
        dims: mesh axes of the job.
        device: device on which the messages are allocated.
    Returns:
        Two results. The first one is the cluster's known links, in which measured links replace links of the same kind.
        If two axes use the same kind of link, the slower of the two measurements counts. The second one is a list with
        a log line for each measured axis.
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
                # The bandwidth of a network link is the bandwidth of a whole node. It is one rank's bandwidth times
                # the number of ranks of this node that send to another node along the axis. Count at least one: perhaps
                # only ranks of other nodes do so.
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
    """Return the bandwidth and latency of the ring that two measured all-gathers describe.

    At least half of the large all-gather's time counts as time for its bytes, not as latency. Otherwise the bandwidth
    would appear too large if other load on the machine has delayed the small all-gather.

    Args:
        num_ranks: number of ranks of the all-gathers.
        small: bytes per rank of the small all-gather, and its seconds on the slowest rank.
        large: bytes per rank of the large all-gather, and its seconds on the slowest rank.
    Returns:
        The bandwidth of one rank in GB/s (1e9 bytes), and the latency of one message in microseconds.
    """
    seconds = max(large[1] - small[1], large[1] / 2)  # time for the bytes by which the large all-gather is larger
    slope = seconds / (large[0] - small[0])  # seconds per byte of an all-gather over n ranks: (n-1) / bandwidth
    latency = max(0.0, small[1] - slope * small[0]) / (num_ranks - 1)
    return Link((num_ranks - 1) / slope / 1e9, latency * 1e6)


def _time_all_gather(axis: MeshAxis, world: MeshAxis, bytes_per_rank: int, device: torch.device) -> float:
    """Measure the seconds of an all-gather along `axis` on all ranks.

    Each rank computes the median of several calls. The result is the slowest rank's median, the largest one.
    """
    mine = torch.zeros(bytes_per_rank, dtype=torch.uint8, device=device)
    out = torch.empty(bytes_per_rank * axis.size, dtype=torch.uint8, device=device)
    return _time(lambda: axis.all_gather(mine, out=out), world, device, average=statistics.median)


def measure_device(
    dims: ParallelDims, device: torch.device, dtype: torch.dtype, *, tokens: int, hidden: int, lr: float, name: str
) -> Device:
    """Measure the speed of all ranks' devices, and return the `Device` of this rank with the slowest rank's speed.

    All ranks call this. The traffic counter ignores the messages of the measurement.

    Args:
        dims: mesh axes of the job.
        device: device of this rank.
        dtype: dtype of the matrix products, the run's compute dtype.
        tokens: rows of the matrix products, a micro-batch's tokens.
        hidden: inner size of the matrix products, which have four times as many columns, as in an MLP.
        lr: learning rate of the weight update whose lossless delta is encoded and decoded.
        name: name of the device, for the log and the run folder's cluster.yaml.
    """
    flops = 2.0 * tokens * hidden * 4 * hidden
    repeats = max(1, round(PRODUCT_FLOPS[device.type] / flops))
    with dims.counter.paused():
        product = _time_products(dims.world, device, dtype, tokens, hidden, repeats)
        copy = _time_copy(dims.world, device)
        deltas = _measure_deltas(dims.world, device, dtype, lr) if device.type == "cpu" and dtype.itemsize == 2 else {}
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)  # the run's log reports the peak memory of training alone
        memory = torch.cuda.get_device_properties(device).total_memory
    else:
        memory = host_memory().total // dims.layout.cluster.ranks_per_node
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
    """Return the slowest rank's seconds for `repeats` matrix products [tokens, hidden] x [hidden, 4 hidden]."""
    sizes = (tokens, hidden), (4 * hidden, hidden)
    x, weight = (torch.linspace(-1, 1, m * n, device=device).to(dtype).view(m, n) for m, n in sizes)

    def multiply() -> None:
        for _ in range(repeats):
            functional.linear(x, weight)

    return _time(multiply, world, device)


def _time_copy(world: MeshAxis, device: torch.device) -> float:
    """Return the slowest rank's seconds for a copy of COPIED_BYTES within the memory of its device."""
    source = torch.zeros(COPIED_BYTES[device.type] // 4, device=device)
    target = torch.empty_like(source)
    return _time(lambda: target.copy_(source), world, device)


def _measure_deltas(world: MeshAxis, device: torch.device, dtype: torch.dtype, lr: float) -> dict[str, float]:
    """Measure how fast the slowest CPU rank encodes and decodes lossless deltas of 16-bit weights.

    The weights have a standard deviation of 0.02, as after initialization, and change as by a step of AdamW with the
    learning rate `lr`.

    Returns:
        The fields `encode_gigabytes_per_second` and `decode_gigabytes_per_second` of `Device`, by name.
    """
    generator = torch.Generator().manual_seed(0)
    weights, change = (torch.randn(DELTA_WEIGHTS, generator=generator) for _ in range(2))
    old, new = (0.02 * weights).to(dtype), (0.02 * weights + lr * change.clamp_(-1, 1)).to(dtype)
    message = torch.zeros(1, message_bytes(DELTA_WEIGHTS), dtype=torch.uint8)
    encoding = _time(lambda: encode(new, old, message[0]), world, device)
    # Decoding changes the old weights in place. Each of the 1 + REPEATS calls of `decode` below therefore gets a fresh
    # copy of the old weights.
    left = iter(old.repeat(1 + REPEATS, 1).unsqueeze(1))
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
    """Measure `work` on all ranks at the same time, and return the seconds that it takes on the slowest rank.

    Each rank calls `work` REPEATS times after one call for warm-up, and averages the seconds.

    Args:
        work: function to measure.
        world: axis of all ranks.
        device: device on which `work` computes; a GPU is synchronized after each call.
        average: function that averages a rank's seconds. The mean fits work that each rank does alone: ranks that share
            a CPU core run in turns, so a call either has the whole core or waits. The median fits collectives, in which
            ranks wait for each other, because it ignores single disturbed calls.
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
