"""Published measurements beside what the planner says of them, and the shares that fit the rows for calibration.

    ZeRO++     arXiv 2306.10209, figures 9 and 10 and the DeepSpeed project's article: 384 V100 in 24 DGX-2, fp16, no
               accumulation; TFLOP/s per GPU of ZeRO-3 and ZeRO++, as the charts print them
    SDP4Bit    NeurIPS 2024: 128 H800 in 16 nodes, micro-batch 1 of 2048 tokens; Megatron's distributed optimizer (stage
               1) and 4-bit weight differences with 8/4-bit gradients

What the sources leave open is assumed here. ZeRO++: samples of 1024 tokens, full recomputation, whose operations count,
76 layers of 12288 for 138B, 4 bits on both hops of a gradient; both hops as this program schedules them; DeepSpeed's
usual limit on parameters that are kept for their next use. SDP4Bit: eight adapters of 400 Gbit/s per node (only the
product with the network's share matters), no recomputation, nothing beside the compute (Megatron-LM's default), and the
scheme as our two hops with 4-bit weights, once per step.

How a rank of a DGX-2 reaches the adapters was chosen among four forms, each refitted to the two calibration rows, with
the other rows in sight, so their errors are those of a choice and not of a blind test. Median errors of ratio and
TFLOP/s over them, and the worst ratio: the node's rate capped 8.8 %, 6.1 %, 38 %; a rank's rate capped 10.1 %, 7.0 %,
35 %; behind the rank's own path (taken) 7.7 %, 7.5 %, 39 %. Behind the node's path (8.8 % of the ratio, worst 40 %) 200
and 400 Gbit/s differ as measured too; it misses the calibration rows by up to 7 %, the taken form by 4 %.

Still far off: 138B at 100 Gbit/s and 1024 tokens, where ZeRO++ was measured at 22 TFLOP/s beside 31 for 18B. Nothing
here tells the two apart, for work and bytes grow alike; V100's memory is nearly full at 138B. Passes over memory beside
the compute are taken to cost it nothing; were they to hold it up, the ratio's median error would be 13.5 % (refitted).
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch

from kernels.formats import BlockFormat
from megazpp.model.config import GPTConfig
from megazpp.planner.costs import ClusterCosts
from megazpp.planner.speed import measure
from megazpp.planner.step import PaperStep
from megazpp.planner.trace import Trace, trace_model
from megazpp.topology.cluster import Cluster, Device, Link, Links
from megazpp.topology.layout import Layout, plan_layout
from megazpp.topology.shares import ASSUMED_SHARES, DGX2_SHARES, Shares
from megazpp.zero.config import GatherPlan, ReducePlan, WirePlan, ZeroConfig, plan_wire
from megazpp.zero.precision import PrecisionConfig

Study = Literal["ZeRO++", "SDP4Bit"]
V100 = Device("V100-SXM3-32GB", 125.0, 34.36, 900.0)
H800 = Device("H800", 989.0, 85.9, 3350.0)
SHAPES = {"1.3B": (24, 2048, 16), "6.7B": (32, 4096, 32), "18B": (40, 6144, 48), "138B": (76, 12288, 96)}
VOCABULARY = 50257
REUSE_DISTANCE = 10**9  # DeepSpeed's stage3_max_reuse_distance, in parameters
LINEARS = (3, 1, 4, 4)  # of a layer, in the order of use, in units of the hidden size squared: QKV, projection, MLP
# No more shares are fitted than a study has figures for it. What a V100 reaches in products is measured elsewhere
# (topology/cost.py): figures at one number of tokens cannot tell it from what does not depend on tokens.
FITTED: dict[Study, tuple[str, ...]] = {
    "ZeRO++": ("memory", "network", "uplink"),
    "SDP4Bit": ("matrix", "network"),
}
STARTS: dict[Study, Shares] = {
    "ZeRO++": DGX2_SHARES._replace(memory=0.4, network=0.8, uplink=40.0),
    "SDP4Bit": ASSUMED_SHARES,
}


class Row(NamedTuple):
    """Measured TFLOP/s per GPU without and with the scheme.

    Attributes:
        gigabits: of a node's adapters together.
        tokens: of a micro-batch.
        calibrates: whether shares may be fitted to it.
    """

    study: Study
    model: str
    tp: int
    gigabits: int
    tokens: int
    before: float
    after: float
    calibrates: bool = False


ROWS = (
    Row("ZeRO++", "18B", 1, 400, 1024, 25, 35, True),
    Row("ZeRO++", "138B", 1, 400, 1024, 23, 36),
    Row("ZeRO++", "18B", 1, 400, 2048, 40, 53),
    Row("ZeRO++", "138B", 1, 400, 2048, 36, 50),
    Row("ZeRO++", "18B", 1, 100, 1024, 14, 31, True),
    Row("ZeRO++", "138B", 1, 100, 1024, 11, 22),
    Row("ZeRO++", "18B", 1, 100, 2048, 26, 46),
    Row("ZeRO++", "138B", 1, 100, 2048, 20, 38),
    Row("ZeRO++", "18B", 1, 200, 2048, 37, 50),
    Row("ZeRO++", "138B", 1, 200, 2048, 32, 48),
    Row("SDP4Bit", "1.3B", 1, 3200, 2048, 69.1, 106.0, True),
    Row("SDP4Bit", "6.7B", 4, 3200, 2048, 26.2, 77.9),
    Row("SDP4Bit", "18B", 8, 3200, 2048, 14.5, 59.2),
)


class Predicted(NamedTuple):
    """TFLOP/s per GPU, in the source's convention."""

    before: float
    after: float


def predict(row: Row, shares: Shares) -> Predicted:
    """What the planner says of a row."""
    return Predicted(*(_flops(row) / _seconds(row, shares, quantized=q) * 1e-12 for q in (False, True)))


def errors(row: Row, predicted: Predicted) -> tuple[float, float, float]:
    """Relative errors of both figures and of their ratio."""
    before, after = predicted.before / row.before, predicted.after / row.after
    return before - 1, after - 1, after / before - 1


def median_errors(shares: dict[Study, Shares], rows: Sequence[Row] = ROWS) -> tuple[float, float]:
    """Median sizes of the errors of the ratio and of TFLOP/s, over the rows that nothing was fitted to."""
    found = [errors(row, predict(row, shares[row.study])) for row in rows if not row.calibrates]
    return statistics.median(abs(e[2]) for e in found), statistics.median(abs(x) for e in found for x in e[:2])


def fit(study: Study, say: Callable[[str], None], *, finest: float = 0.015) -> Shares:
    """The shares with the least squared errors (of logarithms) on the study's calibration rows.

    Each in turn is raised and lowered as long as that helps, in steps that halve; no share above 1.
    """
    rows = [row for row in ROWS if row.study == study and row.calibrates]
    shares, loss = _descend(rows, FITTED[study], STARTS[study], finest)
    say(f"{study}: squared error {loss:.5f}")
    return Shares(*(round(share, 3) for share in shares))


def _descend(rows: Sequence[Row], names: tuple[str, ...], start: Shares, finest: float) -> tuple[Shares, float]:
    shares, step, best = start, 0.4, _loss(rows, start)
    while step > finest:
        moved = False
        for name in names:
            for factor in (math.exp(step), math.exp(-step)):
                most = math.inf if name == "uplink" else 1.0
                candidate = shares._replace(**{name: min(getattr(shares, name) * factor, most)})
                loss = _loss(rows, candidate)
                if loss < best:
                    shares, best, moved = candidate, loss, True
        if not moved:
            step /= 2
    return shares, best


def _loss(rows: Sequence[Row], shares: Shares) -> float:
    found = [(row, predict(row, shares)) for row in rows]
    return sum(
        math.log(ours / theirs) ** 2
        for row, predicted in found
        for ours, theirs in ((predicted.before, row.before), (predicted.after, row.after))
    )


def _seconds(row: Row, shares: Shares, *, quantized: bool) -> float:
    layout, wire, megatron = _layout(row), WirePlan(), row.study == "SDP4Bit"
    zero = ZeroConfig(zero_stage=1 if megatron else 3)
    if megatron and quantized:
        four, eight = BlockFormat(4, 128), BlockFormat(8, 128)
        wire = WirePlan(GatherPlan(four, keep=False), ReducePlan(eight, four))
    elif quantized:
        zero = ZeroConfig(zeropp=True, zero_gradient_bits=(4, 4), overlap_param_gather=True, overlap_grad_reduce=True)
        wire = plan_wire(zero, layout)
    step = PaperStep(
        _trace(row._replace(gigabits=0, before=0, after=0)),
        layout=layout,
        wire=wire,
        zero=zero,
        precision=_precision(row),
        costs=_Costs(layout, shares, gathers=gathers_to_fsdp2(row)),
        on_cpu=megatron,  # nothing runs beside the compute
    )
    return measure(step, 1).seconds


class _Costs(ClusterCosts):
    """Costs of a program that gathers weights so many times as often inside a node or over all ranks."""

    def __init__(self, layout: Layout, shares: Shares, *, gathers: float) -> None:
        super().__init__(layout, shares)
        self._gathers = gathers

    def collective(self, axis: str, collective: str, sent_bytes: int) -> float:
        times = self._gathers if collective == "all_gather" and axis in ("shard", "local") else 1.0
        return super().collective(axis, collective, round(times * sent_bytes))


def gathers_to_fsdp2(row: Row) -> float:
    """DeepSpeed's gathers of weights for each of FSDP2's, which are one in forward and one in backward.

    DeepSpeed frees a matrix between its use in recomputation and in backward where the next use is too far away.
    """
    if row.study != "ZeRO++":
        return 1.0
    _, hidden, _ = SHAPES[row.model]
    again = sum(n for i, n in enumerate(LINEARS) if 2 * sum(LINEARS[i + 1 :]) * hidden**2 > REUSE_DISTANCE)
    return 1 + again / sum(LINEARS) / 2


def _layout(row: Row) -> Layout:
    nodes, per_node, device, domain = (24, 16, V100, 150.0) if row.study == "ZeRO++" else (16, 8, H800, 200.0)
    links = Links(domain=Link(domain), network=Link(max(row.gigabits, 1) / 8))
    cluster = Cluster(num_nodes=nodes, ranks_per_node=per_node, device=device, links=links)
    return plan_layout(cluster, tp=row.tp, replicas=1)


def _precision(row: Row) -> PrecisionConfig:
    return PrecisionConfig(fp16=True) if row.study == "ZeRO++" else PrecisionConfig(bf16=True)


@functools.cache
def _trace(row: Row) -> Trace:
    """Of a row without its network and its results."""
    layers, hidden, heads = SHAPES[row.model]
    seq = 1024 if row.study == "ZeRO++" else row.tokens
    config = GPTConfig(
        num_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        max_position_embeddings=seq,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        recompute_granularity="full" if row.study == "ZeRO++" else None,
    )
    return trace_model(
        config,
        vocab_size=VOCABULARY,
        seq_length=seq,
        micro_batch_size=row.tokens // seq,
        layout=_layout(row),
        sequence_parallel=False,
        dtype=torch.float16 if row.study == "ZeRO++" else torch.bfloat16,
    )


def _flops(row: Row) -> float:
    """Narayanan et al. (arXiv 2104.04473), equation 3; three quarters of the layers' part without recomputation."""
    layers, hidden, _ = SHAPES[row.model]
    seq = 1024 if row.study == "ZeRO++" else row.tokens
    passes = 96 if row.study == "ZeRO++" else 72
    inner = passes * layers * hidden**2 * (1 + seq / (6 * hidden)) + 6 * VOCABULARY * hidden
    return row.tokens * inner / row.tp
