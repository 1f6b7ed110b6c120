"""Published speeds of FSDP2 on A100 and H100 beside what the planner says of them.

torchtitan's own measurements, plain FSDP2 in bf16 without torch.compile and fp8 where the source says so:

    A100    docs/performance.md: 8 nodes of 8 A100 80 GB; the network is not said, 8 x 200 Gbit/s are assumed, and that
            nothing was compiled
    H100    benchmarks/llama3_h100_202412_torchtitan.md: 8 H100 with 96 GB at 2.4 TB/s and 500 W per node, 400 Gbit/s
            each

"Selective" recomputation there is of every second layer or matrix: half of the layers here. What is fitted is how much
of its peak an H100 reaches in products, to the run inside one node; nothing is fitted to A100.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from megazpp.model.config import GPTConfig
from megazpp.planner.costs import ClusterCosts
from megazpp.planner.speed import measure
from megazpp.planner.step import PaperStep
from megazpp.planner.trace import Trace, trace_model
from megazpp.topology.cluster import Cluster, Device, Link, Links
from megazpp.topology.layout import Layout, plan_layout
from megazpp.topology.shares import Shares
from megazpp.zero.config import WirePlan, ZeroConfig
from megazpp.zero.precision import PrecisionConfig

A100 = Device("A100-SXM4-80GB", 312.0, 85.9, 2039.0, shares="a100")
H100 = Device("H100 96GB HBM2e", 989.0, 103.0, 2400.0, shares="h100")
LINKS = {"a100": Links(domain=Link(300.0), network=Link(200.0)), "h100": Links(domain=Link(450.0), network=Link(400.0))}
PRECISION = PrecisionConfig(bf16=True)


class PublishedShape(NamedTuple):
    """Of a Llama model; `groups` of keys and values."""

    layers: int
    hidden: int
    heads: int
    groups: int
    ffn: int
    vocabulary: int


LLAMA3_8B, LLAMA3_70B = PublishedShape(32, 4096, 32, 8, 14336, 128256), PublishedShape(80, 8192, 64, 8, 28672, 128256)
LLAMA2_13B, LLAMA2_70B = PublishedShape(40, 5120, 40, 40, 13824, 32000), PublishedShape(80, 8192, 64, 8, 28672, 32000)


class SpeedRow(NamedTuple):
    """Measured tokens per second and GPU.

    Attributes:
        nodes: of 8 GPUs.
        seq, samples: tokens of a sample, samples of a micro-batch.
        recomputed: part of the layers.
        measured: tokens per second and GPU.
        calibrates: whether a share is fitted to it.
    """

    name: str
    device: Device
    shape: PublishedShape
    nodes: int
    seq: int
    samples: int
    recomputed: float
    measured: float
    calibrates: bool = False


SPEED_ROWS = (
    SpeedRow("Llama 3 8B", A100, LLAMA3_8B, 8, 8192, 1, 0.5, 2904),
    SpeedRow("Llama 3 70B", A100, LLAMA3_70B, 8, 8192, 1, 1.0, 331),
    SpeedRow("Llama 2 13B", A100, LLAMA2_13B, 8, 4096, 2, 0.0, 2162),
    SpeedRow("Llama 2 13B", A100, LLAMA2_13B, 8, 4096, 2, 0.5, 1914),
    SpeedRow("Llama 2 70B", A100, LLAMA2_70B, 8, 4096, 2, 1.0, 353),
    SpeedRow("Llama 3 8B", H100, LLAMA3_8B, 1, 8192, 2, 0.5, 5762, True),
    SpeedRow("Llama 3 8B", H100, LLAMA3_8B, 16, 8192, 2, 0.5, 5605),
)


def planned_speed(row: SpeedRow, shares: Shares) -> float:
    """Tokens per second and GPU, as planned."""
    layout = _layout(row)
    step = PaperStep(
        _trace(row.shape, row.seq, row.samples, row.recomputed),
        layout=layout,
        wire=WirePlan(),
        zero=ZeroConfig(zero_stage=3),
        precision=PRECISION,
        costs=ClusterCosts(layout, shares),
    )
    return row.seq * row.samples / measure(step, 1).seconds


def fit_matrix(row: SpeedRow, shares: Shares, *, finest: float = 1e-3) -> Shares:
    """The share of the peak with which `row` comes out as measured."""
    least, most = 0.0, 1.0
    while most - least > finest:
        middle = (least + most) / 2
        faster = planned_speed(row, shares._replace(matrix=middle)) > row.measured
        least, most = (least, middle) if faster else (middle, most)
    return shares._replace(matrix=round((least + most) / 2, 3))


def _layout(row: SpeedRow) -> Layout:
    assert row.device.shares is not None
    links = LINKS[row.device.shares]
    cluster = Cluster(num_nodes=row.nodes, ranks_per_node=8, device=row.device, links=links)
    return plan_layout(cluster, tp=1, replicas=1)


@functools.cache
def _trace(shape: PublishedShape, seq: int, samples: int, recomputed: float) -> Trace:
    config = GPTConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        ffn_hidden_size=shape.ffn,
        num_attention_heads=shape.heads,
        group_query_attention=shape.groups < shape.heads,
        num_query_groups=shape.groups if shape.groups < shape.heads else 1,
        max_position_embeddings=seq,
        position_embedding_type="rope",
        normalization="RMSNorm",
        swiglu=True,
        disable_bias_linear=True,
        untie_embeddings_and_output_weights=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        recompute_granularity="full" if recomputed else None,
        recompute_method="block" if recomputed else None,
        recompute_num_layers=round(recomputed * shape.layers) if recomputed else None,
    )
    return trace_model(
        config,
        vocab_size=shape.vocabulary,
        seq_length=seq,
        micro_batch_size=samples,
        layout=plan_layout(Cluster(num_nodes=1, ranks_per_node=1), tp=1, replicas=1),
        sequence_parallel=False,
        dtype=torch.bfloat16,
    )
