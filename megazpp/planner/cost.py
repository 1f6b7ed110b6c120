"""Cost model of the planner: seconds of kernels and of collectives, and calibrations for devices.

A kernel is a matrix product or a pass over memory. It takes the longer of its times for FLOPs and for memory, and
starts after the host has launched it. The host launches kernels one after another without waiting for them, so the
device waits only if the host falls behind (`Simulation.spend`).

    FLOPs       2 x 128 x 128 x k for each tile of a matrix product's result / reachable FLOP/s; tiles of 128 x 128,
                and their number rounded up to complete waves of one tile per multiprocessor; k is the size of the
                dimension that the product contracts
    memory      bytes read and written / reachable memory bandwidth
    launch      HOST_MICROSECONDS for each matrix product, each series of passes over memory, and each collective

The seconds of a collective have two terms (alpha-beta model). The first is the latency of its messages, which follow
one another. The second is the time of the bytes that each rank sends, at the rate of the slowest link on the axis.
Small messages therefore reach a low rate: a message of latency x rate bytes reaches half of the link's rate. With 14
microseconds and 12.5 GB/s this message has 175 kB. In an all-to-all, only the bytes that a rank sends to other nodes
take the network's time.

    algorithm   collective                    messages         bytes per rank
    ring        all-gather, reduce-scatter    n - 1            (n - 1) / n of the buffer
    ring        all-reduce                    2 (n - 1)        2 (n - 1) / n of the buffer
    tree        all-reduce                    see below        2 (n - 1) / n of the buffer
    pairwise    all-to-all                    n - 1            (n - 1) / n of the buffer

n is the number of ranks. A tree all-reduce passes messages along a chain inside each of m domains (a node or an NVLink
domain), and over log2(m) levels between the domains, once up and once down. An all-reduce uses the faster of ring and
tree. Each message of a ring has the latency of the link that it uses, as in NCCL's tuning.cc: a ring of 384 ranks in 24
nodes has 23 network links.

Ranks of a node that send over the network at the same time share the node's network bandwidth. The seconds per byte
that a rank sends to another node depend on the cluster file's network link, and on whether ranks share fast adapters
(see `shares_adapters`):

    measured link      senders / measured bandwidth of the node
    shared adapters    senders / bandwidth of the node + 1 / rate from a rank to its node's adapters (`uplink`)
    others             senders / (bandwidth of the node x `Efficiency.network`)

`senders` is the number of ranks of the node that send at the same time.

A cluster file names a calibration (`device: {calibration: h100}`): the fractions of the data sheet's rates that
programs reach. tests/planner/test_published.py lists published speeds of training runs and the planner's estimates.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from megazpp.topology.cluster import MEASURED, Cluster, Device, LinkKind
from megazpp.topology.layout import AXES, EXPERT_AXES, NODE, PCIE, Layout

# Rows and columns of the tiles in which cuBLAS usually computes the result of a matrix product. Source: NVIDIA, Matrix
# Multiplication Background User's Guide, "tile quantization".
TILE = 128

# Microseconds that a message takes from one rank to the next, by kind of link, for cluster files without latencies.
# Source: NCCL 2.18, src/graph/tuning.cc, hwLat, protocol Simple. NCCL's name for "domain" is NVLink, for "node" PCI.
RING_MICROSECONDS = {"domain": 3.4, "node": 5.7, "network": 14.0}
TREE_MICROSECONDS = {"domain": 4.0, "node": 6.0, "network": 14.0}
CALL_MICROSECONDS = 8.4  # microseconds that every collective takes in addition to its messages (NCCL's baseLat)


class Efficiency(NamedTuple):
    """Fractions of the data-sheet rates of a GPU and its links that programs reach, and two values of the hardware.

    Attributes:
        matrix: fraction of the peak FLOP/s that a matrix product of full tiles reaches.
        memory: fraction of the memory bandwidth that a pass over memory reaches.
        domain: fraction of the NVLink domain's bandwidth that collectives with long messages reach.
        node: fraction of the bandwidth inside a node that collectives with long messages reach.
        network: fraction of the bandwidth between nodes that collectives with long messages reach, if ranks do not
            share fast network adapters.
        multiprocessors: number of multiprocessors of the GPU. If it is infinite, the planner ignores incomplete waves
            of tiles, and the multiprocessors that NCCL takes from compute.
        uplink: GB/s at which one rank brings bytes to network adapters that it shares with other ranks.
    """

    matrix: float = 1.0
    memory: float = 1.0
    domain: float = 1.0
    node: float = 1.0
    network: float = 1.0
    multiprocessors: float = math.inf
    uplink: float = math.inf


class Calibration(NamedTuple):
    """Calibration of the planner's cost model for a device.

    Attributes:
        efficiency: fractions of the data sheet's rates that programs reach on the device.
        rests_on: text that --plan prints: the origin of the fractions, and the errors of the planner's estimates for
            measured training runs.
        tokens: smallest number of tokens per rank and micro-batch among the training runs whose speeds were compared
            with the planner's estimates. --plan warns below this number, because operations other than matrix products
            then take a larger part of the time.
    """

    efficiency: Efficiency
    rests_on: str
    tokens: float = math.inf


# Fraction of the peak that matrix products reach on V100: 83 of 125 TFLOP/s. Source: Markidis et al., NVIDIA Tensor
# Core Programmability, Performance & Precision (arXiv 1803.04014). The planner assumes the same fraction for A100 and
# for the 700 W H100.
V100_MATRIX_SHARE = 0.664
# Largest number of multiprocessors that one collective of NCCL occupies (MAXCHANNELS). On a GPU with M multiprocessors,
# a collective of t seconds delays the compute that overlaps with it by t * NCCL_BLOCKS / M seconds.
NCCL_BLOCKS = 32
# Microseconds of the host per launch of a kernel or collective, with the Python code around it. Measured: 2.3, 2.9 and
# 4.1 ms of CPU time per layer and micro-batch for gpt_1b3 with ZeRO-3, --zeropp, and --zeropp with 2 tensor-parallel
# ranks, in which the planner counts 34, 43 and 53 launches. The host was an AMD EPYC of 2.4 GHz, with a substitute for
# the CUDA driver instead of a GPU.
HOST_MICROSECONDS = 70.0
# Smallest bandwidth, in GB/s, at which the planner counts a network adapter as fast: 100 Gbit/s (`shares_adapters`).
ADAPTER_GIGABYTES = 12.5
# GB/s at which one rank brings bytes to network adapters that it shares with other ranks. Fitted to two runs on V100,
# see DGX2_EFFICIENCY.
UPLINK_GIGABYTES = 48.55
# Fractions that were assumed before any comparison with runs: matrix products reach the fraction that was measured on
# V100, memory and links reach 0.8. Numbers of multiprocessors are from NVIDIA's data sheets.
ASSUMED_EFFICIENCY = Efficiency(
    matrix=V100_MATRIX_SHARE,
    memory=0.8,
    domain=0.8,
    node=0.8,
    network=0.8,
    multiprocessors=132,
    uplink=UPLINK_GIGABYTES,
)
# Fractions fitted to published training speeds, which tests/planner/test_published.py lists with the remaining errors.
# The speeds are few, so a fitted fraction also absorbs effects that the cost model lacks. A benchmark of memory, matrix
# products or links alone would therefore show another value. V100's "memory" includes passes over memory that DeepSpeed
# makes and FSDP2 does not. The "matrix" of H100 of 500 W includes its lower clock rate, and time that torch.compile
# would save.
DGX2_EFFICIENCY = ASSUMED_EFFICIENCY._replace(memory=0.131, multiprocessors=80)
H100_500W_EFFICIENCY = ASSUMED_EFFICIENCY._replace(matrix=0.436)

CALIBRATIONS = {
    "v100": Calibration(
        DGX2_EFFICIENCY,
        "v100: fitted to two published runs of ZeRO-3 and ZeRO++ on DGX-2 (arXiv 2306.10209); for the eight other "
        "runs, the median error of TFLOP/s and speed-up is 7 %, and the largest error is 43 %",
        1024,
    ),
    "a100": Calibration(
        ASSUMED_EFFICIENCY._replace(multiprocessors=108),
        "a100: not fitted; estimates for 64 A100 are up to 6 % too slow for five published runs of FSDP2 (Llama 8B to "
        "70B), and 6 to 15 % too fast for six runs of Megatron-LM and SDP4Bit (1.3B to 6.7B)",
        2048,
    ),
    "h100": Calibration(
        ASSUMED_EFFICIENCY,
        "h100: not fitted; this project's runs on one H100 of 700 W (125M to 1.3B, torch.compile) are estimated up to "
        "14 % too slow; no run on several H100 of 700 W was compared",
        8192,
    ),
    "h100_500w": Calibration(
        H100_500W_EFFICIENCY,
        "h100_500w: fitted to a published run of FSDP2 without torch.compile on 8 H100 of 500 W (Llama 8B, 16,384 "
        "tokens per GPU and micro-batch); the same run on 128 GPUs is estimated 2 % too fast",
        16384,
    ),
    "h800": Calibration(
        ASSUMED_EFFICIENCY._replace(matrix=0.221, network=0.178),  # network: fraction of 8 x 400 Gbit/s per node
        "h800: fitted to a published run of Megatron-LM on 128 H800 with 2048 tokens per model copy (SDP4Bit); for "
        "four other models TFLOP/s are 2 to 22 % off",
        0,
    ),
    MEASURED: Calibration(
        Efficiency(),
        "measured: --measure-links has measured products and copies on this device; other operations are slower, so "
        "take the times as lower bounds",
        0,
    ),
}
# Calibration for a cluster file without `device.calibration`
UNCHECKED = Calibration(ASSUMED_EFFICIENCY, "shares of the data sheet that agree with published runs on A100")


def calibration_for(device: Device | None) -> Calibration:
    """Return the calibration that a cluster file names for its device, or UNCHECKED if the file names none.

    Args:
        device: device of the cluster file; None if the file does not describe the device.
    """
    return UNCHECKED if device is None or device.calibration is None else CALIBRATIONS[device.calibration]


class Operation(NamedTuple):
    """Operation of a training step: a batch of matrix products [m, k] x [k, n], a pass over memory, or a collective.

    Attributes:
        kind: "matrix" for matrix products, "memory" for a pass over memory, or a collective such as "all_gather".
        bytes: bytes that the matrix products or the pass read and write, or that this rank sends in the collective.
        m: rows of each matrix product's result.
        n: columns of each matrix product's result.
        k: size of the dimension that the matrix products contract.
        batch: number of matrix products. For causal attention this is a fraction, because scores above the diagonal
            are not computed.
        axis: axis of the mesh on which the collective runs.
    """

    kind: str
    bytes: int
    m: int = 0
    n: int = 0
    k: int = 0
    batch: float = 0.0
    axis: str = "tp"


class Costs:
    """Interface of the planner's cost model. In this base class every operation takes 0 seconds, to count bytes only.

    Attributes:
        launch: seconds that the host needs to launch a kernel or a collective.
    """

    launch = 0.0

    def beside(self, axis: str) -> float:
        """Return the seconds by which one second of a collective on `axis` delays the compute that overlaps with it."""
        return 0.0

    def operation(self, operation: Operation) -> float:
        """Return the seconds of matrix products or of a pass over memory on the device, without the host's launch."""
        return 0.0

    def memory(self, touched_bytes: int) -> float:
        """Return the seconds of a pass over device memory that reads and writes `touched_bytes` in total."""
        return 0.0

    def encode(self, weight_bytes: int, message_bytes: int) -> float:
        """Return the seconds in which a device encodes the lossless delta of 16-bit weights.

        Args:
            weight_bytes: bytes of the weights.
            message_bytes: bytes of the encoded delta.
        """
        # Two kernels read the old and the new weights, which makes 4 x weight_bytes: one computes the sizes of the
        # encoded blocks, and the other writes these blocks. A third kernel touches a few bytes per block of weights.
        return self.memory(4 * weight_bytes + message_bytes)

    def decode(self, weight_bytes: int, message_bytes: int) -> float:
        """Return the seconds in which a device applies a lossless delta of `message_bytes` to 16-bit weights."""
        return self.memory(2 * weight_bytes + message_bytes)

    def collective(self, axis: str, collective: str, sent_bytes: int) -> float:
        """Return the seconds of the collective `collective` on `axis` in which each rank sends `sent_bytes`."""
        return 0.0

    def copy(self, num_bytes: int) -> float:
        """Return the seconds of a copy of `num_bytes` from the device to host memory or back."""
        return 0.0


class ClusterCosts(Costs):
    """Cost model of a cluster whose file describes the device and all links that the layout uses.

    On a GPU, a tile at the edge of a matrix product's result takes as long as a full tile, and an incomplete last wave
    of tiles takes as long as a complete wave. A CPU has no tiles.

    Args:
        layout: sizes and links of the parallel axes.
        efficiency: fractions of the data sheet's rates that programs reach.
        free: axes whose collectives take 0 seconds. A comparison with an estimate without `free` shows how much time
            these collectives cost a step (`Estimator.exposed`).
    """

    def __init__(self, layout: Layout, efficiency: Efficiency, *, free: tuple[str, ...] = ()) -> None:
        device = layout.cluster.device
        assert device is not None, "times need a device"
        self._device = device
        # `Estimator._choose` describes a device of unknown speed as infinitely fast. Launches then take 0 seconds too,
        # so that estimates compare only communication.
        self.launch = 1e-6 * HOST_MICROSECONDS if math.isfinite(device.teraflops) else 0.0
        self._multiprocessors = efficiency.multiprocessors
        self._flops_per_second = 1e12 * device.teraflops * efficiency.matrix
        self._bytes_per_second = 1e9 * device.gigabytes_per_second * efficiency.memory
        host = layout.cluster.host
        self._copied_per_second = math.inf if host is None or PCIE in free else 1e9 * host.gigabytes_per_second
        names = (*AXES, NODE, *(EXPERT_AXES if layout.has_expert_axes else ()))
        self._network = {axis for axis in names if "network" in layout.links(axis)}
        self._axes = {axis: AxisCost(layout, axis, efficiency) for axis in names if axis not in free}

    def beside(self, axis: str) -> float:
        if self._device.is_cpu:  # TCP inside a node takes the cores on which ranks compute, so compute waits
            return 0.0 if axis in self._network else 1.0
        return NCCL_BLOCKS / self._multiprocessors

    def encode(self, weight_bytes: int, message_bytes: int) -> float:
        rate = self._device.encode_gigabytes_per_second
        return super().encode(weight_bytes, message_bytes) if rate is None else 1e-9 * weight_bytes / rate

    def decode(self, weight_bytes: int, message_bytes: int) -> float:
        rate = self._device.decode_gigabytes_per_second
        return super().decode(weight_bytes, message_bytes) if rate is None else 1e-9 * weight_bytes / rate

    def copy(self, num_bytes: int) -> float:
        return num_bytes / self._copied_per_second

    def operation(self, operation: Operation) -> float:
        seconds = self.memory(operation.bytes)
        if operation.kind == "memory":
            return seconds
        tile = 1 if self._device.is_cpu else TILE
        tiles = math.ceil(operation.m / tile) * math.ceil(operation.n / tile) * operation.batch
        if math.isfinite(self._multiprocessors):
            tiles = math.ceil(tiles / self._multiprocessors) * self._multiprocessors
        flops = 2.0 * tiles * tile * tile * operation.k
        return max(flops / self._flops_per_second, seconds)

    def memory(self, touched_bytes: int) -> float:
        return touched_bytes / self._bytes_per_second

    def collective(self, axis: str, collective: str, sent_bytes: int) -> float:
        return self._axes[axis].seconds(collective, sent_bytes) if axis in self._axes else 0.0


class AxisCost:
    """Cost model of the collectives on one axis of the mesh.

    Args:
        layout: sizes and links of the parallel axes.
        axis: name of the axis.
        efficiency: fractions of the links' data-sheet rates that collectives reach.
    """

    def __init__(self, layout: Layout, axis: str, efficiency: Efficiency) -> None:
        cluster = layout.cluster
        known = {} if cluster.links is None else cluster.links.known
        self._size, self._byte_seconds, self._pairwise_seconds = layout.axis_size(axis), 0.0, 0.0
        # ---- compute the seconds per byte that each rank sends, on the slowest kind of link of the axis
        # `count` is the number of the cluster's ranks that send over this kind of link in the rings of the axis. `rate`
        # is the bandwidth in GB/s that the senders of a node share. `alone` is the further time in seconds per GB on a
        # rank's own way to adapters that the ranks of a node share (see "shared adapters" at the top).
        for kind, count in layout.links(axis).items():
            assert kind in known, f"axis {axis} uses links.{kind}, whose speed is unknown"
            link, is_network = known[kind], kind == "network"
            senders = max(count / cluster.num_nodes, 1.0) if is_network else 1.0
            rate, alone = link.gigabytes_per_second, 0.0
            if not link.is_measured:
                if is_network and shares_adapters(cluster, rate) and math.isfinite(efficiency.uplink):
                    alone = 1.0 / efficiency.uplink
                else:
                    rate *= getattr(efficiency, kind)
            byte_seconds = pairwise = senders / rate + alone
            if is_network:  # in an all-to-all, all ranks of a node send over the network, each a part of its bytes
                pairwise = layout.network_share(axis) * (cluster.ranks_per_node / rate + alone)
            self._byte_seconds = max(self._byte_seconds, 1e-9 * byte_seconds)
            self._pairwise_seconds = max(self._pairwise_seconds, 1e-9 * pairwise)

        # ---- compute the latency of a ring and of a tree over the axis's ranks
        def latency(kind: LinkKind, default: dict[str, float]) -> float:
            """Return the seconds that a message takes on a kind of link.

            `default` has microseconds by kind of link, for cluster files without latencies.
            """
            microseconds = known[kind].microseconds
            return 1e-6 * (default[kind] if microseconds is None else microseconds)

        # `hops` has the number of links of each kind between neighbors on the axis. A network link joins two domains.
        hops = layout.hops(axis)
        self._ring = sum(hops[kind] * latency(kind, RING_MICROSECONDS) for kind in hops)
        domains = hops.get("network", 0) + 1
        inside = max((latency(kind, TREE_MICROSECONDS) for kind in hops if kind != "network"), default=0)
        across = latency("network", TREE_MICROSECONDS) if domains > 1 else 0.0
        self._tree = (self._size / domains - 1) * inside + math.log2(domains) * across

    def seconds(self, collective: str, sent_bytes: int) -> float:
        """Return the seconds of the collective `collective` in which each rank sends `sent_bytes`; 0 for one rank."""
        if self._size == 1:
            return 0.0
        latency = min(2 * self._ring, 2 * self._tree) if collective == "all_reduce" else self._ring
        byte_seconds = self._pairwise_seconds if collective == "all_to_all" else self._byte_seconds
        return 1e-6 * CALL_MICROSECONDS + latency + sent_bytes * byte_seconds


def shares_adapters(cluster: Cluster, gigabytes_per_second: float) -> bool:
    """Return True if the ranks of a node share fast network adapters.

    The planner assumes so if the node has at least 100 Gbit/s of network bandwidth, but less than 100 Gbit/s per rank.

    Args:
        cluster: cluster with the number of ranks per node.
        gigabytes_per_second: network bandwidth of a node, in each direction.
    """
    return ADAPTER_GIGABYTES <= gigabytes_per_second < ADAPTER_GIGABYTES * cluster.ranks_per_node
