"""Predicted against measured step times on an emulated cluster, in every cell of tools/benchmarks/benchmark_cluster.py.

    python tools/benchmarks/compare_plan.py runs/cluster/samples.json

Two figures are fitted, to ZeRO-3 at k = 1: what a rank's share of the processor and of its memory reaches, to the CPU
time at the fastest rate, and which part of its rate an uplink carries, to the step at the slowest. CPU time, because
ranks that wait for different messages compute in turn: of the seconds of a step nobody can tell what computing took.
What TCP and Python cost was measured without links. FSDP2 on gloo's own collectives is left out: the planner knows only
rings. So are rates above 1 Gbit/s, which processors that also compute do not reach.
"""

from __future__ import annotations

import functools
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import tools_path  # noqa: F401
from benchmark_cluster_ranks import VARIANTS, BenchmarkSettings
from benchmark_cluster_report import BASELINE, PLAIN, Sample, rate_bits

from megazpp.parallel.dims import ParallelConfig, plan_dims
from megazpp.planner.clock import ClusterCosts
from megazpp.planner.step import PaperStep, measure
from megazpp.program import flags_of, program
from megazpp.topology.cluster import Cluster, Device, Link, Links
from megazpp.topology.layout import Layout
from megazpp.topology.shares import Shares
from megazpp.training.setup import ModelSpec
from megazpp.zero.precision import PrecisionConfig

# Round figures for a rank on a shared processor, scaled by one fitted share.
DEVICE = Device("a share of a processor", teraflops=0.1, gigabytes=1.0, gigabytes_per_second=10.0)
# What is not the model's arithmetic costs the processor too; a wire inside a node costs nothing else. CPU seconds:
BYTE_SECONDS = 0.6e-9  # of a byte over TCP: gloo's all-gather of 4 ranks, 4 MiB per message
MESSAGE_SECONDS = 75e-6  # of a message: ZeRO-3 less HSDP in a benchmark of tiny layers (--local --hidden-size 64)
HOST_SECONDS = {1: 0.073, 2: 0.121}  # of a micro-batch's Python, by TP: HSDP there less its messages
PROCESSORS = 2  # of the machine that was measured
INSIDE = Link(1e6, microseconds=1e-3)
UPLINK_MICROSECONDS = 200.0
REACHED_BITS = 1e9
PRECISION = PrecisionConfig(bf16=True, grad_reduce_in_bf16=True)


class Cell(NamedTuple):
    """What was measured: a variant at a rate."""

    tp: int
    micro_batches: int
    rate: str
    variant: str

    @property
    def bits(self) -> float:
        """Of its rate."""
        return rate_bits(self.rate) or math.inf


class Measured(NamedTuple):
    """Medians of a cell: of a step, and of the CPU time of all ranks in it."""

    seconds: float
    cpu_seconds: float


@program
def main(argv: list[str]) -> None:
    parser = flags_of(__doc__)
    parser.add_argument("samples", type=Path, help="samples.json of tools/benchmarks/benchmark_cluster.py")
    content = json.loads(parser.parse_args(argv).samples.read_text())
    measured = medians([Sample(**s) if isinstance(s, dict) else Sample(*s) for s in content["samples"]])
    if not measured:
        raise ValueError("no samples at emulated rates")
    predict = functools.partial(seconds, shape=content["shape"])
    first = [cell for cell in measured if cell.variant == BASELINE and cell.micro_batches == 1]
    slow, fast = min(first, key=lambda cell: cell.bits), max(first, key=lambda cell: cell.bits)
    compute, network = fit(slow, fast, measured, predict)
    print(f"fitted to {fast.variant} at {fast.rate} and {slow.rate}: compute {compute:.3f}, network {network:.3f}")
    print("k  tp  rate     variant         measured  predicted  error")
    sizes = []
    for cell in sorted(measured, key=lambda cell: (cell.tp, cell.micro_batches, cell.bits)):
        value, ours = measured[cell].seconds, predict(cell, compute, network)
        fitted = cell in (slow, fast)
        sizes += [] if fitted else [abs(ours / value - 1)]
        print(
            f"{cell.micro_batches}  {cell.tp:2}  {cell.rate:7}  {cell.variant:14}  {value:6.2f} s  {ours:7.2f} s  "
            f"{ours / value - 1:+6.1%}{'  calibration' if fitted else ''}"
        )
    print(f"median error of {len(sizes)} cells that were not fitted: {statistics.median(sizes):.1%}")


def medians(samples: list[Sample]) -> dict[Cell, Measured]:
    """Of each cell at an emulated rate."""
    found: dict[Cell, list[Sample]] = defaultdict(list)
    for s in samples:
        cell = Cell(s.tp, s.micro_batches, s.rate, s.variant)
        if s.variant != PLAIN and cell.bits <= REACHED_BITS:
            found[cell].append(s)
    return {
        cell: Measured(statistics.median(s.seconds for s in some), statistics.median(s.cpu_seconds for s in some))
        for cell, some in found.items()
    }


def fit(
    slow: Cell, fast: Cell, measured: dict[Cell, Measured], predict: functools.partial[float]
) -> tuple[float, float]:
    """The shares (compute, network) with which the CPU time of `fast` and the step of `slow` come out as measured."""
    cpu = measured[fast].cpu_seconds / PROCESSORS
    compute = solve(lambda share: predict(fast, share, math.inf), cpu, 100.0)  # on wires that take no time
    return compute, solve(lambda share: predict(slow, compute, share), measured[slow].seconds, 1.0)


def solve(falling: Callable[[float], float], target: float, most: float) -> float:
    """Where between nothing and `most` a falling function is nearest to `target`, to a thousandth."""
    least = 1e-3 * most
    while most / least > 1.001:
        middle = math.sqrt(least * most)
        least, most = (middle, most) if falling(middle) > target else (least, middle)
    return most


def seconds(cell: Cell, compute: float, network: float, *, shape: dict[str, int]) -> float:
    """What the planner says of a cell."""
    variant = VARIANTS[cell.variant]
    assert variant.zero is not None
    settings = BenchmarkSettings(tp=cell.tp, variants=(), **shape)
    cluster = Cluster(
        num_nodes=settings.nodes,
        ranks_per_node=settings.ranks_per_node,
        device=DEVICE,
        links=Links(domain=INSIDE, network=Link(cell.bits / 8e9, UPLINK_MICROSECONDS)),
    )
    parallel = ParallelConfig(tensor_model_parallel_size=cell.tp, hsdp=variant.hsdp)
    layout = plan_dims(parallel, cluster, zero_stage=3)
    shares = Shares(matrix=compute, memory=compute, domain=compute, network=network)
    spec = ModelSpec(
        config=settings.model, vocab_size=settings.vocab_size, zero=variant.zero, precision=PRECISION, seed=0
    )
    step = PaperStep(
        spec,
        layout,
        seq_length=settings.seq_length,
        micro_batch_size=settings.micro_batch_size,
        costs=SharedProcessors(layout, shares),
        on_cpu=True,
    )
    return measure(step, cell.micro_batches).seconds + cell.micro_batches * HOST_SECONDS[cell.tp] * ranks_each(layout)


def ranks_each(layout: Layout) -> float:
    """Ranks that share a processor."""
    return max(layout.cluster.world_size / PROCESSORS, 1.0)


class SharedProcessors(ClusterCosts):
    """All ranks send with the processors that they compute with: a collective beside the compute hides only waiting."""

    def collective(self, axis: str, collective: str, sent_bytes: int) -> float:
        return max(super().collective(axis, collective, sent_bytes), self.taken(axis, collective, sent_bytes))

    def taken(self, axis: str, collective: str, sent_bytes: int) -> float:
        messages = (2 if collective == "all_reduce" else 1) * (self.layout.axis_size(axis) - 1)
        return ranks_each(self.layout) * (messages * MESSAGE_SECONDS + sent_bytes * BYTE_SECONDS)


if __name__ == "__main__":
    raise SystemExit(main())
