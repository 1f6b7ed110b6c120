"""What NCCL is asked for, axis by axis: who may interrupt, and how many SMs communication may take from the matmuls.

The cross hops run beside everything else; beside, not before. A blocking collective runs on the caller's stream (torch
2.8 and newer): the tensor-parallel ones between the matmuls, the hops on their queues (parallel/comm_queue.py), which
have the priorities of this table. A group's own stream, to which the flag refers, is that of asynchronous
collectives; a step has none.

| axis  | stream        | channels | because                                                                        |
|-------|---------------|----------|--------------------------------------------------------------------------------|
| tp    | high priority | NCCL's   | the next matmul waits for it, several times per layer                          |
| local | high priority | NCCL's   | just in time for the next layer                                                |
| cross | normal        | flags'   | has a whole step's time; must not take SMs from matmuls for as long as it runs |
| island| normal        | flags'   | the same, and the time of several steps                                        |
| others| normal        | NCCL's   | plain ZeRO's ring over all data ranks, all-reduces between copies              |

Where all data ranks share a local domain, the shard axis is the local one and is treated like it.

Groups of several axes have collectives in flight beside each other. Each holds SMs until its peers have come, so two
GPUs that start two of them in another order can wait for each other for ever. NCCL_LAUNCH_ORDER_IMPLICIT (NCCL 2.26)
makes the order in which the host launches them, which is the same on all ranks, that of the device.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from megazpp.flags import flag
from megazpp.topology.layout import AXES, Layout

LAUNCH_ORDER = "NCCL_LAUNCH_ORDER_IMPLICIT"
MOST_CTAS = 64  # of NCCL 2.25 and newer; 32 before


@dataclass(frozen=True, kw_only=True)
class NcclConfig:
    """NCCL: priority and channels of the process groups (no effect on gloo)

    A CTA of NCCL's is a channel and occupies an SM for as long as its collective runs; NCCL takes up to 32 or 64 of the
    132 SMs of an H100. A rank's share of the network is a small part of NVLink's rate (50 GB/s for an adapter of
    400 Gbit/s, 450 GB/s for NVLink), so the cross axis may need few of them: with --zeropp try
    --nccl-cross-max-ctas 8, six in a hundred SMs. Nothing is set by default, because no value has been measured;
    --measure-links shows what the cross axis reaches.
    """

    nccl_high_priority: bool = flag(
        True, "streams of high priority for tensor-parallel and node-local groups: their kernels start first"
    )
    nccl_cross_max_ctas: int | None = flag(
        None, "SMs that a collective between nodes may occupy; fewer leave more to the matmuls (NCCL decides)"
    )
    nccl_cross_min_ctas: int | None = flag(None, "SMs that a collective between nodes takes at least (NCCL decides)")
    nccl_cross_cga_cluster_size: int | None = flag(
        None, "thread blocks per cluster of collectives between nodes, 0 to 8, on Hopper and newer (NCCL decides)"
    )

    def __post_init__(self) -> None:
        least, most, cluster = self.nccl_cross_min_ctas, self.nccl_cross_max_ctas, self.nccl_cross_cga_cluster_size
        for name, value in (("--nccl-cross-min-ctas", least), ("--nccl-cross-max-ctas", most)):
            if value is not None and not 1 <= value <= MOST_CTAS:
                raise ValueError(f"{name} {value} is not a number from 1 to {MOST_CTAS}")
        if least is not None and most is not None and least > most:
            raise ValueError(f"--nccl-cross-min-ctas {least} is more than --nccl-cross-max-ctas {most}")
        if cluster is not None and not 0 <= cluster <= 8:
            raise ValueError(f"--nccl-cross-cga-cluster-size {cluster} is not a number from 0 to 8")


def order_launches(layout: Layout, env: MutableMapping[str, str] = os.environ) -> None:
    """Have NCCL keep the order of launches where several axes have more than one rank, unless the user has said.

    Islands of one rank count too: their hops are in flight beside collectives of all ranks.

    For a process before its first collective, when NCCL reads it.
    """
    if layout.island > 1 or sum(layout.axis_size(axis) > 1 for axis in AXES) > 1:
        env.setdefault(LAUNCH_ORDER, "1")


def axis_options(axis: str, layout: Layout, config: NcclConfig) -> Any:
    """What torch takes as `pg_options` for a new group of `axis`: the table at the top, and of the rest NCCL's own.

    A new object each time, because a group keeps and changes the one it gets. None, for torch's defaults, on gloo and
    for one rank.
    """
    if dist.get_backend() != "nccl" or layout.axis_size(axis) == 1:
        return None
    inside = axis in ("tp", "local") or (axis == "shard" and layout.cross == 1)
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=inside and config.nccl_high_priority)
    if axis in ("cross", "island"):
        for name in ("min_ctas", "max_ctas", "cga_cluster_size"):
            value = getattr(config, f"nccl_cross_{name}")
            if value is not None:
                setattr(options.config, name, value)
    return options
