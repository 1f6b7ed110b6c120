"""The same run on more and more nodes, at fixed tokens per GPU: where each scheme stops scaling, and what does not."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from megazpp.arguments import RunConfig
from megazpp.planner.estimate import Estimate, Estimator, schemes
from megazpp.planner.nearest import with_tp
from megazpp.topology.cluster import Cluster

MAX_TP = 8
COPIES_STEP = 4  # numbers of copies that are tried: 1, 4, 16, ...


class Scaled(NamedTuple):
    """One scheme on one size.

    Attributes:
        teraflops: model TFLOP/s per GPU.
        least: the same, at the least; another one where shares were not checked for so few tokens.
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
    least: float | None = None

    @property
    def speed(self) -> str:
        """As text."""
        between = self.least is not None and self.least < self.teraflops
        return f"{self.least:.1f} to {self.teraflops:.1f}" if between else f"{self.teraflops:.1f}"


def scale(
    config: RunConfig,
    cluster: Cluster,
    nodes: Sequence[int],
    *,
    micro_batches: int,
    vocab_size: int,
    device_type: str,
    names: Sequence[str] | None = None,
) -> Iterator[Scaled]:
    """Every scheme on every number of nodes.

    Args:
        cluster: its nodes are multiplied; an order of ranks is left out.
        micro_batches: of an optimizer step, the same everywhere.
        names: of the schemes; None for all.
    Raises:
        ValueError: the flags do not fit a size.
    """
    for count in nodes:
        estimator = _estimator(cluster, count, vocab_size=vocab_size, device_type=device_type)
        sized = _sized(config, estimator.cluster, micro_batches=micro_batches)
        for name, other in schemes(sized).items():
            if names is not None and name not in names:
                continue
            try:
                yield _scaled(name, estimator.estimates(other))
            except ValueError:  # HSDP on one node
                continue


def choose(
    config: RunConfig, cluster: Cluster, nodes: int, *, micro_batches: int, vocab_size: int, device_type: str
) -> Scaled | None:
    """The fastest that fits of ZeRO-3, HSDP and ZeRO++, with tensor parallelism or not, in copies of the model or not.

    Tokens per GPU stay: with tensor parallelism a rank's micro-batch is as many times larger.
    """
    estimator = _estimator(cluster, nodes, vocab_size=vocab_size, device_type=device_type)
    best: Scaled | None = None
    for tp in sorted({1, min(MAX_TP, cluster.ranks_per_domain)}):
        sized = _sized(_with_tp(config, tp), estimator.cluster, micro_batches=micro_batches)
        for name, other in _in_copies(sized, nodes):
            try:
                found = _scaled(f"TP {tp}, {name}" if tp > 1 else name, estimator.estimates(other))
            except ValueError:
                continue
            if found.fits and (best is None or found.teraflops > best.teraflops):
                best = found
    return best


def scaling_table(found: Sequence[Scaled], choices: Sequence[Scaled | None] = ()) -> str:
    """Markdown: TFLOP/s per GPU by scheme, in brackets where memory is too small; the fastest that fits in bold.

    Args:
        choices: for each size what `choose` says; empty for no such column.
    """
    names = list(dict.fromkeys(point.scheme for point in found))
    sizes = list(dict.fromkeys(point.gpus for point in found))
    chosen = [f"{choice.speed}: {choice.scheme}" if choice else "nothing fits" for choice in choices]
    extra = ["chosen"] if choices else []
    lines = ["| GPUs | " + " | ".join([*names, *extra]) + " |", "|---|" + "---|" * (len(names) + len(extra))]
    for index, gpus in enumerate(sizes):
        row = {point.scheme: point for point in found if point.gpus == gpus}
        fastest = max((p for p in row.values() if p.fits), key=lambda p: p.teraflops, default=None)
        cells = []
        for name in names:
            point = row.get(name)
            text = "-" if point is None else point.speed if point.fits else f"({point.speed})"
            cells.append(f"**{text}**" if point is not None and point is fastest else text)
        lines.append(f"| {gpus} | " + " | ".join([*cells, *chosen[index : index + 1]]) + " |")
    return "\n".join(lines)


def _estimator(cluster: Cluster, nodes: int, *, vocab_size: int, device_type: str) -> Estimator:
    larger = dataclasses.replace(cluster, num_nodes=nodes, order=None)
    return Estimator(larger, vocab_size=vocab_size, device_type=device_type)


def _sized(config: RunConfig, cluster: Cluster, *, micro_batches: int) -> RunConfig:
    """The run with a global batch of so many micro-batches on every rank."""
    assert config.batches.micro_batch_size is not None
    ranks = cluster.world_size // config.parallel.tensor_model_parallel_size
    samples = config.batches.micro_batch_size * ranks * micro_batches
    batches = dataclasses.replace(config.batches, global_batch_size=samples, rampup_batch_size=None)
    return dataclasses.replace(config, batches=batches)


def _with_tp(config: RunConfig, tp: int) -> RunConfig:
    before, size = config.parallel.tensor_model_parallel_size, config.batches.micro_batch_size
    assert size is not None
    batches = dataclasses.replace(config.batches, micro_batch_size=max(size * tp // before, 1))
    return dataclasses.replace(with_tp(config, tp), batches=batches)


def _in_copies(config: RunConfig, nodes: int) -> Iterator[tuple[str, RunConfig]]:
    named = schemes(config)
    yield "HSDP", named["HSDP"]
    for name in ("ZeRO-3", "--zeropp"):
        copies = 1
        while copies < nodes and nodes % copies == 0:
            parallel = dataclasses.replace(named[name].parallel, num_distributed_optimizer_instances=copies)
            text = name if copies == 1 else f"{name}, {copies} copies"
            yield text, dataclasses.replace(named[name], parallel=parallel)
            copies *= COPIES_STEP


def _scaled(name: str, estimates: Sequence[Estimate]) -> Scaled:
    estimate = estimates[0]
    return Scaled(
        estimate.plan.layout.cluster.world_size,
        name,
        estimate.teraflops,
        estimate.gigabytes,
        estimate.fits,
        estimate.node_cross_bytes / 1e9,
        estimates[-1].teraflops,
    )
