"""What programs reach of what data sheets promise, and from which published runs that is known.

A cluster file names its calibration (`device: {shares: h100}`); a device whose file names none has never been checked.
tests/helpers/published.py has every published figure, and its test what the planner predicts of it.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from megazpp.topology.cluster import Device, LinkKind


class Shares(NamedTuple):
    """What a program reaches of what data sheets promise.

    Attributes:
        matrix: of the peak, in a product of full tiles.
        memory: of the memory's rate, in a pass over it.
        domain, node, network: of the wires' rates, in a long message.
        beside: of the device, that a collective takes from what it computes meanwhile: NCCL's kernels occupy
            multiprocessors for as long as they run.
        uplink: no share: GB/s at which one rank brings bytes to its node's adapters, however many those are.
    """

    matrix: float = 1.0
    memory: float = 1.0
    domain: float = 1.0
    node: float = 1.0
    network: float = 1.0
    beside: float = 0.0
    uplink: float = math.inf

    def of(self, kind: LinkKind) -> float:
        return {"domain": self.domain, "node": self.node, "network": self.network}[kind]


class Calibration(NamedTuple):
    """Shares, and how far they were checked.

    Attributes:
        rests_on: where they come from, and the errors against published figures.
        tokens: the fewest per rank and micro-batch at which that holds. With fewer, what is no product counts more.
    """

    shares: Shares
    rests_on: str
    tokens: float = math.inf

    def ends(self, tokens: float) -> tuple[Shares, ...]:
        """The shares for so many tokens per rank and micro-batch; where those were not checked, best and least."""
        return (self.shares,) if tokens >= self.tokens else (self.shares, CALIBRATIONS[LEAST].shares)


# 83 TFLOP/s of 125: Markidis et al., NVIDIA Tensor Core Programmability, Performance & Precision (arXiv 1803.04014).
V100_MATRIX_SHARE = 0.664
NCCL_BLOCKS = 32  # most that a collective runs on, a multiprocessor each (MAXCHANNELS); V100 has 80, H100 132
# Assumed before anything was compared: products reach what they do on V100, memory and wires four fifths.
ASSUMED_SHARES = Shares(
    matrix=V100_MATRIX_SHARE, memory=0.8, domain=0.8, node=0.8, network=0.8, beside=round(NCCL_BLOCKS / 132, 3)
)
# Fitted to the published rows of tests/helpers/published.py; tests/planner/test_published.py has the errors. Few
# figures fix them, so each is what makes those come out, not what a benchmark of that part would show: V100's "memory"
# holds every pass over memory that DeepSpeed makes and FSDP2 does not, H800's "matrix" everything that is no product.
DGX2_SHARES = ASSUMED_SHARES._replace(memory=0.127, network=1.0, beside=NCCL_BLOCKS / 80, uplink=48.856)
H100_SHARES = ASSUMED_SHARES._replace(matrix=0.437)
H800_SHARES = ASSUMED_SHARES._replace(matrix=0.152, network=0.179)  # of eight adapters of 400 Gbit/s

CALIBRATIONS = {
    "v100": Calibration(
        DGX2_SHARES,
        "v100: fitted to two published runs of ZeRO-3 and ZeRO++ on DGX-2 (arXiv 2306.10209); on the eight others "
        "TFLOP/s and speed-up are 7 % off in the median, the speed-up at most 39 %",
        1024,
    ),
    "a100": Calibration(
        ASSUMED_SHARES,
        "a100: fitted to nothing; five published runs of FSDP2 on 64 A100, Llama 8B to 70B, come out within 5 %",
        8192,
    ),
    "h100": Calibration(
        H100_SHARES,
        "h100: fitted to a published run of FSDP2 on 8 H100 of 500 W (Llama 8B, 16,384 tokens per GPU and "
        "micro-batch); that on 128 GPUs comes out 2.5 % too fast (with h800's share of the network 4 % too slow), "
        "and nothing else was compared",
        16384,
    ),
    "h800": Calibration(
        H800_SHARES,
        "h800: fitted to a published run of Megatron-LM on 128 H800 with 2048 tokens per model copy (SDP4Bit), where "
        "all that is no product takes most of the time; on its two other models TFLOP/s are 8 to 18 % off",
        0,
    ),
}
LEAST = "h800"  # the least that any published run has reached
UNCHECKED = Calibration(ASSUMED_SHARES, "shares of the data sheet that came out on A100")


def calibration_for(device: Device | None) -> Calibration:
    """The one that the cluster file names, or what is assumed of devices that nothing is known of."""
    return UNCHECKED if device is None or device.shares is None else CALIBRATIONS[device.shares]
