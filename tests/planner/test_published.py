"""The planner beside published measurements: the table, and the recorded errors, so that a change shows.

The shares were fitted to the rows marked so, at commit 4e7c419, by its tools/benchmarks/calibrate.py.

    ZeRO++      arXiv 2306.10209, figures 9 and 10 and the DeepSpeed project's article: 384 V100 in 24 DGX-2, fp16, no
                accumulation; TFLOP/s per GPU of ZeRO-3 and ZeRO++, as the charts print them
    SDP4Bit     NeurIPS 2024: 128 H800 in 16 nodes, micro-batch 1 of 2048 tokens; Megatron's distributed optimizer
                (stage 1) and 4-bit weight differences with 8/4-bit gradients
    torchtitan  FSDP2 in bf16 without torch.compile and fp8 where the source says so:
                docs/performance.md: 8 nodes of 8 A100 80 GB; the network is not said, 8 x 200 Gbit/s are assumed, and
                that nothing was compiled
                benchmarks/llama3_h100_202412_torchtitan.md: 8 H100 with 96 GB at 2.4 TB/s and 500 W per node, 400
                Gbit/s each

What the sources leave open is assumed here. ZeRO++: samples of 1024 tokens, full recomputation, whose operations count,
76 layers of 12288 for 138B, 4 bits on both hops of a gradient; both hops as this program schedules them; DeepSpeed's
usual limit on parameters that are kept for their next use. SDP4Bit: eight adapters of 400 Gbit/s per node (only the
product with the network's share matters), no recomputation, nothing beside the compute (Megatron-LM's default), and the
scheme as our two hops with 4-bit weights, once per step. torchtitan: "selective" recomputation is of every second layer
or matrix: half of the layers here; what is fitted is how much of its peak an H100 reaches in products, to the run
inside one node, and nothing is fitted to A100.
"""

import statistics
from typing import Any, Literal, NamedTuple

import pytest

from kernels.formats import BlockFormat
from megazpp.model.config import GPTConfig
from megazpp.planner.cost import CALIBRATIONS, ClusterCosts, Shares
from megazpp.planner.step import PaperStep, measure
from megazpp.topology.cluster import Cluster, Device, Link, Links
from megazpp.topology.layout import Layout, plan_layout
from megazpp.training.setup import ModelSpec
from megazpp.zero.config import GatherPlan, PrecisionConfig, ReducePlan, WirePlan, ZeroConfig

Study = Literal["ZeRO++", "SDP4Bit"]
V100 = Device("V100-SXM3-32GB", 125.0, 34.36, 900.0)
H800 = Device("H800", 989.0, 85.9, 3350.0)
SHAPES = {"1.3B": (24, 2048, 16), "6.7B": (32, 4096, 32), "18B": (40, 6144, 48), "138B": (76, 12288, 96)}
VOCABULARY = 50257
REUSE_DISTANCE = 10**9  # DeepSpeed's stage3_max_reuse_distance, in parameters
LINEARS = (3, 1, 4, 4)  # of a layer, in the order of use, in units of the hidden size squared: QKV, projection, MLP


class Row(NamedTuple):
    """Measured TFLOP/s per GPU without and with the scheme."""

    study: Study
    model: str
    tp: int
    gigabits: int  # of a node's adapters together
    tokens: int  # of a micro-batch
    before: float
    after: float
    calibrates: bool = False  # shares may be fitted to it

    @property
    def sample(self) -> int:
        """Tokens of a sample."""
        return 1024 if self.study == "ZeRO++" else self.tokens


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


def errors(row: Row) -> tuple[float, float, float]:
    """Relative errors of what the planner says of both figures, in the source's convention, and of their ratio."""
    shares = CALIBRATIONS["h800" if row.study == "SDP4Bit" else "v100"].shares
    teraflops = [_flops(row) / _seconds(row, shares, quantized=quantized) * 1e-12 for quantized in (False, True)]
    before, after = teraflops[0] / row.before, teraflops[1] / row.after
    return before - 1, after - 1, after / before - 1


def gathers_to_fsdp2(row: Row) -> float:
    """DeepSpeed's gathers of weights for each of FSDP2's, which are one in forward and one in backward.

    DeepSpeed frees a matrix between its use in recomputation and in backward where the next use is too far away.
    """
    if row.study != "ZeRO++":
        return 1.0
    _, hidden, _ = SHAPES[row.model]
    again = sum(n for i, n in enumerate(LINEARS) if 2 * sum(LINEARS[i + 1 :]) * hidden**2 > REUSE_DISTANCE)
    return 1 + again / sum(LINEARS) / 2


def _seconds(row: Row, shares: Shares, *, quantized: bool) -> float:
    megatron = row.study == "SDP4Bit"
    nodes, per_node, device, domain = (16, 8, H800, 200.0) if megatron else (24, 16, V100, 150.0)
    links = Links(domain=Link(domain), network=Link(row.gigabits / 8))
    cluster = Cluster(num_nodes=nodes, ranks_per_node=per_node, device=device, links=links)
    layout, zero, wire = plan_layout(cluster, tp=row.tp, replicas=1), ZeroConfig(zero_stage=3), None
    if megatron:
        zero = ZeroConfig(zero_stage=1)
        if quantized:
            four, eight = BlockFormat(4, 128), BlockFormat(8, 128)
            wire = WirePlan(GatherPlan(four, keep=False), ReducePlan(eight, four))
    elif quantized:
        zero = ZeroConfig(zeropp=True, zero_gradient_bits=(4, 4), overlap_param_gather=True, overlap_grad_reduce=True)
    layers, hidden, heads = SHAPES[row.model]
    model = _model(
        row.sample,
        num_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        recompute_granularity=None if megatron else "full",
    )
    precision = PrecisionConfig(bf16=megatron, fp16=not megatron)
    step = PaperStep(
        ModelSpec(config=model, vocab_size=VOCABULARY, zero=zero, wire=wire, precision=precision, seed=0),
        layout,
        seq_length=row.sample,
        micro_batch_size=row.tokens // row.sample,
        costs=_GatheringCosts(layout, shares, gathers=gathers_to_fsdp2(row)),
        on_cpu=megatron,  # nothing runs beside the compute
    )
    return measure(step, 1).seconds


class _GatheringCosts(ClusterCosts):
    """Costs of a program that gathers weights so many times as often inside a node or over all ranks."""

    def __init__(self, layout: Layout, shares: Shares, *, gathers: float) -> None:
        super().__init__(layout, shares)
        self._gathers = gathers

    def collective(self, axis: str, collective: str, sent_bytes: int) -> float:
        times = self._gathers if collective == "all_gather" and axis in ("shard", "local") else 1.0
        return super().collective(axis, collective, round(times * sent_bytes))


def _flops(row: Row) -> float:
    """Narayanan et al. (arXiv 2104.04473), equation 3; three quarters of the layers' part without recomputation."""
    layers, hidden, _ = SHAPES[row.model]
    passes = 96 if row.study == "ZeRO++" else 72
    inner = passes * layers * hidden**2 * (1 + row.sample / (6 * hidden)) + 6 * VOCABULARY * hidden
    return row.tokens * inner / row.tp


@pytest.mark.slow
def test_the_rows_for_calibration_are_met_and_the_median_errors_on_the_others_are_the_recorded_ones():
    fitted, others = ([errors(row) for row in ROWS if row.calibrates == wanted] for wanted in (True, False))
    assert (len(fitted), len(others)) == (3, 10)
    assert max(abs(error) for found in fitted for error in found) < 0.05
    ratio = statistics.median(abs(found[2]) for found in others)
    figures = statistics.median(abs(error) for found in others for error in found[:2])
    assert ratio == pytest.approx(0.077, abs=0.003)  # the goal is 0.10
    assert figures == pytest.approx(0.075, abs=0.003)  # the goal is 0.15


def test_only_a_layer_beyond_deepspeed_s_reuse_distance_is_gathered_a_third_time():
    zeropp = {row.model: row for row in ROWS if row.study == "ZeRO++"}
    assert gathers_to_fsdp2(zeropp["18B"]) == 1.0
    assert gathers_to_fsdp2(zeropp["138B"]) == pytest.approx((2 + 8 / 12) / 2)  # all but the last matrix of 4/12


# ---- FSDP2 on A100 and H100 ---------------------------------------------------------------------------------------


class SpeedRow(NamedTuple):
    """Measured tokens per second and GPU."""

    name: str
    device: Device
    shape: tuple[int, ...]  # layers, hidden size, heads, groups of keys and values, FFN's size, vocabulary
    nodes: int  # of 8 GPUs
    seq: int  # tokens of a sample
    samples: int  # of a micro-batch
    recomputed: float  # part of the layers
    measured: float
    calibrates: bool = False


A100 = Device("A100-SXM4-80GB", 312.0, 85.9, 2039.0, shares="a100")
H100 = Device("H100 96GB HBM2e", 989.0, 103.0, 2400.0, shares="h100")
LLAMA3_8B, LLAMA3_70B = (32, 4096, 32, 8, 14336, 128256), (80, 8192, 64, 8, 28672, 128256)
LLAMA2_13B, LLAMA2_70B = (40, 5120, 40, 40, 13824, 32000), (80, 8192, 64, 8, 28672, 32000)
SPEED_ROWS = (
    SpeedRow("Llama 3 8B", A100, LLAMA3_8B, 8, 8192, 1, 0.5, 2904),
    SpeedRow("Llama 3 70B", A100, LLAMA3_70B, 8, 8192, 1, 1.0, 331),
    SpeedRow("Llama 2 13B", A100, LLAMA2_13B, 8, 4096, 2, 0.0, 2162),
    SpeedRow("Llama 2 13B", A100, LLAMA2_13B, 8, 4096, 2, 0.5, 1914),
    SpeedRow("Llama 2 70B", A100, LLAMA2_70B, 8, 4096, 2, 1.0, 353),
    SpeedRow("Llama 3 8B", H100, LLAMA3_8B, 1, 8192, 2, 0.5, 5762, True),
    SpeedRow("Llama 3 8B", H100, LLAMA3_8B, 16, 8192, 2, 0.5, 5605),
)


def planned_speed(row: SpeedRow) -> float:
    """Tokens per second and GPU, as planned."""
    domain, network = (300.0, 200.0) if row.device is A100 else (450.0, 400.0)
    links = Links(domain=Link(domain), network=Link(network))
    cluster = Cluster(num_nodes=row.nodes, ranks_per_node=8, device=row.device, links=links)
    layout, again = plan_layout(cluster, tp=1, replicas=1), row.recomputed > 0
    layers, hidden, heads, groups, ffn, vocabulary = row.shape
    model = _model(
        row.seq,
        num_layers=layers,
        hidden_size=hidden,
        ffn_hidden_size=ffn,
        num_attention_heads=heads,
        group_query_attention=groups < heads,
        num_query_groups=groups if groups < heads else 1,
        position_embedding_type="rope",
        normalization="RMSNorm",
        swiglu=True,
        disable_bias_linear=True,
        untie_embeddings_and_output_weights=True,
        recompute_granularity="full" if again else None,
        recompute_method="block" if again else None,
        recompute_num_layers=round(row.recomputed * layers) if again else None,
    )
    step = PaperStep(
        ModelSpec(config=model, vocab_size=vocabulary, precision=PrecisionConfig(bf16=True), seed=0),
        layout,
        seq_length=row.seq,
        micro_batch_size=row.samples,
        costs=ClusterCosts(layout, CALIBRATIONS[row.device.shares or ""].shares),
    )
    return row.seq * row.samples / measure(step, 1).seconds


def _model(sample: int, **shape: Any) -> GPTConfig:
    return GPTConfig(max_position_embeddings=sample, hidden_dropout=0.0, attention_dropout=0.0, **shape)


@pytest.mark.slow
def test_fsdp2_on_a100_and_h100_is_as_fast_as_published():
    for row in SPEED_ROWS:
        assert planned_speed(row) == pytest.approx(row.measured, rel=0.002 if row.calibrates else 0.05), row
