"""The same run on more and more nodes, at fixed tokens per GPU: where each scheme stops scaling."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from megazpp.arguments import RunConfig
from megazpp.parallel.dims import plan_dims
from megazpp.planner.estimate import Estimator, schemes
from megazpp.planner.search import usable_gigabytes
from megazpp.topology.cluster import Cluster
from megazpp.topology.cost import shares_for


class Scaled(NamedTuple):
    """One scheme on one size.

    Attributes:
        teraflops: model TFLOP/s per GPU.
        gigabytes: of rank 0.
        fits: whether that is in its memory.
        cross_gigabytes: that a node sends to others per optimizer step.
    """

    gpus: int
    scheme: str
    teraflops: float
    gigabytes: float
    fits: bool
    cross_gigabytes: float


def scale(
    config: RunConfig, cluster: Cluster, nodes: Sequence[int], *, micro_batches: int, vocab_size: int, device_type: str
) -> Iterator[Scaled]:
    """Every scheme on every number of nodes.

    Args:
        cluster: its nodes are multiplied; an order of ranks is left out.
        micro_batches: of an optimizer step, the same everywhere.
    Raises:
        ValueError: the flags do not fit a size.
    """
    for count in nodes:
        larger = dataclasses.replace(cluster, num_nodes=count, order=None)
        layout = plan_dims(config.parallel, larger, zero_stage=3)
        assert config.batches.micro_batch_size is not None
        samples = config.batches.micro_batch_size * layout.data * micro_batches
        batches = dataclasses.replace(config.batches, global_batch_size=samples, rampup_batch_size=None)
        estimator = Estimator(larger, vocab_size=vocab_size, device_type=device_type, shares=shares_for(cluster.device))
        limit = usable_gigabytes(estimator)
        for name, other in schemes(dataclasses.replace(config, batches=batches)).items():
            try:
                estimate = estimator.estimate(other)
            except ValueError:  # HSDP on one node
                continue
            needed = estimate.memory.total / 1e9
            yield Scaled(
                larger.world_size,
                name,
                estimate.teraflops,
                needed,
                limit is None or needed <= limit,
                estimate.node_cross_bytes / 1e9,
            )


def scaling_table(found: Sequence[Scaled]) -> str:
    """Markdown: TFLOP/s per GPU by scheme, in brackets where memory is too small; the fastest that fits in bold."""
    names = list(dict.fromkeys(point.scheme for point in found))
    lines = ["| GPUs | " + " | ".join(names) + " |", "|---|" + "---|" * len(names)]
    for gpus in dict.fromkeys(point.gpus for point in found):
        row = {point.scheme: point for point in found if point.gpus == gpus}
        fastest = max((p for p in row.values() if p.fits), key=lambda p: p.teraflops, default=None)
        cells = []
        for name in names:
            point = row.get(name)
            text = "-" if point is None else f"{point.teraflops:.1f}" if point.fits else f"({point.teraflops:.1f})"
            cells.append(f"**{text}**" if point is not None and point is fastest else text)
        lines.append(f"| {gpus} | " + " | ".join(cells) + " |")
    return "\n".join(lines)
