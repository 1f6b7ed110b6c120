"""Cost model: seconds of collectives (alpha-beta) and operations (roofline), and calibrations by published figures.

The cost of a collective has two parts: the latency of its messages, which follow one another, and the bytes that each
rank sends, at the rate of the slowest link on the axis. Ranks of a node that send over the network at the same time
share its network adapters. The bytes of each rank first cross that rank's own path to the adapters, and then the
network.

    algorithm   collective                    messages         bytes per rank
    ring        all-gather, reduce-scatter    n - 1            (n - 1) / n of the buffer
    ring        all-reduce                    2 (n - 1)        2 (n - 1) / n of the buffer
    tree        all-reduce                    see below        2 (n - 1) / n of the buffer
    pairwise    all-to-all                    n - 1            (n - 1) / n of the buffer

n is the number of ranks. A tree all-reduce passes messages along a chain inside each of m domains (a node or an NVLink
domain), and over log2(m) levels between the domains, once up and once down. An all-reduce uses the faster of ring and
tree. Each message of a ring has the latency of the link that it uses, as in NCCL's tuning.cc: a ring of 384 ranks in 24
nodes has 23 network links.

A cluster file names a calibration (`device: {calibration: h100}`). A calibration says which shares of the data sheet's
figures programs reach. tests/planner/test_published.py lists the published figures and the planner's predictions.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from megazpp.topology.cluster import Device, LinkKind
from megazpp.topology.layout import AXES, EXPERT_AXES, NODE, Layout

# Rows and columns of the tiles in which cuBLAS usually computes a product. Source: NVIDIA, Matrix Multiplication
# Background User's Guide, "tile quantization".
TILE = 128

# Latency of a message from one rank to the next, in microseconds, if the cluster file gives none. Source: NCCL 2.18,
# src/graph/tuning.cc, hwLat, protocol Simple; the keys mean NVLink, PCI and network.
RING_MICROSECONDS = {"domain": 3.4, "node": 5.7, "network": 14.0}
TREE_MICROSECONDS = {"domain": 4.0, "node": 6.0, "network": 14.0}
CALL_MICROSECONDS = 8.4  # additional latency of every collective, in microseconds (NCCL's baseLat)


class Efficiency(NamedTuple):
    """Shares of the data sheet's figures that programs reach, between 0 and 1.

    Attributes:
        matrix: share of the peak FLOP/s in a matrix product of full tiles.
        memory: share of the memory bandwidth in a pass over memory.
        domain: share of the bandwidth inside an NVLink domain, for long messages.
        node: share of the bandwidth inside a node, for long messages.
        network: share of the bandwidth between nodes, for long messages.
        beside: share of the device that a running collective takes away from overlapped compute, because
            NCCL's kernels occupy multiprocessors.
        uplink: not a share: rate in GB/s at which one rank brings bytes to its node's network adapters.
    """

    matrix: float = 1.0
    memory: float = 1.0
    domain: float = 1.0
    node: float = 1.0
    network: float = 1.0
    beside: float = 0.0
    uplink: float = math.inf


class Calibration(NamedTuple):
    """Calibration of the cost model for a device.

    Attributes:
        efficiency: shares of the data sheet's figures.
        rests_on: origin of the shares, and the errors against published figures; printed by --plan.
        tokens: fewest tokens per rank and micro-batch of the runs that were compared. With fewer tokens, operations
            other than matrix products take a larger part of the time, and estimates are less reliable.
    """

    efficiency: Efficiency
    rests_on: str
    tokens: float = math.inf


# Share of the peak that products reach on V100: 83 of 125 TFLOP/s. Source: Markidis et al., NVIDIA Tensor Core
# Programmability, Performance & Precision (arXiv 1803.04014).
V100_MATRIX_SHARE = 0.664
# Most multiprocessors that a collective of NCCL occupies (MAXCHANNELS). V100 has 80 multiprocessors, H100 has 132.
NCCL_BLOCKS = 32
# Shares that were assumed before any comparison: products reach V100's measured share, memory and links reach 0.8.
ASSUMED_EFFICIENCY = Efficiency(
    matrix=V100_MATRIX_SHARE, memory=0.8, domain=0.8, node=0.8, network=0.8, beside=round(NCCL_BLOCKS / 132, 3)
)
# Shares that are fitted to published figures; tests/planner/test_published.py lists them with the errors. The figures
# are few, so a fitted share also absorbs effects that the model lacks, and a benchmark of that part alone would show
# another value. V100's "memory" includes passes over memory that DeepSpeed makes and FSDP2 does not. H800's "matrix"
# includes the time of all operations that are not products.
DGX2_EFFICIENCY = ASSUMED_EFFICIENCY._replace(memory=0.127, network=1.0, beside=NCCL_BLOCKS / 80, uplink=48.856)
H100_EFFICIENCY = ASSUMED_EFFICIENCY._replace(matrix=0.428)
H800_EFFICIENCY = ASSUMED_EFFICIENCY._replace(
    matrix=0.152, network=0.179
)  # network: eight adapters of 400 Gbit/s per node

CALIBRATIONS = {
    "v100": Calibration(
        DGX2_EFFICIENCY,
        "v100: fitted to two published runs of ZeRO-3 and ZeRO++ on DGX-2 (arXiv 2306.10209); for the eight other "
        "runs, the median error of TFLOP/s and speed-up is 7 %, and the largest error of the speed-up is 39 %",
        1024,
    ),
    "a100": Calibration(
        ASSUMED_EFFICIENCY,
        "a100: not fitted; the errors for five published runs of FSDP2 on 64 A100, Llama 8B to 70B, are at most 5 %",
        8192,
    ),
    "h100": Calibration(
        H100_EFFICIENCY,
        "h100: fitted to a published run of FSDP2 on 8 H100 of 500 W (Llama 8B, 16,384 tokens per GPU and "
        "micro-batch); the same run on 128 GPUs is estimated 2.5 % too fast (4 % too slow with h800's share of the "
        "network), and no other run was compared",
        16384,
    ),
    "h800": Calibration(
        H800_EFFICIENCY,
        "h800: fitted to a published run of Megatron-LM on 128 H800 with 2048 tokens per model copy (SDP4Bit), in "
        "which operations other than products take most of the time; for two other models TFLOP/s are 8 to 18 % off",
        0,
    ),
}
UNCHECKED = Calibration(ASSUMED_EFFICIENCY, "shares of the data sheet that agree with published runs on A100")


def calibration_for(device: Device | None) -> Calibration:
    """Return the calibration that the cluster file names, or the assumed one if it names none."""
    return UNCHECKED if device is None or device.calibration is None else CALIBRATIONS[device.calibration]


class Operation(NamedTuple):
    """One operation of a step: a batch of matrix products [m, k] x [k, n], a pass over memory, or a collective.

    Attributes:
        kind: "matrix", "memory" or the name of a collective.
        bytes: bytes that a product or a pass reads and writes, or that this rank sends in a collective.
        m: rows of a product's result.
        n: columns of a product's result.
        k: size over which a product sums.
        batch: number of products; for causal attention only the computed share counts.
        axis: axis of a collective.
    """

    kind: str
    bytes: int
    m: int = 0
    n: int = 0
    k: int = 0
    batch: float = 0.0
    axis: str = "tp"


class Costs:
    """Interface of the cost model. This base class makes everything take 0 seconds, to count bytes only.

    Attributes:
        beside: share of a collective's duration that is added to the compute overlapped with it.
    """

    beside = 0.0

    def operation(self, operation: Operation) -> float:
        """Return the seconds of a matrix product or a pass over memory."""
        return 0.0

    def memory(self, touched_bytes: int) -> float:
        """Return the seconds of a pass that reads and writes `touched_bytes` in total."""
        return 0.0

    def collective(self, axis: str, collective: str, sent_bytes: int) -> float:
        """Return the seconds of a collective on `axis` in which each rank sends `sent_bytes`."""
        return 0.0


class ClusterCosts(Costs):
    """Cost model of a cluster whose file describes the device and the links.

    A product is computed in tiles of 128 x 128; tiles at the edge cost as much as full ones. It takes the time of its
    tiles at the reachable share of the peak, or the time of its memory traffic, whichever is longer.

    Args:
        layout: sizes and links of the parallel axes.
        efficiency: shares of the data sheet's figures that programs reach.
        free: axes whose collectives take no time, to measure how much they cost.

    Raises:
        ValueError: the cluster file lacks the device, or a link that an axis uses.
    """

    def __init__(self, layout: Layout, efficiency: Efficiency, *, free: tuple[str, ...] = ()) -> None:
        device = layout.cluster.device
        if device is None:
            raise ValueError("--cluster-file: device is missing (name, teraflops, gigabytes, gigabytes_per_second)")
        self.beside = efficiency.beside
        self._flops_per_second = 1e12 * device.teraflops * efficiency.matrix
        self._bytes_per_second = 1e9 * device.gigabytes_per_second * efficiency.memory
        names = (*AXES, NODE, *(EXPERT_AXES if layout.has_expert_axes else ()))
        self._axes = {axis: AxisCost(layout, axis, efficiency) for axis in names if axis not in free}

    def operation(self, operation: Operation) -> float:
        seconds = self.memory(operation.bytes)
        if operation.kind == "memory":
            return seconds
        tiles = math.ceil(operation.m / TILE) * math.ceil(operation.n / TILE)
        flops = 2.0 * tiles * TILE * TILE * operation.k * operation.batch
        return max(flops / self._flops_per_second, seconds)

    def memory(self, touched_bytes: int) -> float:
        return touched_bytes / self._bytes_per_second

    def collective(self, axis: str, collective: str, sent_bytes: int) -> float:
        return self._axes[axis].seconds(collective, sent_bytes) if axis in self._axes else 0.0


class AxisCost:
    """Cost model of the collectives on one axis.

    Args:
        layout: sizes and links of the parallel axes.
        axis: name of the axis.
        efficiency: shares of the data sheet's figures that programs reach.

    Raises:
        ValueError: the cluster file does not describe a link that the axis uses.
    """

    def __init__(self, layout: Layout, axis: str, efficiency: Efficiency) -> None:
        cluster = layout.cluster
        known = {} if cluster.links is None else cluster.links.known
        self._size, self._byte_seconds = layout.axis_size(axis), 0.0
        # ---- seconds per byte, on the slowest link
        for kind, count in layout.links(axis).items():
            if kind not in known:
                raise ValueError(f"--cluster-file: links.{kind} is missing, and axis {axis} uses it")
            link, is_network = known[kind], kind == "network"
            senders = max(count / cluster.num_nodes, 1.0) if is_network else 1.0
            share: float = 1.0 if link.is_measured else getattr(efficiency, kind)
            byte_seconds = senders / (link.gigabytes_per_second * share)
            if is_network and not link.is_measured:
                byte_seconds += 1.0 / efficiency.uplink
            self._byte_seconds = max(self._byte_seconds, 1e-9 * byte_seconds)

        # ---- latency of a ring and of a tree
        def latency(kind: LinkKind, default: dict[str, float]) -> float:
            """Return the seconds that a message takes over a link of this kind."""
            microseconds = known[kind].microseconds
            return 1e-6 * (default[kind] if microseconds is None else microseconds)

        hops = layout.hops(axis)
        self._ring = sum(hops[kind] * latency(kind, RING_MICROSECONDS) for kind in hops)
        domains = hops.get("network", 0) + 1
        inside = max((latency(kind, TREE_MICROSECONDS) for kind in hops if kind != "network"), default=0)
        across = latency("network", TREE_MICROSECONDS) if domains > 1 else 0.0
        self._tree = (self._size / domains - 1) * inside + math.log2(domains) * across

    def seconds(self, collective: str, sent_bytes: int) -> float:
        """Return the seconds of a collective in which each rank sends `sent_bytes`."""
        if self._size == 1:
            return 0.0
        latency = min(2 * self._ring, 2 * self._tree) if collective == "all_reduce" else self._ring
        return 1e-6 * CALL_MICROSECONDS + latency + sent_bytes * self._byte_seconds
