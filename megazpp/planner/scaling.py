"""The same run on more and more nodes, at fixed tokens per GPU: where each scheme stops scaling, and what does not."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from megazpp.arguments import RunConfig
from megazpp.planner.estimate import Estimator
from megazpp.planner.variants import changed, schemes, with_tp
from megazpp.topology.cluster import Cluster

MAX_TP = 8
COPIES_STEP = 4  # numbers of copies that are tried: 1, 4, 16, ...


class Scaled(NamedTuple):
    """One scheme on one size.

    Attributes:
        teraflops: model TFLOP/s per GPU.
        fits: whether it fits into memory.
        least: TFLOP/s at the least; less than above where shares were not checked for so few tokens.
    """

    gpus: int
    scheme: str
    teraflops: float
    fits: bool
    least: float

    @property
    def speed(self) -> str:
        """As text."""
        most = f"{self.teraflops:.1f}"
        return f"{self.least:.1f} to {most}" if self.least < self.teraflops else most


class Scaling:
    """A run on any number of nodes, with a global batch of so many micro-batches on every rank.

    Args:
        cluster: its nodes are multiplied; an order of ranks is left out.
        micro_batches: of an optimizer step, the same everywhere.
        device_type: whose checks apply.
    Raises:
        ValueError: the run does not say how many samples a rank has.
    """

    def __init__(self, config: RunConfig, cluster: Cluster, *, micro_batches: int, device_type: str) -> None:
        if config.batches.micro_batch_size is None:
            raise ValueError("--micro-batch-size is required: it is what stays the same on more nodes")
        self._config, self._cluster = config, cluster
        self._micro_batches, self._device_type = micro_batches, device_type

    def points(self, nodes: Sequence[int], names: Sequence[str] | None = None) -> Iterator[Scaled]:
        """The schemes of these names (None: all) on every number of nodes on which they can run: HSDP not on one."""
        for count in nodes:
            named = schemes(self._sized(self._config, count))
            yield from self._estimates(count, {name: named[name] for name in names or named})

    def choice(self, nodes: int) -> Scaled | None:
        """The fastest that fits of ZeRO-3, HSDP and ZeRO++, with tensor parallelism or not, in copies or not.

        Tokens per GPU stay: with tensor parallelism a rank's micro-batch is as many times larger.
        """
        found: list[Scaled] = []
        before, size = self._config.parallel.tensor_model_parallel_size, self._config.batches.micro_batch_size
        assert size is not None
        for tp in sorted({1, min(MAX_TP, self._cluster.ranks_per_domain)}):
            batch = {"micro_batch_size": max(size * tp // before, 1)}
            sized = self._sized(changed(with_tp(self._config, tp), batches=batch), nodes)
            prefix = f"TP {tp}, " if tp > 1 else ""
            found += self._estimates(nodes, {prefix + name: run for name, run in _in_copies(sized, nodes)})
        return max((point for point in found if point.fits), key=lambda point: point.teraflops, default=None)

    def _sized(self, config: RunConfig, nodes: int) -> RunConfig:
        assert config.batches.micro_batch_size is not None
        ranks = nodes * self._cluster.ranks_per_node // config.parallel.tensor_model_parallel_size
        samples = config.batches.micro_batch_size * ranks * self._micro_batches
        return changed(config, batches={"global_batch_size": samples, "rampup_batch_size": None})

    def _estimates(self, nodes: int, runs: dict[str, RunConfig]) -> Iterator[Scaled]:
        larger = dataclasses.replace(self._cluster, num_nodes=nodes, order=None)
        estimator = Estimator(larger, device_type=self._device_type)
        for name, run in runs.items():
            try:
                ends = estimator.estimates(run)
            except ValueError:
                continue
            yield Scaled(larger.world_size, name, ends[0].teraflops, ends[0].fits, ends[-1].teraflops)


def scaling_table(found: Sequence[Scaled], choices: Sequence[Scaled | None] = ()) -> str:
    """Markdown: TFLOP/s per GPU by scheme, in brackets where memory is too small; the fastest that fits in bold.

    Args:
        choices: what is chosen of all for each size; empty for no such column.
    """
    names = list(dict.fromkeys(point.scheme for point in found))
    header = ["GPUs", *names, *(["chosen"] if choices else [])]
    rows = [f"| {' | '.join(header)} |", "|---" * len(header) + "|"]
    for index, gpus in enumerate(dict.fromkeys(point.gpus for point in found)):
        row = {point.scheme: point for point in found if point.gpus == gpus}
        fastest = max((p for p in row.values() if p.fits), key=lambda p: p.teraflops, default=None)
        cells = [str(gpus)]
        for point in map(row.get, names):
            text = "-" if point is None else point.speed if point.fits else f"({point.speed})"
            cells.append(f"**{text}**" if point is not None and point is fastest else text)
        cells += [f"{choice.speed}: {choice.scheme}" if choice else "nothing fits" for choice in choices[index:][:1]]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def _in_copies(config: RunConfig, nodes: int) -> Iterator[tuple[str, RunConfig]]:
    named = schemes(config)
    yield "HSDP", named["HSDP"]
    for name in ("ZeRO-3", "--zeropp"):
        copies = 1
        while copies < nodes and nodes % copies == 0:
            text = name if copies == 1 else f"{name}, {copies} copies"
            yield text, changed(named[name], parallel={"num_distributed_optimizer_instances": copies})
            copies *= COPIES_STEP
