"""Seconds of a step's pieces: alpha-beta for every collective, a roofline for every operation, and calibrations.

A collective of n ranks is so many messages one after the other, each with a latency, and so many bytes that each rank
sends, at the rate of the slowest link it rides. Ranks of a node that send over the network at once share its adapters;
each brings its bytes there on a path of its own, first the one, then the other.

    ring        all-gather, reduce-scatter    n - 1 messages,        (n - 1)/n of the buffer
                all-reduce                    2 (n - 1) messages,    twice that
    tree        all-reduce                    up and down a chain inside each of m domains and a tree of log2(m) levels
                                              between them, twice that               whichever of both is faster
    pairwise    all-to-all                    n - 1 messages,        (n - 1)/n of the buffer

Each message of a ring has the latency of its own link (NCCL's tuning.cc counts the same way): of 384 ranks in 24 nodes
23 links are the network's.

A cluster file names its calibration (`device: {calibration: h100}`): the shares of data sheets that programs reach.
tests/planner/test_published.py has every published figure, and what the planner predicts of it.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from megazpp.topology.cluster import Device, LinkKind
from megazpp.topology.layout import AXES, NODE, Layout

TILE = 128  # cuBLAS's usual thread block; NVIDIA, Matrix Multiplication Background User's Guide, "tile quantization"

# Until a message has gone from one rank to the next, in microseconds, where a cluster file does not say: NCCL's own
# model (src/graph/tuning.cc, hwLat, protocol Simple, 2.18): NVLink ring and tree, PCI, network.
RING_MICROSECONDS = {"domain": 3.4, "node": 5.7, "network": 14.0}
TREE_MICROSECONDS = {"domain": 4.0, "node": 6.0, "network": 14.0}
CALL_MICROSECONDS = 8.4  # of every collective (the same file, baseLat)


class Efficiency(NamedTuple):
    """Parts of data sheets' figures that programs reach.

    Attributes:
        matrix, memory: of the peak in a product of full tiles, and of the memory's rate in a pass over it.
        domain, node, network: of the links' rates, in a long message.
        beside: of the device, that a collective takes from the compute: NCCL's kernels occupy multiprocessors.
        uplink: no share: GB/s at which one rank brings bytes to its node's adapters, however many those are.
    """

    matrix: float = 1.0
    memory: float = 1.0
    domain: float = 1.0
    node: float = 1.0
    network: float = 1.0
    beside: float = 0.0
    uplink: float = math.inf


class Calibration(NamedTuple):
    """The efficiency of a kind of device, its source with the errors against published figures, and its range.

    With fewer `tokens` per rank and micro-batch, what is no product counts more.
    """

    efficiency: Efficiency
    rests_on: str
    tokens: float = math.inf


# 83 TFLOP/s of 125: Markidis et al., NVIDIA Tensor Core Programmability, Performance & Precision (arXiv 1803.04014).
V100_MATRIX_SHARE = 0.664
NCCL_BLOCKS = 32  # most that a collective runs on, a multiprocessor each (MAXCHANNELS); V100 has 80, H100 132
# Assumed before anything was compared: products reach what they do on V100, memory and links four fifths.
ASSUMED_EFFICIENCY = Efficiency(
    matrix=V100_MATRIX_SHARE, memory=0.8, domain=0.8, node=0.8, network=0.8, beside=round(NCCL_BLOCKS / 132, 3)
)
# Fitted to the published rows of tests/planner/test_published.py, which has the errors. Few figures fix them, so each
# is what makes those come out, not what a benchmark of that part would show: V100's "memory" holds every pass over
# memory that DeepSpeed makes and FSDP2 does not, H800's "matrix" everything that is no product.
DGX2_EFFICIENCY = ASSUMED_EFFICIENCY._replace(memory=0.127, network=1.0, beside=NCCL_BLOCKS / 80, uplink=48.856)
H100_EFFICIENCY = ASSUMED_EFFICIENCY._replace(matrix=0.428)
H800_EFFICIENCY = ASSUMED_EFFICIENCY._replace(matrix=0.152, network=0.179)  # of eight adapters of 400 Gbit/s

CALIBRATIONS = {
    "v100": Calibration(
        DGX2_EFFICIENCY,
        "v100: fitted to two published runs of ZeRO-3 and ZeRO++ on DGX-2 (arXiv 2306.10209); on the eight others "
        "TFLOP/s and speed-up are 7 % off in the median, the speed-up at most 39 %",
        1024,
    ),
    "a100": Calibration(
        ASSUMED_EFFICIENCY,
        "a100: fitted to nothing; five published runs of FSDP2 on 64 A100, Llama 8B to 70B, come out within 5 %",
        8192,
    ),
    "h100": Calibration(
        H100_EFFICIENCY,
        "h100: fitted to a published run of FSDP2 on 8 H100 of 500 W (Llama 8B, 16,384 tokens per GPU and "
        "micro-batch); that on 128 GPUs comes out 2.5 % too fast (with h800's share of the network 4 % too slow), "
        "and nothing else was compared",
        16384,
    ),
    "h800": Calibration(
        H800_EFFICIENCY,
        "h800: fitted to a published run of Megatron-LM on 128 H800 with 2048 tokens per model copy (SDP4Bit), where "
        "all that is no product takes most of the time; on its two other models TFLOP/s are 8 to 18 % off",
        0,
    ),
}
UNCHECKED = Calibration(ASSUMED_EFFICIENCY, "shares of the data sheet that came out on A100")


def calibration_for(device: Device | None) -> Calibration:
    """The calibration that the cluster file names, or the assumed one."""
    return UNCHECKED if device is None or device.calibration is None else CALIBRATIONS[device.calibration]


class Operation(NamedTuple):
    """One operation: a product [m, k] x [k, n], `batch` times; a pass over memory; or a collective.

    Attributes:
        kind: "matrix", "memory" or the name of a collective.
        bytes: read and written, or sent by this rank.
        m, n, k, batch: of a product; a causal one counts half.
        axis: of a collective.
    """

    kind: str
    bytes: int
    m: int = 0
    n: int = 0
    k: int = 0
    batch: float = 0.0
    axis: str = "tp"


class Costs:
    """Seconds that the pieces of a step take. This base class is for counting: they take none.

    `beside` is the share of a collective's seconds that it takes from the compute beside it.
    """

    beside = 0.0

    def operation(self, operation: Operation) -> float:
        return 0.0

    def memory(self, touched_bytes: int) -> float:
        return 0.0

    def collective(self, axis: str, collective: str, sent_bytes: int) -> float:
        return 0.0


class ClusterCosts(Costs):
    """The costs of a step on a cluster whose file names links and device.

    A product is computed in tiles of 128 x 128, the last of each row and column not full; it takes as long as its full
    tiles at a share of the peak, or as its bytes from memory, whichever is longer.

    Args:
        free: axes whose collectives take no time, to see what they cost.
    Raises:
        ValueError: a figure that is needed is not in the cluster file.
    """

    def __init__(self, layout: Layout, efficiency: Efficiency, *, free: tuple[str, ...] = ()) -> None:
        device = layout.cluster.device
        if device is None:
            raise ValueError("--cluster-file: device is not given (name, teraflops, gigabytes, gigabytes_per_second)")
        self.beside = efficiency.beside
        self._flops_per_second = 1e12 * device.teraflops * efficiency.matrix
        self._bytes_per_second = 1e9 * device.gigabytes_per_second * efficiency.memory
        self._axes = {axis: AxisCost(layout, axis, efficiency) for axis in (*AXES, NODE) if axis not in free}

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
    """Seconds of the collectives of one axis.

    Raises:
        ValueError: a link that the axis rides is not in the cluster file.
    """

    def __init__(self, layout: Layout, axis: str, efficiency: Efficiency) -> None:
        cluster = layout.cluster
        known = {} if cluster.links is None else cluster.links.known
        self._size, self._byte_seconds = layout.axis_size(axis), 0.0
        for kind, count in layout.links(axis).items():
            if kind not in known:
                raise ValueError(f"--cluster-file: links.{kind} is not given, and axis {axis} rides it")
            link, is_network = known[kind], kind == "network"
            senders = max(count / cluster.num_nodes, 1.0) if is_network else 1.0
            share: float = 1.0 if link.is_measured else getattr(efficiency, kind)
            byte_seconds = senders / (link.gigabytes_per_second * share)
            if is_network and not link.is_measured:
                byte_seconds += 1.0 / efficiency.uplink
            self._byte_seconds = max(self._byte_seconds, 1e-9 * byte_seconds)

        def latency(kind: LinkKind, default: dict[str, float]) -> float:
            """Seconds until a message has gone over a link."""
            microseconds = known[kind].microseconds
            return 1e-6 * (default[kind] if microseconds is None else microseconds)

        hops = layout.hops(axis)
        self._ring = sum(hops[kind] * latency(kind, RING_MICROSECONDS) for kind in hops)
        domains = hops.get("network", 0) + 1
        inside = max((latency(kind, TREE_MICROSECONDS) for kind in hops if kind != "network"), default=0)
        across = latency("network", TREE_MICROSECONDS) if domains > 1 else 0.0
        self._tree = (self._size / domains - 1) * inside + math.log2(domains) * across

    def seconds(self, collective: str, sent_bytes: int) -> float:
        """A collective in which each rank sends `sent_bytes`."""
        if self._size == 1:
            return 0.0
        latency = min(2 * self._ring, 2 * self._tree) if collective == "all_reduce" else self._ring
        return 1e-6 * CALL_MICROSECONDS + latency + sent_bytes * self._byte_seconds
